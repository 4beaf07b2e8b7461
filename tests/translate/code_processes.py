"""The other process of the tests of transports: `python -m tests.translate.code_processes ROLE ...` runs the function of that name."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hf_kvcaches.codec.wire.messages import message_chunks
from hf_kvcaches.translate.transports import receive_distributed, send, send_distributed
from tests.translate.code_helpers import codes_of, head_of


def two_codes(port: str) -> None:
    """Sends two codes over one connection."""
    with connection(port) as sock:
        for lengths in ((4, 3), (9,)):
            assert send(sock, codes_of(head_of(lengths))) == codes_of(head_of(lengths)).nbytes
        # The consumer is done only now: closing before could hide that it reads on to the end.
        assert sock.recv(1) == b"!"


def in_step(port: str) -> None:
    """Sends a part only after the consumer said that it has the part before."""
    codes = codes_of()
    with connection(port) as sock:

        def parts():
            for part in codes:
                assert sock.recv(1) == b"+"
                yield part.codes

        send(sock, message_chunks(codes.head, parts()))
        assert sock.recv(1) == b"+"


def connection(port: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(port)), timeout=30)


def distributed(place: str) -> None:
    """Sends codes whole, then part by part with an answer to each; then receives some."""
    start_group(place, rank=1)
    assert send_distributed(codes_of(), dst=0) == codes_of().nbytes
    codes = codes_of(head_of((9,)))

    def parts():
        for part in codes:
            dist.barrier()
            yield part.codes

    send_distributed(message_chunks(codes.head, parts()), dst=0)
    assert receive_distributed(src=0).collect().to_bytes() == codes_of(seed=3).to_bytes()
    # Then codes with a damaged part.
    start, *parts = codes_of().chunks()
    send_distributed([start, parts[1], parts[0], parts[2]], dst=0)
    dist.barrier()
    # And a process that ends in the middle.
    dist.send(torch.tensor([len(start)]), 0)
    dist.send(torch.frombuffer(bytearray(start), dtype=torch.uint8), 0)


def start_group(place: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=Path(place).as_uri(), rank=rank, world_size=2, timeout=timedelta(seconds=30))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

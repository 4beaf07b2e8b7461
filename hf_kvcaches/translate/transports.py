"""Semantic codes from one process to another, over a socket or torch.distributed, part by part: see `core/wire/transports.py`.

What is sent is either `SemanticCodes` or the bytes of `CacheTranslator.stream`, made piece by piece while the producer computes.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

import torch
import torch.distributed as dist

from hf_kvcaches.core.wire import transports
from hf_kvcaches.translate.codes import ArrivingCodes, SemanticCodes

_WHAT = "semantic codes"


def send(sock: socket.socket, codes: SemanticCodes | Iterable[bytes]) -> int:
    """Sends codes over a connected socket and returns their bytes. A message says itself where it ends: others may follow.

    Args:
        codes: All of them, or their bytes piece by piece.
    """
    return transports.send(sock, _pieces(codes), _WHAT)


def receive(sock: socket.socket) -> ArrivingCodes:
    """Codes from a connected socket: waits for their head, and the parts come as one iterates.

    Not a byte is read beyond the message, so take all parts of one before the next is received.

    Args:
        sock: A connected, blocking stream socket; its timeout counts for each wait.
    """
    return ArrivingCodes(transports.reader(sock, _WHAT), ending=f"The other side closed the connection: {_WHAT} end")


def send_distributed(
    codes: SemanticCodes | Iterable[bytes],
    dst: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> int:
    """Sends codes to a process of the group and returns their bytes.

    Args:
        codes: All of them, or their bytes piece by piece.
        dst: Rank of the process that calls `receive_distributed`.
        group: None: the default group.
        device: Where the messages lie. None: on the current GPU for nccl, else on the CPU.
    """
    return transports.send_distributed(_pieces(codes), dst, group, device, _WHAT)


def receive_distributed(src: int, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> ArrivingCodes:
    """Codes from a process of the group: waits for their head, and the parts come as one iterates.

    Iterate to the end, which takes the message that says so, before anything else is received from that process.

    Args:
        src: Rank of the process that calls `send_distributed`.
        group: As in `send_distributed`.
        device: As in `send_distributed`.
    """
    return ArrivingCodes(transports.received(src, group, device, _WHAT))


def _pieces(codes: SemanticCodes | Iterable[bytes]) -> Iterable[bytes]:
    return codes.chunks() if isinstance(codes, SemanticCodes) else codes

"""Codes go from one real process to another part by part, and a connection that fails is an error that says so."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.translate.transports import receive, receive_distributed, send, send_distributed
from tests.translate.code_helpers import codes_of, head_of, same
from tests.translate.code_processes import start_group

ROOT = Path(__file__).resolve().parents[2]
LARGE = codes_of(head_of(lengths=(300_000,)), sizes=(900_000, 1_500_000, 600_000))


@contextmanager
def process(*arguments: str):
    """A process that runs one of the roles, and must end well."""
    command, environment = [sys.executable, "-m", "tests.translate.code_processes", *arguments], os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE) as other:
        try:
            yield other
            _, said = other.communicate(timeout=60)
            assert other.returncode == 0, said.decode()
        finally:
            other.kill()


@contextmanager
def producer(role: str, *arguments: str):
    """A connected socket whose other end another process has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        with process(role, str(server.getsockname()[1]), *arguments):
            sock, _ = server.accept()
            with sock:
                sock.settimeout(30)
                yield sock


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(20)
        other.settimeout(20)
        yield one, other


# Sockets


def test_two_codes_come_from_another_process_over_one_connection():
    with producer("two_codes") as sock:
        for lengths in ((4, 3), (9,)):
            assert same(receive(sock).collect(), codes_of(head_of(lengths)))
        sock.sendall(b"!")


@pytest.mark.full
def test_a_part_is_received_before_the_producer_makes_the_next():
    """The other process waits for an answer before each part: a reader that wants more than it needs waits in vain."""
    codes, names = codes_of(), []
    with producer("in_step") as sock:
        arriving = receive(sock)
        assert arriving.head == codes.head
        sock.sendall(b"+")
        for part, expected in zip(arriving, codes, strict=False):
            assert same([part], [expected])
            names.append(part.name)
            sock.sendall(b"+")
    assert names == ["layer.1", "layer.2", "layers.3-5"]


def test_a_connection_that_is_closed_at_any_byte_is_said():
    data, start = codes_of().to_bytes(), len(next(codes_of().chunks()))
    for count in range(0, len(data), 7):
        one, other = socket.socketpair()
        with one, other:
            one.sendall(data[:count])
            one.close()
            said = "closed the connection: semantic codes end" + (" in part .* after" if count > start else " after|in part")
            with pytest.raises(ArtifactError, match=said):
                receive(other).collect()


def test_codes_larger_than_any_buffer_arrive(pair):
    one, other = pair
    sender = threading.Thread(target=send, args=(one, LARGE))
    sender.start()
    assert same(receive(other).collect(), LARGE)
    sender.join(30)


def test_a_sender_that_stops_is_said_when_the_time_is_up(pair):
    one, other = pair
    start, first, *_ = codes_of().chunks()
    other.settimeout(0.2)
    with pytest.raises(ArtifactError, match=r"did nothing for 0\.2 seconds"):
        receive(other)
    one.sendall(start + first + b"\1")
    arriving = receive(other)
    assert next(iter(arriving)).name == "layer.1"
    with pytest.raises(ArtifactError, match=r"did nothing for 0\.2 seconds"):
        list(arriving)
    # What comes too late is not taken for the start of the part.
    one.sendall(b"".join(codes_of().chunks()))
    with pytest.raises(ArtifactError, match=r"did nothing for 0\.2 seconds"):
        list(arriving)


def test_a_receiver_that_stops_or_is_gone_is_said(pair):
    one, other = pair
    one.settimeout(0.2)
    with pytest.raises(ArtifactError, match=r"Sending .* broke off .*did nothing for 0\.2 seconds"):
        send(one, LARGE)
    other.close()
    with pytest.raises(ArtifactError, match=r"Sending .* broke off after 0 bytes or more: the other side closed the connection"):
        send(one, codes_of())


def test_an_error_of_the_producer_is_its_own_error(pair):
    def pieces():
        yield next(codes_of().chunks())
        raise TimeoutError("of the model")

    with pytest.raises(TimeoutError, match="of the model"):
        send(pair[0], pieces())


def test_a_socket_that_never_waits_or_is_not_open_is_refused(pair):
    one, other = pair
    one.setblocking(False)
    for call in (lambda: send(one, codes_of()), lambda: receive(one)):
        with pytest.raises(ConfigError, match="blocking"):
            call()
    other.close()
    with pytest.raises(ArtifactError, match="the socket failed"):
        receive(other)


def test_parts_are_not_held_back_by_tcp():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        assert not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        send(sock, codes_of(head_of(names=())))
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# torch.distributed


@pytest.mark.full
def test_codes_go_between_processes_of_torch_distributed(tmp_path):
    with process("distributed", str(tmp_path / "meeting")):
        start_group(str(tmp_path / "meeting"), rank=0)
        try:
            assert same(receive_distributed(src=1).collect(), codes_of())
            arriving = receive_distributed(src=1, device="cpu")
            expected = codes_of(head_of((9,)))
            assert arriving.head == expected.head
            parts = iter(arriving)
            for part in expected:
                # The producer is held there before each part.
                dist.barrier()
                assert same([next(parts)], [part])
            assert list(parts) == []
            send_distributed(codes_of(seed=3), dst=1)
            with pytest.raises(ArtifactError, match="Part 1 of semantic codes came where part 0 was next"):
                list(receive_distributed(src=1))
            for _ in range(3):
                # What is still on its way of them: the rest of two parts and the end.
                take_message()
            dist.barrier()
            with pytest.raises(ArtifactError, match="Receiving a message from rank 1 broke off"):
                list(receive_distributed(src=1))
        finally:
            dist.destroy_process_group()


def take_message() -> None:
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, 1)
    if length:
        dist.recv(torch.empty(int(length), dtype=torch.uint8), 1)


def test_without_a_process_group_it_is_said_how_to_have_one():
    for call in (lambda: receive_distributed(0), lambda: send_distributed(codes_of(), 0)):
        with pytest.raises(ConfigError, match="init_process_group"):
            call()

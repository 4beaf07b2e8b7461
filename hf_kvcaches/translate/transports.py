"""Semantic codes from one process to another, over a socket or torch.distributed, part by part.

What is sent is either `SemanticCodes` or the pieces of a `CodesWriter`, made one by one while the producer computes. Whatever goes wrong on
the way is an `ArtifactError`; after one, a connection is at an unknown place and is of no more use.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.translate.codes import ArrivingCodes, SemanticCodes

# Of one message of torch.distributed: the receiver has to make room for it before it comes.
_LARGEST = 16 << 20


def send(sock: socket.socket, codes: SemanticCodes | Iterable[bytes]) -> int:
    """Sends codes over a connected socket and returns their bytes.

    The pieces go off at once, each on its own, so that the other side rebuilds a layer while the next is computed. For that the socket's
    TCP_NODELAY is set. A message says itself where it ends: others may follow on the same socket.

    Args:
        codes: All of them, or the pieces of a `CodesWriter`.
    """
    _check_blocking(sock)
    with contextlib.suppress(OSError):
        # Only TCP has it.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sent = 0
    for piece in _pieces(codes):
        try:
            sock.sendall(piece)
        except OSError as error:
            raise ArtifactError(f"Sending semantic codes broke off after {sent} bytes or more: {_reason(sock, error)}.") from error
        sent += len(piece)
    return sent


def receive(sock: socket.socket) -> ArrivingCodes:
    """Codes from a connected socket: waits for their head, and the parts come as one iterates.

    Not a byte is read beyond the message, so take all parts of one before the next is received.

    Args:
        sock: A connected, blocking stream socket; its timeout counts for each wait.
    """
    _check_blocking(sock)

    def read(count: int) -> bytes:
        try:
            return sock.recv(count)
        except OSError as error:
            raise ArtifactError(f"Receiving semantic codes broke off: {_reason(sock, error)}. Connect and have them sent again.") from error

    return ArrivingCodes(read, ending="The other side closed the connection: semantic codes end")


def send_distributed(
    codes: SemanticCodes | Iterable[bytes],
    dst: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> int:
    """Sends codes to a process of the group and returns their bytes.

    Each piece goes off when it is there, in messages of uint8 with their length before them; a length of 0 is the end.

    Args:
        codes: All of them, or the pieces of a `CodesWriter`.
        dst: Rank of the process that calls `receive_distributed`.
        group: None: the default group.
        device: Where the messages lie. None: on the current GPU for nccl, else on the CPU.
    """
    place, sent = _device(group, device), 0
    for piece in _pieces(codes):
        for start in range(0, len(piece), _LARGEST):
            content = bytearray(memoryview(piece)[start : start + _LARGEST])
            _send_tensor(torch.tensor([len(content)], device=place), dst, group)
            _send_tensor(torch.frombuffer(content, dtype=torch.uint8).to(place), dst, group)
            sent += len(content)
    _send_tensor(torch.tensor([0], device=place), dst, group)
    return sent


def receive_distributed(src: int, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> ArrivingCodes:
    """Codes from a process of the group: waits for their head, and the parts come as one iterates.

    Iterate to the end, which takes the message that says so, before anything else is received from that process.

    Args:
        src: Rank of the process that calls `send_distributed`.
        group: None: the default group.
        device: Where the messages lie. None: on the current GPU for nccl, else on the CPU.
    """
    return ArrivingCodes(_received(src, group, _device(group, device)))


def _received(src: int, group: dist.ProcessGroup | None, device: torch.device) -> Iterator[memoryview]:
    while length := int(_receive_tensor(torch.empty(1, dtype=torch.int64, device=device), src, group)):
        if not 0 < length <= _LARGEST:
            raise ArtifactError(f"Rank {src} sent something else than semantic codes: {length} bytes at once. Begin anew on both sides.")
        content = _receive_tensor(torch.empty(length, dtype=torch.uint8, device=device), src, group)
        yield content.cpu().numpy().data


def _pieces(codes: SemanticCodes | Iterable[bytes]) -> Iterator[bytes]:
    return codes.chunks() if isinstance(codes, SemanticCodes) else iter(codes)


def _check_blocking(sock: socket.socket) -> None:
    if sock.gettimeout() == 0:
        raise ConfigError.of("sock", "a blocking socket", "one that never waits", "Call its setblocking(True) or settimeout(seconds).")


def _reason(sock: socket.socket, error: OSError) -> str:
    if isinstance(error, TimeoutError) and sock.gettimeout() is not None:
        return f"the other side did nothing for {sock.gettimeout():g} seconds, the socket's timeout"
    if isinstance(error, ConnectionError):
        return f"the other side closed the connection ({error})"
    return f"the socket failed ({error})"


def _device(group: dist.ProcessGroup | None, device: torch.device | str | None) -> torch.device:
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("torch.distributed: expected a process group, there is none. Call torch.distributed.init_process_group first.")
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")


def _send_tensor(tensor: torch.Tensor, dst: int, group: dist.ProcessGroup | None) -> None:
    try:
        dist.send(tensor, dst, group=group)
    except RuntimeError as error:
        raise ArtifactError(f"Sending semantic codes to rank {dst} broke off: {error}. Begin anew on both sides.") from error


def _receive_tensor(tensor: torch.Tensor, src: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    try:
        dist.recv(tensor, src, group=group)
    except RuntimeError as error:
        raise ArtifactError(f"Receiving semantic codes from rank {src} broke off: {error}. Begin anew on both sides.") from error
    return tensor

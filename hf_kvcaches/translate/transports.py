"""Semantic codes from one process to another, over a socket or torch.distributed, part by part.

Whatever goes wrong on the way is an `ArtifactError`; after one, a connection is at an unknown place and is of no more use.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.translate.codes import ArrivingCodes, SemanticCodes

# Of one message of torch.distributed: the receiver has to make room for it before it comes.
_LARGEST = 16 << 20


def send(sock: socket.socket, message: SemanticCodes | Iterable[bytes]) -> int:
    """Send codes, or the bytes of `CacheTranslator.stream`, over a connected, blocking stream socket, and return how many bytes they are.

    Other codes may follow. The pieces are sent at once, each on its own: the socket's TCP_NODELAY is set.
    """
    _check_blocking(sock)
    with contextlib.suppress(OSError):  # only TCP has it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sent = 0
    for piece in _pieces_of(message):
        try:
            sock.sendall(piece)
        except OSError as error:
            raise ArtifactError(f"Sending a message broke off after {sent} bytes or more: {_reason(sock, error)}.") from error
        sent += len(piece)
    return sent


def receive(sock: socket.socket) -> ArrivingCodes:
    """Wait for the head of codes on a connected, blocking socket; parts are received by iterating, and no byte beyond the message.

    The socket's timeout counts for each wait.
    """
    _check_blocking(sock)

    def read(count: int) -> bytes:
        try:
            return sock.recv(count)
        except OSError as error:
            raise ArtifactError(f"Receiving a message broke off: {_reason(sock, error)}. Connect and have it sent again.") from error

    return ArrivingCodes(read, ending="The other side closed the connection: semantic codes end")


def send_distributed(
    message: SemanticCodes | Iterable[bytes], dst: int, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
) -> int:
    """Send codes to a process of the group and return their bytes: pieces of uint8 with their length before them, and 0 at the end.

    Args:
        dst: The rank of the process that receives.
        group: None: the default group.
        device: Where the messages lie. None: on the current GPU for nccl, else on the CPU.
    """
    place, sent = _device(group, device), 0
    what = f"Sending a message to rank {dst}"
    for piece in _pieces_of(message):
        for start in range(0, len(piece), _LARGEST):
            content = bytearray(memoryview(piece)[start : start + _LARGEST])
            _transfer(what, dist.send, torch.tensor([len(content)], device=place), dst, group)
            _transfer(what, dist.send, torch.frombuffer(content, dtype=torch.uint8).to(place), dst, group)
            sent += len(content)
    _transfer(what, dist.send, torch.tensor([0], device=place), dst, group)
    return sent


def receive_distributed(src: int, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> ArrivingCodes:
    """Wait for the head of codes from the process of rank `src`; iterate to the end before anything else is received from it."""
    what, place = f"Receiving a message from rank {src}", _device(group, device)

    def pieces() -> Iterator[memoryview]:
        while length := int(_transfer(what, dist.recv, torch.empty(1, dtype=torch.int64, device=place), src, group)):
            if not 0 < length <= _LARGEST:
                raise ArtifactError(f"Rank {src} sent no piece of a message: {length} bytes at once. Begin anew on both sides.")
            yield _transfer(what, dist.recv, torch.empty(length, dtype=torch.uint8, device=place), src, group).cpu().numpy().data

    return ArrivingCodes(pieces())


def _transfer(what: str, call: Callable[..., object], tensor: torch.Tensor, rank: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    try:
        call(tensor, rank, group=group)
    except RuntimeError as error:
        raise ArtifactError(f"{what} broke off: {error}. Begin anew on both sides.") from error
    return tensor


def _pieces_of(message: SemanticCodes | Iterable[bytes]) -> Iterable[bytes]:
    return message.chunks() if isinstance(message, SemanticCodes) else message


def _check_blocking(sock: socket.socket) -> None:
    if sock.gettimeout() == 0:
        raise ConfigError.of("sock", "a blocking socket", "one that never waits", "Call its setblocking(True) or settimeout(seconds).")


def _reason(sock: socket.socket, error: OSError) -> str:
    if isinstance(error, TimeoutError) and sock.gettimeout() is not None:
        return f"the other side did nothing for {sock.gettimeout():g} seconds, the socket's timeout"
    return f"the other side closed the connection ({error})" if isinstance(error, ConnectionError) else f"the socket failed ({error})"


def _device(group: dist.ProcessGroup | None, device: torch.device | str | None) -> torch.device:
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("torch.distributed: expected a process group, there is none. Call torch.distributed.init_process_group first.")
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")

"""Semantic codes from one process to another, over a socket or torch.distributed, part by part.

What is sent is either `SemanticCodes` or the bytes of `CacheTranslator.stream`, made while the producer computes.
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
    """Send codes over a connected socket and return their bytes; other messages may follow.

    Args:
        codes: All of them, or their bytes in pieces.
    """
    return transports.send(sock, _pieces(codes), _WHAT)


def receive(sock: socket.socket) -> ArrivingCodes:
    """Wait for the head of codes; their parts are received by iterating. No byte beyond the message is read.

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
    """Send codes to a process that calls `receive_distributed`, and return their bytes.

    Args:
        codes: All of them, or their bytes in pieces.
        dst: The rank of the process.
        group: None: the default group.
        device: Where the messages lie. None: on the current GPU for nccl, else on the CPU.
    """
    return transports.send_distributed(_pieces(codes), dst, group, device, _WHAT)


def receive_distributed(src: int, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> ArrivingCodes:
    """Wait for the head of codes from a process; iterate to the end before anything else is received from it.

    Args:
        src: The rank of the process that calls `send_distributed`.
        group: As in `send_distributed`.
        device: As in `send_distributed`.
    """
    return ArrivingCodes(transports.received(src, group, device, _WHAT))


def _pieces(codes: SemanticCodes | Iterable[bytes]) -> Iterable[bytes]:
    return codes.chunks() if isinstance(codes, SemanticCodes) else codes

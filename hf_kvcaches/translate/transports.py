"""Semantic codes from one process to another, over a socket or torch.distributed, part by part.

What is sent is either `SemanticCodes` or the bytes of `CacheTranslator.stream`, made while the producer computes.
"""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from hf_kvcaches.codec.wire.transports import reader, received, send, send_distributed
from hf_kvcaches.translate.codes import ArrivingCodes

__all__ = ["receive", "receive_distributed", "send", "send_distributed"]


def receive(sock: socket.socket) -> ArrivingCodes:
    """Wait for the head of codes on a connected, blocking socket; parts are received by iterating, and no byte beyond the message."""
    return ArrivingCodes(reader(sock), ending="The other side closed the connection: semantic codes end")


def receive_distributed(src: int, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> ArrivingCodes:
    """Wait for the head of codes from the process of rank `src`; iterate to the end before anything else is received from it."""
    return ArrivingCodes(received(src, group, device))

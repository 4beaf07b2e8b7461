"""Order between threads that compute on a GPU, each on a CUDA stream of its own. Without CUDA there is nothing to order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

Event = tuple[torch.device, torch.cuda.Event]


def mark(tensors: Iterable[torch.Tensor | None]) -> list[Event]:
    """Events behind all that this thread has queued on the devices of some tensors, for another thread to wait for."""
    devices = {tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda}
    return [(device, torch.cuda.current_stream(device).record_event()) for device in devices]


def wait_for(events: Iterable[Event], tensors: Iterable[torch.Tensor | None] = ()) -> None:
    """Lets this thread's streams wait for events; the CPU does not.

    Args:
        tensors: Made by the thread that marked the events, and used by this one from now on.
    """
    for device, event in events:
        torch.cuda.current_stream(device).wait_event(event)
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@contextlib.contextmanager
def own_stream(events: Iterable[Event]) -> Iterator[None]:
    """A stream of its own on each device of some events, behind these; other devices keep their streams."""
    with contextlib.ExitStack() as stack:
        for device, event in events:
            stream = torch.cuda.Stream(device)
            stream.wait_event(event)
            stack.enter_context(torch.cuda.stream(stream))
        yield

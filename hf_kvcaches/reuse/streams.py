"""Order the work of threads that compute on a GPU on different CUDA streams; without CUDA, do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

Event = tuple[torch.device, torch.cuda.Event]


def mark(tensors: Iterable[torch.Tensor | None]) -> list[Event]:
    """Record events behind the work that this thread has queued on the devices of some tensors, for another thread to wait for."""
    devices = {tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda}
    return [(device, torch.cuda.current_stream(device).record_event()) for device in devices]


def wait_for(events: Iterable[Event], tensors: Iterable[torch.Tensor | None] = ()) -> None:
    """Make this thread's streams, not the CPU, wait for events.

    Args:
        tensors: Tensors of the thread that recorded the events, which this thread uses from now on.
    """
    for device, event in events:
        torch.cuda.current_stream(device).wait_event(event)
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@contextlib.contextmanager
def own_stream(events: Iterable[Event]) -> Iterator[None]:
    """Switch to a new stream on each device of some events, behind these; other devices keep their streams."""
    with contextlib.ExitStack() as stack:
        for device, event in events:
            stream = torch.cuda.Stream(device)
            stream.wait_event(event)
            stack.enter_context(torch.cuda.stream(stream))
        yield

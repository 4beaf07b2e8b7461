"""Whatever interrupts a prompt that a cache takes over, and whenever: the model is as it was, and the cache is of use after reset()."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache as remembered
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from hf_kvcaches import KVCache
from hf_kvcaches.errors import ConfigError
from tests.interrupts.cases import CASES, EARLIER, answer, model


class Interrupt(BaseException):
    """What is not an `Exception`, as a KeyboardInterrupt."""


@remembered
def case(name: str) -> tuple[torch.Tensor, Callable[[], KVCache], torch.Tensor]:
    """A prompt, what makes its caches, and what is answered where nothing happens."""
    prompt, make = CASES[name]()
    cache = make()
    expected, report = answer(prompt, cache), cache.report()
    used = [getattr(report, name, 0) for name in ("reused_tokens", "translated")] + [len(getattr(cache, "probes", ()))]
    assert any(used), "the cache leaves the prompt to the model"
    return prompt, make, expected


@remembered
def before() -> tuple[Any, torch.Tensor]:
    """Of the model, before anything happens."""
    with torch.no_grad():
        return traces(), model()(EARLIER).logits


def traces() -> Any:
    """All that an interrupted pass might leave in a model."""
    hooks = [len(module._forward_hooks) for module in model().modules()]
    return list(model().state_dict()), [id(module) for module in model().modules()], hooks, model().config._attn_implementation


OF_IDENTITY = ("checksum.py", "identity.py", "fingerprint.py")


class _Functions(TorchFunctionMode):
    """Counts calls of PyTorch's functions in `count`, and interrupts at one of them.

    Those that look at the model's weights are left out: how many there are differs from request to request.
    """

    def __init__(self, stop: int) -> None:
        super().__init__()
        self.stop, self.count = stop, [0]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1).f_code
        if not caller.co_filename.endswith(OF_IDENTITY) and caller.co_name != "versions_of":
            self.count[0] += 1
            if self.count[0] == self.stop:
                raise Interrupt
        return func(*args, **(kwargs or {}))


@contextmanager
def functions(stop: int) -> Iterator[list[int]]:
    """Counts calls of PyTorch's functions, the cache's own among them, and interrupts at one of them."""
    with _Functions(stop) as mode:
        yield mode.count


@contextmanager
def modules(stop: int) -> Iterator[list[int]]:
    """Counts calls of the model's modules, and interrupts at one of them."""
    count, thread = [0], threading.get_ident()

    def called(module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            count[0] += 1
            if count[0] == stop:
                raise Interrupt

    called.only_observes = True  # or caches would leave the model alone
    handle = register_module_forward_pre_hook(called)
    try:
        yield count
    finally:
        handle.remove()


def check(name: str, cache: KVCache) -> None:
    """Asserts that nothing is left behind."""
    prompt, make, expected = case(name)
    made, logits = before()
    assert traces() == made
    with torch.no_grad():
        torch.testing.assert_close(model()(EARLIER).logits, logits, rtol=0, atol=0)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(answer(prompt, make())), daemon=True)
    thread.start()
    thread.join(120)
    assert found, "another thread waits for something that the interrupted one has"
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-4)
    if cache.get_seq_length() < prompt.shape[1]:
        try:
            found.append(answer(prompt, cache))
            # Where the exact prefill was to take over next, it has.
            assert any(torch.allclose(found[1], each, rtol=0, atol=1e-4) for each in (expected, answer(prompt, DynamicCache())))
        except ConfigError as error:
            assert "reset()" in str(error)  # noqa: PT017
    cache.reset()
    torch.testing.assert_close(answer(prompt, cache), expected, rtol=0, atol=1e-4)


def chosen(count: int, most: int, seed: int) -> list[int]:
    """Some of the calls, the first and the last among them."""
    inner = random.Random(seed).sample(range(2, count), min(most - 2, count - 2))
    return [1, *sorted(inner), count]


@pytest.mark.parametrize("counted", [modules, functions])
@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_in_any_call_leaves_nothing_behind(name: str, counted: Callable[[int], AbstractContextManager[list[int]]]) -> None:
    before()
    prompt, make, _ = case(name)
    answer(prompt, make())  # the first pass of a process reads the model's weights
    cache = make()
    with counted(0) as count:
        answer(prompt, cache)
    for stop in chosen(count[0], 6, seed=1):
        cache = make()
        with counted(stop), pytest.raises(Interrupt):
            answer(prompt, cache)
        check(name, cache)


@pytest.mark.parametrize("name", CASES)
def test_ctrl_c_at_any_time_leaves_nothing_behind(name: str) -> None:
    """The time is the processor's, so that a busy machine changes nothing."""
    before()
    prompt, make, _ = case(name)
    began = time.process_time()
    answer(prompt, make())
    longest = max(0.002, time.process_time() - began)
    draw, previous = random.Random(3), signal.signal(signal.SIGVTALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    # Processes of pytest-xdist ignore it.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupted = 0
    try:
        for number in range(200):
            if interrupted and number >= 8:  # the clock that interrupts ticks only every few milliseconds, and may miss a short answer
                break
            cache = make()
            try:
                try:
                    signal.setitimer(signal.ITIMER_VIRTUAL, draw.uniform(0.0005, longest))
                    answer(prompt, cache)
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            except KeyboardInterrupt:  # which may come when the answer is there
                interrupted += 1
                torch.set_grad_enabled(True)  # what interrupts `no_grad` itself, on its way out, leaves gradients off
            check(name, cache)
    finally:
        signal.signal(signal.SIGVTALRM, previous)
        signal.signal(signal.SIGINT, ignored)
    assert interrupted

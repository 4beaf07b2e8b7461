"""How often a segment must come again for storing it to pay, on this computer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hf_kvcaches import GrowingCache, SegmentReuseCache, SegmentStore, compat
from hf_kvcaches.core.splicing.codec import Quantization
from hf_kvcaches.errors import ConfigError


class BreakEven(NamedTuple):
    """What a segment costs on this computer, in seconds.

    Args:
        storing: Writing it into the store, after the first token.
        reusing: A prefill that takes it from the store.
        computing: A prefill without.
        times: How often it must come again for storing it to pay; infinite where reuse is no faster.
    """

    tokens: int
    storing: float
    reusing: float
    computing: float
    times: float


def break_even(storing: float, reusing: float, computing: float) -> float:
    """How often a segment must come again for storing it to pay: the cost of storing over what one reuse saves, in seconds."""
    return storing / (computing - reusing) if computing > reusing else float("inf")


def measure_break_even(
    model: PreTrainedModel,
    tokenizer: Any,
    ids: Sequence[int],
    *,
    lengths: Sequence[int] = (64, 256, 768),
    location: str = "memory",
    quantization: Quantization = "int8",
    repeats: int = 5,
) -> list[BreakEven]:
    """Measures storing, reusing and computing of segments of some lengths; medians.

    Args:
        ids: A text that segments are taken from, one after the other.
        location: As for `SegmentStore`, an empty one.
        repeats: How often each is measured, with segments of its own; one more goes before and does not count.
    """
    needed = (repeats + 1) * max(lengths)
    if len(ids) < needed:
        raise ConfigError.of("ids", f"at least {needed} tokens", len(ids), "Or measure fewer lengths or repeats.")
    rows = []
    with closing(SegmentStore(location, quantization=quantization)) as store:
        for length in lengths:
            edges = range(0, (repeats + 1) * length + 1, length)
            timed = [_timed(model, tokenizer, store, [*ids[start:stop], ids[0]]) for start, stop in pairwise(edges)][1:]
            storing, reusing, computing = (statistics.median(column) for column in zip(*timed, strict=True))
            rows.append(BreakEven(length, storing, reusing, computing, break_even(storing, reusing, computing)))
    return rows


def _timed(model: PreTrainedModel, tokenizer: Any, store: SegmentStore, ids: Sequence[int]) -> tuple[float, float, float]:
    """Seconds of storing, of a prefill with reuse and of one without."""
    clock = time.perf_counter
    store.clear()
    began = clock()
    _prefill(model, ids, GrowingCache(model.config))
    computing = clock() - began
    cache = SegmentReuseCache(model, store, tokenizer, mode="exact")
    _prefill(model, ids, cache)
    began = clock()
    store.flush()
    storing = clock() - began
    began = clock()
    _prefill(model, ids, SegmentReuseCache(model, store, tokenizer, mode="exact"))
    return storing, clock() - began, computing


@torch.no_grad()
def _prefill(model: PreTrainedModel, ids: Sequence[int], cache: Any) -> None:
    device = compat.input_device(model)
    logits = model(input_ids=torch.tensor([list(ids)], device=device), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    float(logits[0, -1, 0])  # waits for the device

"""What prompts cost: multiplications and additions in the decoder layers, and the time that these take."""

from __future__ import annotations

import math
import time
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.reuse.plan import Indices, PromptRow

LEAST_TIMED = 64  # tokens: the time of a shorter pass is that of reading the weights, not of computing


class Costs(NamedTuple):
    """The floating-point operations of one token in the matrices of each layer, and for each key that it attends to there."""

    linear: tuple[float, ...]
    scores: tuple[float, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Costs:
        """Read the costs from a model's weights and config, once. All experts of a mixture are counted."""
        if model in _COSTS:
            return _COSTS[model]
        _, _, layers = decoder_layers(model)
        linear = tuple(float(2 * sum(weight.numel() for weight in layer.parameters() if weight.ndim >= 2)) for layer in layers)
        configs = compat.decoder_config(model.config).per_layer_config
        sizes = [getattr(each, "head_dim", None) or each.hidden_size // each.num_attention_heads for each in configs]
        # A product of queries and keys, and one of weights and values.
        scores = tuple(4.0 * each.num_attention_heads * size for each, size in zip(configs, sizes, strict=True))
        return _COSTS.setdefault(model, cls(linear, scores))

    def of_tokens(self, indices: Indices, start: int = 0) -> float:
        """Return the cost of tokens, each of which attends to all up to itself, in the layers from `start` on."""
        return len(indices) * sum(self.linear[start:]) + sum(self.scores[start:]) * float((indices + 1).sum())

    def of_prompt(self, begin: int, stop: int) -> float:
        """Return the cost of a span of tokens."""
        return self.of_tokens(np.arange(begin, stop))

    def saved(self, row: PromptRow) -> float:
        """Return the operations that an executed plan saved."""
        return self.of_prompt(row.begin, len(row.ids)) - self.of_row(row)

    def of_row(self, row: PromptRow) -> float:
        """Return the cost of the tokens that a plan does not reuse, of the last token, and of those that ran once more."""
        saved = sum(self.of_tokens(span.computed, span.repair_depth) for span in row.spans if span.repair_depth is not None)
        probed = self.of_prompt(len(row.ids) - row.probed, len(row.ids))
        return self.of_tokens(np.append(row.computed, len(row.ids) - 1)) + probed - saved


class Moment(NamedTuple):
    """A point in time on a device: a time of the CPU's clock, or a CUDA event behind the work that is queued."""

    clock: float
    event: torch.cuda.Event | None

    @classmethod
    def now(cls, device: torch.device) -> Moment | None:
        """Take the time; None on other devices, which run asynchronously and have no such events."""
        if device.type == "cpu":
            return cls(time.perf_counter(), None)
        if device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return cls(0.0, event)

    def until(self, stop: Moment) -> float | None:
        """Return the seconds from this moment to `stop`, without waiting; None while the device has not reached it."""
        if self.event is None or stop.event is None:
            return stop.clock - self.clock
        return self.event.elapsed_time(stop.event) / 1000 if stop.event.query() else None


class Pace:
    """The time that this process takes for an operation of a model, from the prompts that it computed.

    The fastest prompt counts: in the time of others is what their caller did between the prompt and the next token.
    """

    def __init__(self) -> None:
        self._seconds = math.inf
        self._running: list[tuple[Moment, Moment, float]] = []  # prompts that the device may not have finished yet

    @classmethod
    def of(cls, model: PreTrainedModel) -> Pace:
        return _PACES.setdefault(model, cls())

    def add(self, start: Moment, stop: Moment, operations: float) -> None:
        """Count a prompt of so many operations."""
        self._running.append((start, stop, operations))
        self.seconds()

    def seconds(self) -> float | None:
        """Return the seconds of one operation; None before a prompt was computed."""
        running, self._running = self._running, []
        for start, stop, operations in running:
            if (seconds := start.until(stop)) is None:
                self._running.append((start, stop, operations))
            else:
                self._seconds = min(self._seconds, seconds / operations)
        return self._seconds if self._seconds < math.inf else None


_COSTS: WeakKeyDictionary[PreTrainedModel, Costs] = WeakKeyDictionary()
_PACES: WeakKeyDictionary[PreTrainedModel, Pace] = WeakKeyDictionary()

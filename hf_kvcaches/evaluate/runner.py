"""Run a model as `generate` does, with the seconds of each call."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import Cache, PreTrainedModel

from hf_kvcaches import compat


@dataclass(frozen=True)
class Seconds:
    """Wall-clock time inside the model's forward calls."""

    prefill: float  # the prompt, in one call or in chunks
    decode: float


class TextStep(NamedTuple):
    """A next-token distribution."""

    logits: torch.Tensor  # (batch, vocabulary)
    token: torch.Tensor  # what is fed next, (batch,)
    active: torch.Tensor  # the rows that had not ended before, (batch,)


class ModelRunner:
    """Runs a prompt, (batch, tokens), padded on the left as a mask says, and then one token of each row at a time."""

    def __init__(self, model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, position_ids: bool = True) -> None:
        # `generate` on a PEFT wrapper calls the model inside it, whose layers carry the adapters; only there do its forward hooks run.
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        device = ids.device if self.model.device.type == "meta" else self.model.device
        self.ids = ids.to(device)
        accepted = inspect.signature(compat.base_model(self.model).forward).parameters
        self.takes_positions = position_ids and "position_ids" in accepted
        self.always: dict[str, Any] = {"return_dict": True} | ({"logits_to_keep": 1} if "logits_to_keep" in accepted else {})
        full = torch.ones_like(self.ids) if mask is None else mask.to(device, torch.long)
        self.positions = (full.cumsum(-1) - 1).masked_fill(full == 0, 0)
        # Without padding there is nothing to mask but the future, and the model can take its fastest way.
        self.mask = None if bool(full.all()) or "attention_mask" not in accepted else full

    def prefill(self, cache: Cache, chunk: int | None = None) -> tuple[torch.Tensor, float]:
        """Run the prompt, at once or in chunks; return the last token's logits, (batch, vocabulary), and the seconds."""
        length, seconds = self.ids.shape[1], 0.0
        for start in range(0, length, chunk or length):
            stop = min(start + (chunk or length), length)
            logits, spent = self._forward(cache, self.ids[:, start:stop], self.positions[:, start:stop], stop)
            seconds += spent
        return logits, seconds

    def decode(self, cache: Cache, token: torch.Tensor, step: int) -> tuple[torch.Tensor, float]:
        """Run one token of each row, (batch,); the step is 1 for the first one behind the prompt."""
        return self._forward(cache, token[:, None], self.positions[:, -1:] + step, self.ids.shape[1] + step)

    def steps(self, cache: Cache, most: int, following: torch.Tensor | None = None) -> tuple[list[TextStep], Seconds]:
        """Continue the prompt for so many steps, or until all rows have ended, by `following`, (batch, most), or the most likely tokens."""
        steps: list[TextStep] = []
        (logits, prefill), decode = self.prefill(cache), 0.0
        active = torch.ones(len(self.ids), dtype=torch.bool, device=logits.device)
        ends, padding = self._special_tokens(logits.device)
        while True:
            token = torch.where(active, logits.argmax(-1), padding) if following is None else following[:, len(steps)]
            steps.append(TextStep(logits, token.to(self.ids.device), active))
            if following is None:
                active = active & ~torch.isin(token, ends)
            if len(steps) == most or not bool(active.any()):
                return steps, Seconds(prefill, decode)
            logits, spent = self.decode(cache, steps[-1].token, len(steps))
            decode += spent

    def _forward(self, cache: Cache, ids: torch.Tensor, positions: torch.Tensor, tokens: int) -> tuple[torch.Tensor, float]:
        """Run some ids of a text that has so many `tokens` with them."""
        kwargs: dict[str, Any] = {"input_ids": ids, **compat.cache_kwargs(self.model, cache), **self.always}
        if self.takes_positions:
            kwargs["position_ids"] = positions
        if self.mask is not None:
            # A negative number of columns cuts some off.
            kwargs["attention_mask"] = torch.nn.functional.pad(self.mask, (0, tokens - self.mask.shape[1]), value=1)
        start = _now(ids.device)
        logits = self.model(**kwargs).logits
        seconds = _now(ids.device) - start
        return logits[:, -1].clone(), seconds  # a copy, so that a whole prompt's logits are not kept alive by a view

    def _special_tokens(self, device: torch.device) -> tuple[torch.Tensor, int]:
        """The tokens that end a text, and the one that follows an end."""
        config = getattr(self.model, "generation_config", None) or self.model.config
        ends, padding = getattr(config, "eos_token_id", None), getattr(config, "pad_token_id", None)
        ends = [] if ends is None else ends if isinstance(ends, list | tuple) else [ends]
        return torch.tensor(ends, dtype=torch.long, device=device), next((token for token in (padding, *ends) if token is not None), 0)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode while open; in the end every module's mode is what it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def next_tokens(model: PreTrainedModel, prompt: Sequence[int], asked: Sequence[int], cache: Cache | None = None) -> torch.Tensor:
    """Return the logits of the asked tokens behind a prompt, (asked tokens, vocabulary), with a new cache that reuses or without one."""
    device = compat.input_device(model)
    first, then = (torch.tensor([list(ids)], device=device) for ids in (prompt, asked))
    if cache is None:
        whole = torch.cat([first, then], dim=1)
        return model(input_ids=whole, use_cache=False, logits_to_keep=len(asked) + 1).logits[0, :-1]
    head = model(input_ids=first, **compat.cache_kwargs(model, cache), logits_to_keep=1).logits
    if len(asked) == 1:
        return head[0]
    # Without `logits_to_keep` this is no prompt to the cache: it is neither looked up nor stored.
    tail = model(input_ids=then[:, :-1], **compat.cache_kwargs(model, cache)).logits
    return torch.cat([head, tail], dim=1)[0]


def synchronize(device: torch.device) -> None:
    """Wait until a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()

"""A model called as `generate` calls it, for measurements: a prompt, then a token at a time, with the seconds of each call."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from hf_kvcaches import compat


@dataclass(frozen=True)
class Seconds:
    """Wall-clock time inside the model's forward calls.

    Args:
        prefill: The prompt, in one call or in chunks.
    """

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


@dataclass(frozen=True)
class TextStep:
    """A next-token distribution of the reference run."""

    logits: torch.Tensor  # (batch, vocabulary)
    chosen: torch.Tensor  # (batch,), what was fed next
    active: torch.Tensor  # (batch,), the rows not ended before this step


class ModelRunner:
    """Calls a model the way that `generate` does."""

    def __init__(self, model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, position_ids: bool = True) -> None:
        # `generate` on a PEFT wrapper calls the model inside it, whose layers carry the adapters; only there do its forward hooks run.
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        device = ids.device if self.model.device.type == "meta" else self.model.device
        self.ids = ids.to(device)
        accepted = inspect.signature(compat.base_model(self.model).forward).parameters
        self.takes_positions = position_ids and "position_ids" in accepted
        self.always: dict[str, Any] = {"return_dict": True}
        if "logits_to_keep" in accepted:
            self.always["logits_to_keep"] = 1
        full = torch.ones_like(self.ids) if mask is None else mask.to(device, torch.long)
        self.positions = (full.cumsum(-1) - 1).masked_fill(full == 0, 0)
        # Without padding there is nothing to mask but the future, and the model can take its fastest way.
        self.mask = None if bool(full.all()) or "attention_mask" not in accepted else full

    def _forward(self, cache: Cache, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, float]:
        """The last token's logits and the seconds that they took."""
        kwargs: dict[str, Any] = {"input_ids": ids, **compat.cache_kwargs(self.model, cache), **self.always}
        if self.takes_positions:
            kwargs["position_ids"] = positions
        if mask is not None:
            kwargs["attention_mask"] = mask
        start = _now(ids.device)
        logits = self.model(**kwargs).logits
        seconds = _now(ids.device) - start
        return logits[:, -1].clone(), seconds  # a copy, so that a whole prompt's logits are not kept alive by a view

    def prefill(self, cache: Cache, chunk: int | None = None) -> tuple[torch.Tensor, float]:
        length = self.ids.shape[1]
        seconds = 0.0
        logits = self.ids.new_empty(0)
        for start in range(0, length, chunk or length):
            stop = min(start + (chunk or length), length)
            mask = None if self.mask is None else self.mask[:, :stop]
            logits, spent = self._forward(cache, self.ids[:, start:stop], self.positions[:, start:stop], mask)
            seconds += spent
        return logits, seconds

    def decode(self, cache: Cache, token: torch.Tensor, step: int) -> tuple[torch.Tensor, float]:
        """One token per row; `step` counts from 1, the first token after the prompt."""
        mask = None if self.mask is None else torch.nn.functional.pad(self.mask, (0, step), value=1)
        return self._forward(cache, token[:, None], self.positions[:, -1:] + step, mask)

    def greedy(self, cache: Cache, max_new_tokens: int) -> tuple[list[TextStep], Seconds]:
        """Continues the prompt with the most likely token each time."""
        ends, padding = self._special_tokens()
        logits, prefill = self.prefill(cache)
        active = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
        steps: list[TextStep] = []
        decode = 0.0
        while True:
            chosen = logits.argmax(-1)
            if ends is not None:
                chosen = torch.where(active, chosen, padding)
            steps.append(TextStep(logits, chosen.to(self.ids.device), active))
            if ends is not None:
                active = active & ~torch.isin(chosen, ends)
            if len(steps) == max_new_tokens or not active.any():
                return steps, Seconds(prefill, decode)
            logits, spent = self.decode(cache, steps[-1].chosen, len(steps))
            decode += spent

    def read(self, cache: Cache, following: torch.Tensor) -> tuple[list[TextStep], Seconds]:
        """Continues the prompt with given tokens, (batch, tokens)."""
        following = following.to(self.ids.device)
        active = torch.ones(len(following), dtype=torch.bool, device=following.device)
        steps: list[TextStep] = []
        logits, prefill = self.prefill(cache)
        decode = 0.0
        for index, token in enumerate(following.unbind(1)):
            if index:
                logits, spent = self.decode(cache, steps[-1].chosen, index)
                decode += spent
            steps.append(TextStep(logits, token, active))
        return steps, Seconds(prefill, decode)

    def _special_tokens(self) -> tuple[torch.Tensor | None, int]:
        config = getattr(self.model, "generation_config", None) or self.model.config
        ends = getattr(config, "eos_token_id", None)
        if ends is None:
            return None, 0
        ends = ends if isinstance(ends, list | tuple) else [ends]
        padding = getattr(config, "pad_token_id", None)
        return torch.tensor(ends, device=self.ids.device), ends[0] if padding is None else padding


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()

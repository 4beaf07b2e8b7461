"""One forward pass as the layers of a cache see it: which new tokens are real, what their queries see, and where the model put them.

A model's mask is read once in a pass, by its first layer, whatever implementation it was made for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_kvcaches.core.call import Call
from hf_kvcaches.errors import ConfigError, UnsupportedError


@dataclass(frozen=True)
class TokenMask:
    """A mask, read."""

    valid: Tensor | None = None  # True where a new token is real, (batch, tokens), or None where all are
    real_before: Tensor | None = None  # how many of the tokens before are real in each row, (batch, 1), where the mask tells
    # True where a query may look, (batch or 1, heads or 1, tokens, seen + tokens), if the mask says more than padding and causality.
    allowed: Tensor | None = None
    shown: Tensor | None = None  # True for tokens that are not hidden as padding, (batch, seen + tokens or tokens)
    ahead: bool = False  # whether tokens look at later ones, which is possible for a first block as a whole

    @classmethod
    def read(cls, mask: Any, seen: int, tokens: int, causal: bool = True) -> TokenMask:
        """Read a mask as any implementation of attention gets it.

        It is None, (batch, tokens seen) as for flash attention, (batch, heads or 1, tokens, tokens seen) as for sdpa and eager, or flex
        attention's block mask. The last dimension may be that of the new tokens alone. Without a mask, `causal` tokens see no later ones.
        """
        if mask is None:
            read = cls(ahead=not causal and tokens > 1)
        elif (allowed := _as_booleans(mask, seen + tokens, tokens)).ndim == 2:
            read = cls._of_padding(allowed, seen, tokens)
        else:
            read = cls._of_entries(allowed, seen, tokens)
        if seen:
            read.require_causal()
        return read

    @classmethod
    def _of_padding(cls, real: Tensor, seen: int, tokens: int) -> TokenMask:
        """Read a padding mask, (batch, tokens seen before + new ones, or new ones alone), which is True where a token is real."""
        valid = real[:, -tokens:]
        before = real[:, :-tokens].sum(-1, keepdim=True) if real.shape[1] == seen + tokens else None
        return cls(None if bool(valid.all()) else valid, before, shown=real)

    @classmethod
    def _of_entries(cls, allowed: Tensor, seen: int, tokens: int) -> TokenMask:
        if allowed.ndim != 4 or allowed.shape[2] != tokens or allowed.shape[3] not in (tokens, seen + tokens):
            raise UnsupportedError(
                f"attention_mask: this cache can't follow a mask of shape {tuple(allowed.shape)} for {tokens} tokens behind {seen} others. "
                "Pass a padding mask, (batch, tokens)."
            )
        newest = allowed[:, 0, -1]
        first = seen + tokens - allowed.shape[3]
        columns = torch.arange(first, seen + tokens, device=allowed.device)
        before = columns <= torch.arange(seen, seen + tokens, device=allowed.device)[:, None]
        if bool((allowed == (before & newest[:, None])[:, None]).all()):
            return cls._of_padding(newest, seen, tokens)
        if first:
            allowed = torch.nn.functional.pad(allowed, (first, 0), value=True)
        return cls(allowed=allowed, ahead=bool((allowed[..., -tokens:] & ~before[:, -tokens:]).any()))

    def with_count(self, real_before: Tensor | int, seen: int, tokens: int) -> TokenMask:
        """Return the mask with a layer's own count of real tokens before the new ones, (batch, 1), or a number for all rows."""
        if self.real_before is None:
            return self if isinstance(real_before, int) else replace(self, real_before=real_before)
        if self.shown is None or bool((self.real_before == real_before).all()):
            return self
        # It hides other tokens than were padding when they came, and is obeyed entry by entry.
        index = torch.arange(seen + tokens, device=self.shown.device)
        allowed = (index <= index[seen:, None]) & self.shown[:, None, None]
        return replace(self, allowed=allowed, real_before=torch.zeros_like(self.real_before) + real_before)

    def require_causal(self) -> None:
        if self.ahead:
            raise UnsupportedError(
                "attention_mask: the model lets tokens look at later ones (a prefix that is read in both directions, for example), which "
                "this cache can follow in a whole first prompt only. Use another cache, or leave chunks and drafts out."
            )


def padding_of(attention_mask: Tensor, tokens: int) -> Tensor | None:
    """How many slots at the start of each row hold no token, (batch,), or None for none; of a mask (batch, tokens)."""
    real = attention_mask.bool()
    if real.ndim != 2 or real.shape[1] != tokens:
        raise ConfigError.of("attention_mask", f"(batch, {tokens}), the tokens that past has seen", tuple(attention_mask.shape))
    padding = tokens - real.sum(-1)
    if not bool((real == (torch.arange(tokens, device=real.device) >= padding[:, None])).all()):
        raise ConfigError.of("attention_mask", "padding at the start of rows only", "padding elsewhere", "Pad on the left.")
    return padding if bool(padding.any()) else None


def _as_booleans(mask: Any, columns: int, tokens: int) -> Tensor:
    if hasattr(mask, "mask_mod"):  # flex attention's block mask, entry by entry
        device = mask.kv_num_blocks.device
        rows = torch.arange(mask.shape[0], device=device)[:, None, None]
        queries, keys = torch.arange(tokens, device=device)[:, None], torch.arange(columns, device=device)
        entries: Tensor = mask.mask_mod(rows, torch.zeros_like(rows), queries, keys)
        return entries.expand(mask.shape[0], tokens, columns)[:, None]
    if not isinstance(mask, Tensor):
        raise UnsupportedError(f"attention_mask: this cache can't read a mask of the type {type(mask).__name__}. Use attention 'sdpa'.")
    if mask.dtype == torch.bool or mask.ndim == 2:
        return mask.bool()
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if not bool((hidden | (mask == 0)).all()):
        raise UnsupportedError(
            "attention_mask: the model adds a bias to its scores through the mask (ALiBi, for example), and this cache keeps tokens in "
            "other slots than the mask has them. Use a cache that keeps every token (GrowingCache)."
        )
    return ~hidden


class Pass:
    """What all layers of one forward pass share; `whole` if these are all new tokens of the model's call."""

    def __init__(
        self, mask: TokenMask, position_ids: Tensor | None, seen: int, tokens: int, device: torch.device, whole: bool = True
    ) -> None:
        self.mask, self.seen, self.tokens, self.device, self.whole = mask, seen, tokens, device, whole
        self.valid, self.real_before, self.allowed = mask.valid, mask.real_before, mask.allowed
        self.position_ids = position_ids  # the model's, of the new tokens, (batch or 1, tokens), or None where it does not tell
        self._shared: dict[Any, Any] = {}

    def part(self, start: int, stop: int) -> Pass:
        """Return the pass of some of the new tokens alone."""
        if (start, stop) == (0, self.tokens):
            return self
        part: Pass = self.shared(("part", start, stop), lambda: self._part(start, stop))
        return part

    def _part(self, start: int, stop: int) -> Pass:
        self.mask.require_causal()
        valid, before = None if self.valid is None else self.valid[:, start:stop], self.real_before
        if before is not None:
            before = before + (start if self.valid is None else self.valid[:, :start].sum(-1, keepdim=True))
        allowed = None if self.allowed is None else self.allowed[:, :, start:stop, : self.seen + stop]
        mask = TokenMask(None if valid is None or bool(valid.all()) else valid, before, allowed)
        ids = None if self.position_ids is None else self.position_ids[..., start:stop]
        return Pass(mask, ids, self.seen + start, stop - start, self.device, whole=False)

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    @cached_property
    def start(self) -> int | None:
        """The first token's position where all rows count on from the same one, else None."""
        ids = self.position_ids
        if ids is None:
            return self.seen if self.real_before is None and self.valid is None else None
        first = int(ids[0, 0])
        expected = torch.arange(first, first + self.tokens, device=ids.device)
        return first if ids.numel() == 1 or bool((ids == expected).all()) else None

    def positions(self) -> Tensor:
        """The model's positions of the new tokens, (batch or 1, tokens), counted where it does not tell."""
        if self.position_ids is not None:
            return self.position_ids.to(self.device)
        steps = torch.arange(self.tokens, device=self.device)[None]
        if self.real_before is None:
            return steps + self.seen
        valid = torch.ones_like(steps) if self.valid is None else self.valid
        return (self.real_before + valid.cumsum(-1) - 1).clamp(min=0)


class Passes:
    """The forward pass that is going on, shared by the layers of one cache."""

    def __init__(self) -> None:
        self.drafts: int | None = None  # how many of the call's last tokens may be taken back, where the caller is known to draft
        self._current: Pass | None = None
        # What the pass is made of: tensors, compared by identity and not freed meanwhile, and numbers.
        self._tensors: tuple[Any, Any] = (None, None)
        self._numbers: tuple[Any, ...] = ()
        self._memos: dict[Any, tuple[Any, Any]] = {}

    def begin(self) -> None:
        self._current = None
        self._memos.clear()

    def memo(self, name: Any, source: Any, make: Callable[[], Any]) -> Any:
        """Return what another layer has made under a name of the same object in this pass, or what `make` gives; without `enter`."""
        if source is None or torch.compiler.is_compiling():  # None does not identify a pass, so nothing is shared
            return make()
        memo = self._memos.get(name)
        if memo is None or memo[0] is not source:
            memo = self._memos[name] = (source, make())
        return memo[1]

    def enter(self, call: Call, seen: int, tokens: int, device: torch.device, real_before: Tensor | int | None = None) -> Pass:
        """Return the pass that a layer is asked in: the running one, or a new one where the model has another mask for the layer."""
        running = self._running((call.mask, None), (seen, tokens, device))
        if running is None:
            mask = TokenMask.read(call.mask, seen, tokens, call.is_causal)
            tensors: dict[str, Any] = {name: value.to(device) for name, value in vars(mask).items() if isinstance(value, Tensor)}
            mask = replace(mask, **tensors)
            if real_before is not None:
                mask = mask.with_count(real_before, seen, tokens)
            running = self._current = Pass(mask, _text_positions(call.options.get("position_ids")), seen, tokens, device)
        return running

    def of_prompt(self, positions: Tensor, padding: Tensor | None, tokens: int, device: torch.device) -> Pass:
        """Return the pass of a prompt from another cache, shared by layers that pass the same tensors, which are as for `adopt`."""
        running = self._running((positions, padding), (0, tokens, device))
        if running is None:
            valid = None if padding is None else torch.arange(tokens, device=device) >= padding.to(device)[:, None]
            mask = TokenMask(None if valid is None or bool(valid.all()) else valid)
            running = self._current = Pass(mask, positions, 0, tokens, device)
        return running

    def _running(self, tensors: tuple[Any, Any], numbers: tuple[Any, ...]) -> Pass | None:
        """The running pass, if it was made of these; else None, and the next one will be."""
        if tensors[0] is not self._tensors[0] or tensors[1] is not self._tensors[1] or numbers != self._numbers:
            self._current, self._tensors, self._numbers = None, tensors, numbers
        return self._current

    def block_length(self, tokens: int, begun: bool, recording: bool) -> int:
        """How many of a call's first tokens attend as a block; those behind are decode steps, one by one, as if they had come alone."""
        if not recording:
            return 0 if tokens == 1 and begun else tokens
        if self._current is not None:
            self._current.mask.require_causal()
        drafts = self.drafts or 0
        if not begun:
            return max(1, tokens - drafts)
        # Drafts behind more than the last chosen token follow a prompt.
        return tokens - drafts if drafts and tokens - drafts > 1 else 0

    def __reduce__(self) -> tuple[type[Passes], tuple[()]]:
        return Passes, ()


def _text_positions(ids: Tensor | None) -> Tensor | None:
    """Positions of text, (batch or 1, tokens), also where a model has one for each axis of an image."""
    if ids is None or ids.ndim == 2:
        return ids
    if ids.ndim == 3 and bool((ids == ids[:1]).all()):
        return ids[0]
    raise UnsupportedError(
        "position_ids: image tokens have a position for each axis, which this cache can't follow. With EquipCache use positions='original'."
    )

"""One forward pass as the layers of a cache see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, Literal, Self, TypeVar

import torch

from hf_kvcaches.core.calls import Call
from hf_kvcaches.core.masks import TokenMask
from hf_kvcaches.errors import UnsupportedError


class Pass:
    """What all layers of one forward pass share: which new tokens are real, where the model put them, and what was made of it so far.

    Args:
        position_ids: The model's positions of the new tokens, (batch or 1, tokens), or None where it does not tell.
        whole: Whether these are all new tokens of the model's call.
    """

    def __init__(
        self, mask: TokenMask, position_ids: torch.Tensor | None, seen: int, tokens: int, device: torch.device, whole: bool = True
    ) -> None:
        self.mask, self.seen, self.tokens, self.device, self.whole = mask, seen, tokens, device, whole
        self.valid, self.real_before, self.allowed = mask.valid, mask.real_before, mask.allowed
        self.position_ids = position_ids
        self._shared: dict[Any, Any] = {}
        self._parts: dict[tuple[int, int], Self] = {}
        self._start: int | Literal[False] | None = False

    def part(self, start: int, stop: int) -> Self:
        """The pass of some of the new tokens alone."""
        if (start, stop) == (0, self.tokens):
            return self
        if (start, stop) not in self._parts:
            ids = None if self.position_ids is None else self.position_ids[..., start:stop]
            mask = self.mask.part(start, stop, self.seen)
            self._parts[start, stop] = type(self)(mask, ids, self.seen + start, stop - start, self.device, False)
        return self._parts[start, stop]

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """What another layer has made under that key already, or what `make` gives."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    @property
    def start(self) -> int | None:
        """The first token's position where all rows count on from the same one, else None."""
        if self._start is False:
            self._start = self._find_start()
        return self._start

    def _find_start(self) -> int | None:
        ids = self.position_ids
        if ids is None:
            return self.seen if self.real_before is None and self.valid is None else None
        first = int(ids[0, 0])
        if ids.numel() == 1:
            return first
        expected = torch.arange(first, first + self.tokens, device=ids.device)
        return first if bool((ids == expected).all()) else None

    def positions(self) -> torch.Tensor:
        """The model's positions of the new tokens, (batch or 1, tokens)."""
        if self.position_ids is not None:
            return self.position_ids.to(self.device)
        steps = torch.arange(self.tokens, device=self.device)[None]
        if self.real_before is None:
            return steps + self.seen
        valid = torch.ones_like(steps) if self.valid is None else self.valid
        return (self.real_before + valid.cumsum(-1) - 1).clamp(min=0)


P = TypeVar("P", bound=Pass)


class Passes(Generic[P]):
    """The forward pass that is going on, shared by the layers of one cache.

    Attributes:
        drafts: How many of the call's last tokens are drafts that may be taken back, where the caller is known to draft; else None.
    """

    def __init__(self, kind: type[P]) -> None:
        self.kind = kind
        self.drafts: int | None = None
        self._current: P | None = None
        self._arguments: tuple[Any, ...] = ()

    def begin(self) -> None:
        """Says that another pass begins."""
        self._current = None

    def enter(self, call: Call, seen: int, tokens: int, device: torch.device, real_before: torch.Tensor | int | None = None) -> P:
        """The pass that a layer is asked in: the running one, or a new one.

        Args:
            real_before: How many of the tokens before are real as far as the layer knows, (batch, 1), or a number for all rows.
        """
        mask, arguments = call.mask, (seen, tokens, device)
        # Masks by identity: a model may have several in one pass, and what is kept here is not freed meanwhile.
        if self._current is None or self._arguments[0] is not mask or self._arguments[1:] != arguments:
            read = _on(TokenMask.read(mask, seen, tokens, call.is_causal), device)
            if real_before is not None:
                read = read.known(real_before, seen, tokens)
            self._current = self.kind(read, _text_positions(call.options.get("position_ids")), seen, tokens, device)
            self._arguments = (mask, *arguments)
        return self._current

    def of_prompt(self, positions: torch.Tensor, padding: torch.Tensor | None, tokens: int, device: torch.device) -> P:
        """The pass of a prompt whose keys and values come from another cache; layers that pass the same tensors share it.

        Args:
            positions: The model's positions of all tokens, (batch or 1, tokens).
            padding: How many slots at the start of each row hold no token, (batch,), or None.
        """
        current, arguments = self._arguments[:2], (tokens, device)
        same = len(current) == 2 and current[0] is positions and current[1] is padding
        if self._current is None or not same or self._arguments[2:] != arguments:
            valid = None if padding is None else torch.arange(tokens, device=device) >= padding.to(device)[:, None]
            self._current = self.kind(TokenMask(None if valid is None or bool(valid.all()) else valid), positions, 0, tokens, device)
            self._arguments = (positions, padding, *arguments)
        return self._current

    def block_length(self, tokens: int, begun: bool, recording: bool) -> int:
        """How many of a call's tokens are one block; the others are steps, one after the other, as if they had come alone.

        Args:
            recording: Whether these may be taken back.
        """
        if not recording:
            return 0 if tokens == 1 and begun else tokens
        if self._current is not None:
            self._current.mask.require_causal()
        drafts = self.drafts
        if not begun:
            return max(1, tokens - (drafts or 0))
        # Drafts behind more than the last chosen token follow a prompt.
        return tokens - drafts if drafts and tokens - drafts > 1 else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Passes[P]:
        return Passes(self.kind)

    def __reduce__(self) -> tuple[type[Passes[P]], tuple[type[P]]]:
        return Passes, (self.kind,)


def _on(mask: TokenMask, device: torch.device) -> TokenMask:
    tensors: dict[str, Any] = {name: value.to(device) for name, value in vars(mask).items() if isinstance(value, torch.Tensor)}
    return replace(mask, **tensors)


def _text_positions(ids: torch.Tensor | None) -> torch.Tensor | None:
    """Positions of text, (batch or 1, tokens), also where a model has one for each axis of an image."""
    if ids is None or ids.ndim == 2:
        return ids
    if ids.ndim == 3 and bool((ids == ids[:1]).all()):
        return ids[0]
    raise UnsupportedError(
        "position_ids: image tokens have a position for each axis, which this cache can't follow. With EquipCache use positions='original'."
    )

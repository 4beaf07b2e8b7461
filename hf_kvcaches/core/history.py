"""The tokens that a cache has been fed, row by row: the tokens before a segment decide where it can be reused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hf_kvcaches.core.tokens import Ids, as_ids


class _PassTokens(NamedTuple):
    """The tokens of a pass, each (batch, tokens).

    Args:
        real: False for padding.
        positions: Those passed to the model, or the slots by which it numbers tokens itself.
    """

    ids: torch.Tensor
    real: torch.Tensor
    positions: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> _PassTokens:
        return _PassTokens(*(function(tensor) for tensor in self))


class History:
    """The tokens of all rows, and how many of their first ones are padding.

    Each pass is observed before it runs. After a pass that was not observed (on embeddings, with images) the history is unknown until it
    is reset or a pass begins with an empty cache.

    Args:
        positions_matter: Whether keys depend on `position_ids`.
    """

    def __init__(self, positions_matter: bool = True) -> None:
        self._positions_matter = positions_matter
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self._passes: list[_PassTokens] = []
        self._length = 0
        self._mask: torch.Tensor | None = None
        self._unmasked = False
        self.known = True

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any, seen: int) -> None:
        """Append the tokens of a pass.

        Args:
            input_ids: (batch, tokens).
            position_ids: Those passed to the model; None if it numbers tokens by the slots of the cache, padding included.
        """
        if seen == 0:
            self.reset()
        self.crop(seen)  # drops a pass that was observed and did not run to its end
        batch, tokens = input_ids.shape
        mask_fits = attention_mask is None or (isinstance(attention_mask, torch.Tensor) and attention_mask.shape == (batch, seen + tokens))
        positions_fit = position_ids is None or (isinstance(position_ids, torch.Tensor) and position_ids.ndim in (2, 3))
        if seen != self._length or (self._passes and self._passes[0].ids.shape[0] != batch) or not mask_fits or not positions_fit:
            self.known = False
            return
        if attention_mask is None:
            self._unmasked = True
            real = torch.ones_like(input_ids, dtype=torch.bool)
        else:
            real = attention_mask[:, seen:].to(input_ids.device, torch.bool, copy=True)
        numbered = torch.arange(seen, seen + tokens, device=input_ids.device)[None]
        positions = numbered if position_ids is None else _text_positions(position_ids)
        self._mask = attention_mask
        # Copies, because callers may write the next tokens into the same tensors.
        self._passes.append(_PassTokens(input_ids.clone(), real, positions.to(input_ids.device).expand(batch, -1)))
        self._length += tokens

    def _joined(self) -> _PassTokens:
        """Return the tokens of all passes as one."""
        if len(self._passes) > 1:
            self._passes = [_PassTokens(*(torch.cat(parts, dim=1) for parts in zip(*self._passes, strict=True)))]
        return self._passes[0]

    def padding(self, length: int) -> list[int] | str:
        """Return how many slots at the start of each row hold no token; or, as a sentence, why the history does not describe the prompt."""
        if not self.known or not self._passes or self._length != length:
            return "The cache does not know its tokens: a pass had embeddings or images as input, or a mask for other tokens."
        tokens = self._joined()
        real = tokens.real.cpu()
        if bool(real.all()):
            padding = [0] * real.shape[0]
        elif self._unmasked or not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
            return "The attention mask is more than padding on the left."
        else:
            padding = (~real).sum(1).tolist()
        expected = torch.arange(length)[None] - torch.tensor(padding)[:, None]
        if self._positions_matter and bool(((tokens.positions.cpu() != expected) & real).any()):
            return "The position_ids do not count each row's tokens from 0."
        # All passes must have seen the same tokens.
        agrees = self._mask is None or torch.equal(self._mask.to("cpu", torch.bool), real)
        return padding if agrees else "The attention mask hides tokens that earlier passes saw, or shows others."

    def rows(self) -> list[Ids]:
        """Return the token ids of each row, padding included."""
        return [as_ids(row) for row in self.tokens().cpu()]

    def tokens(self) -> torch.Tensor:
        """Return the token ids of all rows, (rows, slots)."""
        return self._joined().ids

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a function from (batch, n) to (batch, n), which selects or reorders the cache's rows."""
        if self._passes:
            self._passes = [self._joined().map(function)]
        if self._mask is not None:
            self._mask = function(self._mask)

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        if length < self._length:
            self._passes = [self._joined().map(lambda tensor: tensor[:, :length])]
            self._length = length
            if self._mask is not None:
                self._mask = self._mask[:, :length]


def _text_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Copy positions, (rows, tokens); -1 where the axes of an image's position differ."""
    if position_ids.ndim == 2:
        return position_ids.clone()
    return torch.where((position_ids == position_ids[:1]).all(0), position_ids[0], -1)

"""Which tokens a cache has been fed, row by row, because what stands left of a segment decides where it may be reused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hf_kvcaches.core.splicing.tokens import Ids, as_ids


class _Fed(NamedTuple):
    """The tokens of a pass, each (batch, tokens).

    Args:
        real: True where a token is none that only pads.
        positions: As the model got them, or numbered them by the slots of the cache.
    """

    ids: torch.Tensor
    real: torch.Tensor
    positions: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> _Fed:
        return _Fed(*(function(tensor) for tensor in self))


class History:
    """The tokens of all rows, and how many of their first ones are padding.

    It is told of each pass before it runs, and counts; when a pass went by untold (on embeddings, with images), it knows nothing from
    then on, until it is reset or a pass begins with an empty cache.

    Args:
        positions_matter: Whether keys depend on `position_ids`.
    """

    def __init__(self, positions_matter: bool = True) -> None:
        self._positions_matter = positions_matter
        self.reset()

    def reset(self) -> None:
        """Forgets all."""
        self._fed: list[_Fed] = []
        self._mask: torch.Tensor | None = None
        self._bare = False
        self.known = True

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any, seen: int) -> None:
        """Takes in the tokens of a pass.

        Args:
            input_ids: (batch, tokens).
            position_ids: As the model got them; None where it numbers tokens by the slots of the cache, padding included.
        """
        if seen == 0:
            self.reset()
        self.crop(seen)  # a pass that was told of and did not run to its end
        batch, tokens = input_ids.shape
        whole = attention_mask is None or (isinstance(attention_mask, torch.Tensor) and attention_mask.shape == (batch, seen + tokens))
        numbered = position_ids is None or (isinstance(position_ids, torch.Tensor) and position_ids.ndim in (2, 3))
        if seen != self._length or (self._fed and self._fed[0].ids.shape[0] != batch) or not whole or not numbered:
            self.known = False
            return
        if attention_mask is None:
            self._bare = True
            real = torch.ones_like(input_ids, dtype=torch.bool)
        else:
            real = attention_mask[:, seen:].to(input_ids.device, torch.bool, copy=True)
        positions = torch.arange(seen, seen + tokens, device=input_ids.device)[None] if position_ids is None else _of_text(position_ids)
        self._mask = attention_mask
        # Copies, because callers may write the next tokens into the same tensors.
        self._fed = [*self._fed, _Fed(input_ids.clone(), real, positions.to(input_ids.device).expand(batch, -1))]

    @property
    def _length(self) -> int:
        return sum(fed.ids.shape[1] for fed in self._fed)

    def _all(self) -> _Fed:
        """What was fed in all passes."""
        if len(self._fed) > 1:
            self._fed = [_Fed(*(torch.cat(parts, dim=1) for parts in zip(*self._fed, strict=True)))]
        return self._fed[0]

    def padding(self, length: int) -> list[int] | str:
        """How many slots at the start of each row hold no token; or why that is not all there is to know of the prompt, as a sentence."""
        if not self.known or not self._fed or self._length != length:
            return "The cache does not know its tokens: a pass brought embeddings or images, or a mask for other tokens than its own."
        fed = self._all()
        real = fed.real.cpu()
        if bool(real.all()):
            padding = [0] * real.shape[0]
        elif self._bare or not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
            return "The attention mask is more than padding on the left."
        else:
            padding = (~real).sum(1).tolist()
        expected = torch.arange(length)[None] - torch.tensor(padding)[:, None]
        if self._positions_matter and bool(((fed.positions.cpu() != expected) & real).any()):
            return "The position_ids are others than those that count a row's tokens from 0."
        # What earlier passes looked at has to be what this one looks at.
        agrees = self._mask is None or torch.equal(self._mask.to("cpu", torch.bool), real)
        return padding if agrees else "The attention mask hides tokens that earlier passes looked at, or shows others."

    def rows(self) -> list[Ids]:
        """All slots of each row, padding included."""
        return [as_ids(row) for row in self.tokens().cpu()]

    def tokens(self) -> torch.Tensor:
        """All slots of all rows, (rows, slots)."""
        return self._all().ids

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Does to the rows what is done to the cache's.

        Args:
            function: From and to (batch, n).
        """
        if self._fed:
            self._fed = [self._all().map(function)]
        if self._mask is not None:
            self._mask = function(self._mask)

    def crop(self, length: int) -> None:
        """Forgets the last tokens."""
        if length < self._length:
            self._fed = [self._all().map(lambda tensor: tensor[:, :length])]
            if self._mask is not None:
                self._mask = self._mask[:, :length]


def _of_text(position_ids: torch.Tensor) -> torch.Tensor:
    """A copy of positions, (rows, tokens); -1 where the axes of an image's position differ."""
    if position_ids.ndim == 2:
        return position_ids.clone()
    return torch.where((position_ids == position_ids[:1]).all(0), position_ids[0], -1)

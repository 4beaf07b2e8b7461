"""Which tokens a cache has been fed, row by row, because what stands left of a segment decides where it may be reused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_kvcaches.segments.records import Ids, as_ids


class History:
    """The tokens of all rows, and how many of their first ones are padding.

    It is told of each pass before it runs, and counts; when a pass went by untold (on embeddings, with images), it knows nothing from
    then on, until it is reset.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all."""
        self._parts: list[torch.Tensor] = []
        self._length = 0
        self._mask: torch.Tensor | None = None
        self.known = True

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any, seen: int) -> None:
        """Takes in the tokens of a pass.

        Args:
            input_ids: (batch, tokens).
            attention_mask: As the model got it.
            position_ids: Likewise; those of a single token are taken to be usual.
            seen: How many tokens the cache had before.
        """
        if seen != self._length or (self._parts and self._parts[0].shape[0] != input_ids.shape[0]):
            self.known = False
            return
        if seen == 0:
            self.reset()
            if attention_mask is not None and not (isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2):
                self.known = False
            else:
                self._mask = attention_mask
        self._parts.append(input_ids)
        self._length += input_ids.shape[1]
        if position_ids is not None and input_ids.shape[1] > 1 and not self._usual(position_ids, seen):
            self.known = False

    def _usual(self, positions: Any, seen: int) -> bool:
        """Whether a pass has the positions that follow from the rows and their padding."""
        padding = self.padding(self._length)
        if padding is None or not isinstance(positions, torch.Tensor) or positions.ndim != 2:
            return False
        expected = torch.arange(seen, self._length)[None] - torch.tensor(padding)[:, None]
        return bool(((positions.cpu() == expected) | (expected < 0)).all())

    def padding(self, length: int) -> list[int] | None:
        """How many slots at the start of each row hold no token; None where that is not all there is to the mask, or too little is known.

        Args:
            length: How many slots each row should have.
        """
        if not self.known or not self._parts or self._length != length:
            return None
        if self._mask is None:
            return [0] * self._parts[0].shape[0]
        mask = self._mask.to(torch.bool).cpu()
        if mask.shape[1] > length or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
            return None
        return (~mask).sum(1).tolist()

    def rows(self) -> list[Ids]:
        """All slots of each row, padding included."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts, dim=1)]
        return [as_ids(row) for row in self._parts[0].cpu()]

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Does to the rows what is done to the cache's.

        Args:
            function: From and to (batch, n).
        """
        if self._parts:
            self._parts = [function(torch.cat(self._parts, dim=1))]
        if self._mask is not None:
            self._mask = function(self._mask)

    def crop(self, length: int) -> None:
        """Forgets the last tokens.

        Args:
            length: How many stay.
        """
        if length < self._length and self._parts:
            self._parts = [torch.cat(self._parts, dim=1)[:, :length]]
            self._length = length
            if self._mask is not None and length < self._mask.shape[1]:
                self._mask = self._mask[:, :length]

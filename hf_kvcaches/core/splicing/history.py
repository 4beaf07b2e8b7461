"""Which tokens a cache has been fed, row by row, because what stands left of a segment decides where it may be reused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_kvcaches.core.splicing.tokens import Ids, as_ids


class History:
    """The tokens of all rows, and how many of their first ones are padding.

    It is told of each pass before it runs, and counts; when a pass went by untold (on embeddings, with images), it knows nothing from
    then on, until it is reset or a pass begins with an empty cache.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all."""
        self._parts: list[torch.Tensor] = []
        self._real: list[torch.Tensor] = []
        self._length = 0
        self._mask: torch.Tensor | None = None
        self._bare = False
        self.known = True

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any, seen: int) -> None:
        """Takes in the tokens of a pass.

        Args:
            input_ids: (batch, tokens).
            attention_mask: As the model got it.
            position_ids: Likewise; those of a single token are taken to be usual.
            seen: How many tokens the cache had before.
        """
        if seen == 0:
            self.reset()
        batch, tokens = input_ids.shape
        whole = attention_mask is None or (
            isinstance(attention_mask, torch.Tensor) and attention_mask.shape == (batch, self._length + tokens)
        )
        if seen != self._length or (self._parts and self._parts[0].shape[0] != batch) or not whole:
            self.known = False
            return
        # Copies, because callers may write the next tokens into the same tensors.
        self._parts.append(input_ids.clone())
        if attention_mask is None:
            self._bare = True
            self._real.append(torch.ones_like(input_ids, dtype=torch.bool))
        else:
            self._real.append(attention_mask[:, seen:].to(input_ids.device, torch.bool, copy=True))
        self._mask = attention_mask
        self._length += tokens
        if position_ids is not None and tokens > 1 and not self._usual(position_ids, seen):
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
        self._real = [torch.cat(self._real, dim=1)]
        real = self._real[0].cpu()
        if bool(real.all()):
            padding = [0] * real.shape[0]
        elif self._bare or not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
            return None
        else:
            padding = (~real).sum(1).tolist()
        # What earlier passes looked at has to be what this one looks at.
        agrees = self._mask is None or torch.equal(self._mask.to("cpu", torch.bool), real)
        return padding if agrees else None

    def rows(self) -> list[Ids]:
        """All slots of each row, padding included."""
        return [as_ids(row) for row in self.tokens().cpu()]

    def tokens(self) -> torch.Tensor:
        """All slots of all rows, (rows, slots)."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts, dim=1)]
        return self._parts[0]

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Does to the rows what is done to the cache's.

        Args:
            function: From and to (batch, n).
        """
        if self._parts:
            self._parts = [function(torch.cat(self._parts, dim=1))]
            self._real = [function(torch.cat(self._real, dim=1))]
        if self._mask is not None:
            self._mask = function(self._mask)

    def crop(self, length: int) -> None:
        """Forgets the last tokens.

        Args:
            length: How many stay.
        """
        if length < self._length and self._parts:
            self._parts = [torch.cat(self._parts, dim=1)[:, :length]]
            self._real = [torch.cat(self._real, dim=1)[:, :length]]
            self._length = length
            if self._mask is not None:
                self._mask = self._mask[:, :length]

"""The tokens that a cache was fed, as far as they are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_kvcaches.core.refusal import Refusal

Ids = npt.NDArray[np.uint32]
# What is kept of each token, each a row of the log's buffer.
_IDS, _REAL, _POSITIONS = range(3)


class TokenLog:
    """The first tokens of all rows, with what a model was told of them: which are padding, and their positions.

    They lie in one buffer, (3, rows, capacity), on the device of the ids. It grows ahead of need, so a token costs the same in a long
    text as in a short one, and nothing waits for a GPU before someone reads.

    Args:
        positions_matter: Whether keys depend on `position_ids`.
    """

    def __init__(self, positions_matter: bool = True) -> None:
        self._positions_matter = positions_matter
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self._buffer: torch.Tensor | None = None
        self._length = 0
        self._mask: torch.Tensor | None = None  # of the last pass
        self._had_no_mask = False  # of any pass: it saw padding as tokens

    def __len__(self) -> int:
        """How many of the cache's first tokens are known."""
        return self._length

    @property
    def ids(self) -> torch.Tensor:
        """The token ids, (rows, tokens)."""
        return torch.empty(0, 0, dtype=torch.long) if self._buffer is None else self._buffer[_IDS, :, : self._length]

    def rows(self) -> list[Ids]:
        """The token ids of each row, padding included."""
        return list(self.ids.cpu().numpy().astype(np.uint32))

    def append(self, ids: torch.Tensor, seen: int, attention_mask: Any = None, position_ids: Any = None) -> None:
        """Add the tokens of a pass, (rows, tokens); those behind unknown ones, and with a mask that is none of tokens, are unknown.

        Args:
            seen: How many tokens the cache had before; what is logged behind them belongs to a pass that failed.
            attention_mask: 1 where a token is real, (rows, tokens seen and new ones), or None.
            position_ids: Those passed to the model; None if it numbers tokens by the slots of the cache, padding included.
        """
        if seen == 0:
            self.reset()
        if seen < self._length:
            self.crop(seen)
        rows, tokens = ids.shape
        stop = seen + tokens
        mask_fits = attention_mask is None or (isinstance(attention_mask, torch.Tensor) and attention_mask.shape == (rows, stop))
        positions_fit = position_ids is None or (isinstance(position_ids, torch.Tensor) and position_ids.ndim in (2, 3))
        if self._length != seen or (self._buffer is not None and self._buffer.shape[1] != rows) or not mask_fits or not positions_fit:
            return
        if self._buffer is None or self._buffer.shape[2] < stop:
            with torch.inference_mode(False):  # its own tensors could not be written to outside of it
                grown = torch.zeros(3, rows, stop + max(64, stop // 2), dtype=torch.long, device=ids.device)
            if self._buffer is not None:
                grown[:, :, :seen] = self._buffer[:, :, :seen]
            self._buffer = grown
        new = self._buffer[:, :, seen:stop]
        new[_IDS] = ids
        new[_REAL] = 1 if attention_mask is None else attention_mask[:, seen:]
        new[_POSITIONS] = torch.arange(seen, stop, device=new.device) if position_ids is None else _of_text(position_ids)
        self._mask, self._had_no_mask = attention_mask, self._had_no_mask or attention_mask is None
        self._length = stop

    def padding(self, length: int) -> list[int] | Refusal:
        """Return how many slots at the start of each row hold no token; or why the log does not describe the prompt of that length."""
        if self._buffer is None or self._length != length:
            return Refusal("The cache does not know its tokens: a pass had embeddings or images as input, or a mask for other tokens.")
        _, real, positions = self._buffer[:, :, :length].cpu()
        real = real != 0
        if bool(real.all()):
            padding = [0] * real.shape[0]
        elif self._had_no_mask or not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
            return Refusal("The attention mask is more than padding on the left.")
        else:
            padding = (~real).sum(1).tolist()
        expected = torch.arange(length)[None] - torch.tensor(padding)[:, None]
        if self._positions_matter and bool(((positions != expected) & real).any()):
            return Refusal("The position_ids do not count each row's tokens from 0.")
        # All passes must have seen the same tokens.
        agrees = self._mask is None or torch.equal(self._mask.to("cpu", torch.bool), real)
        return padding if agrees else Refusal("The attention mask hides tokens that earlier passes saw, or shows others.")

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Select or reorder the rows as those of the cache."""
        if self._buffer is not None:
            with torch.inference_mode(False):
                self._buffer = torch.stack([function(part) for part in self._buffer])
        if self._mask is not None:
            self._mask = function(self._mask)

    def crop(self, length: int) -> None:
        """Forget all but the first tokens."""
        if length < self._length:
            self._length = length
            if self._mask is not None:
                self._mask = self._mask[:, :length]


def _of_text(position_ids: torch.Tensor) -> torch.Tensor:
    """Positions, (rows, tokens); -1 where the axes of an image's position differ."""
    if position_ids.ndim == 2:
        return position_ids
    return torch.where((position_ids == position_ids[:1]).all(0), position_ids[0], -1)

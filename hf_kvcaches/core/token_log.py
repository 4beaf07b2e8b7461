"""The tokens that a cache was fed, as far as they are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_kvcaches.core.refusal import Refusal

Ids = npt.NDArray[np.uint32]
_MOST_PASSES = 64  # that are kept apart


class TokenLog:
    """The first tokens of all rows, with what a model was told of them: which are padding, and their positions.

    They are kept as passes brought them, (3, rows, tokens), on the device of the ids. Nothing waits for a GPU before someone reads.
    """

    def __init__(self, positions_matter: bool = True) -> None:
        self._positions_matter = positions_matter
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self._passes: list[torch.Tensor] = []
        self._length = 0
        self._mask: torch.Tensor | None = None  # of the last pass
        self._had_no_mask = False  # of any pass: it saw padding as tokens

    def __len__(self) -> int:
        """How many of the cache's first tokens are known."""
        return self._length

    def _joined(self) -> torch.Tensor:
        """Token ids, whether they are real, and positions, (3, rows, tokens)."""
        if len(self._passes) > 1:
            self._passes = [torch.cat(self._passes, -1)]
        return self._passes[0] if self._passes else torch.empty(3, 0, 0, dtype=torch.long)

    @property
    def ids(self) -> torch.Tensor:
        """The token ids, (rows, tokens)."""
        return self._joined()[0]

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
        self.crop(seen)
        rows, tokens = ids.shape
        stop = seen + tokens
        mask_fits = attention_mask is None or (isinstance(attention_mask, torch.Tensor) and attention_mask.shape == (rows, stop))
        positions_fit = position_ids is None or (isinstance(position_ids, torch.Tensor) and position_ids.ndim in (2, 3))
        if self._length != seen or (seen and self._passes[0].shape[1] != rows) or not mask_fits or not positions_fit:
            return
        real = torch.ones_like(ids) if attention_mask is None else attention_mask[:, seen:]
        if position_ids is None:
            position_ids = torch.arange(seen, stop, device=ids.device)
        elif position_ids.ndim == 3:  # with an axis for each of an image's positions, which are unknown where these differ
            position_ids = torch.where((position_ids == position_ids[:1]).all(0), position_ids[0], -1)
        parts = (part.to(ids.device, torch.long).expand(rows, tokens) for part in (ids, real, position_ids))
        joined = torch.stack([*parts])
        self._mask, self._had_no_mask = attention_mask, self._had_no_mask or attention_mask is None
        self._length = stop  # before the tokens: after an interrupt in between, the next pass forgets what is behind those seen
        self._passes.append(joined)
        if len(self._passes) > _MOST_PASSES:
            self._joined()

    def padding(self, length: int) -> list[int] | Refusal:
        """How many slots at the start of each row hold no token; or why the log does not describe the prompt of that length."""
        if not self._length or self._length != length:
            return Refusal("The cache does not know its tokens: a pass had embeddings or images as input, or a mask for other tokens.")
        _, real, positions = self._joined().cpu()
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
        if self._passes:
            self._passes = [torch.stack([function(part) for part in self._joined()])]
        if self._mask is not None:
            self._mask = function(self._mask)

    def crop(self, length: int) -> None:
        """Forget all but the first tokens."""
        if length < self._length:
            self._passes, self._length = [self._joined()[..., :length]], length
            if self._mask is not None:
                self._mask = self._mask[:, :length]

"""What a consumer makes of a token wherever it stands: kept, so that tokens that come again need not be run again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

# Of one table. Those of a model of 8 billion parameters have place for 5,000 tokens.
MOST_BYTES = 2**26

Rows = Sequence[torch.Tensor]


class TokenTable:
    """Some tensors' rows for each token that came so far.

    When it is full it starts anew with the tokens at hand: texts have few different ones, and the common ones are soon back.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        self._place = torch.full((tokens,), -1, device=device)
        self._kept: list[torch.Tensor] = []
        self._used = 0
        self._lock = threading.Lock()

    def look(self, ids: torch.Tensor, run: Callable[[torch.Tensor], Rows]) -> Rows:
        """The rows of some tokens, those of all tensors in the same order.

        Args:
            ids: Different ones, (tokens,).
            run: Called with those that are not known, if any: makes their rows.
        """
        with self._lock:
            places = self._place[ids]
            unknown = places < 0
            if not bool(unknown.any()):
                return [kept.index_select(0, places) for kept in self._kept]
            new = ids[unknown]
            made = run(new)
            found = made
            if len(new) < len(ids):
                found = [part.new_empty(len(ids), *part.shape[1:]) for part in made]
                for part, kept, fresh in zip(found, self._kept, made, strict=True):
                    part[~unknown], part[unknown] = kept[places[~unknown]], fresh
            self._keep(new, made)
            return found

    def _keep(self, ids: torch.Tensor, made: Rows) -> None:
        most = MOST_BYTES // sum(part[0].nbytes for part in made)
        if len(ids) > most:
            return
        if self._used + len(ids) > most:
            self._place.fill_(-1)
            self._kept, self._used = [], 0
        end = self._used + len(ids)
        if not self._kept or end > len(self._kept[0]):
            grown = [part.new_empty(min(most, max(end, 2 * self._used)), *part.shape[1:]) for part in made]
            for part, kept in zip(grown, self._kept, strict=False):
                part[: self._used] = kept[: self._used]
            self._kept = grown
        for kept, fresh in zip(self._kept, made, strict=True):
            kept[self._used : end] = fresh
        self._place[ids] = torch.arange(self._used, end, device=ids.device)
        self._used = end

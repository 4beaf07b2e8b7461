"""Taking tokens back: drafts that were refused."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from hf_kvcaches.equip.frames import TurningPass
from hf_kvcaches.errors import UnsupportedError

if TYPE_CHECKING:
    from hf_kvcaches.core.calls import Call
    from hf_kvcaches.equip.layer import EquipLayer


class Recording:
    """What came since the last crop, and the layer as it was before.

    What was overwritten can't be worked out backwards (scores are sums, far keys were turned), so the layer is put back as it was
    and takes what stays once more: the same operations on the same numbers, bit for bit what it would be had the drafts never come.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None
        self._calls: list[tuple[TurningPass, torch.Tensor, torch.Tensor, torch.Tensor, Call, int]] = []

    @property
    def tokens(self) -> int:
        """How many can be taken back."""
        return sum(running.tokens for running, *_ in self._calls)

    def note(
        self, layer: EquipLayer, running: TurningPass, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, block: int
    ) -> None:
        """Remembers a call before the layer takes it."""
        if self._before is None:
            self._before = layer.snapshot()
        self._calls.append((running, query, keys, values, call, block))

    def take_back(self, layer: EquipLayer, tokens: int) -> None:
        """Undoes the last tokens, and forgets how to undo those before them.

        Args:
            tokens: How many; 0 only forgets.
        """
        before, calls, stay = self._before, self._calls, self.tokens - tokens
        if stay < 0:
            raise UnsupportedError(
                f"crop: {tokens} tokens are to be taken back, and EquipCache remembers {self.tokens}: those since the last crop. "
                "Call activate_past_recording() before the tokens that may be taken back, or build the cache anew from the shorter text."
            )
        self.clear()
        if not tokens or before is None:
            return
        seen = layer.seen - tokens
        layer.restore(before)
        for running, query, keys, values, call, block in calls:
            count = min(stay, running.tokens)
            if count:
                span = slice(0, count)
                layer.take(query[:, :, span], keys[:, :, span], values[:, :, span], call, running.part(0, count), min(block, count))
            stay -= count
        layer.seen = seen

    def clear(self) -> None:
        """Forgets everything; what comes is recorded anew."""
        self._before, self._calls = None, []

    def __deepcopy__(self, memo: dict[int, Any]) -> Recording:
        copied = Recording()
        copied._calls = list(self._calls)  # whose tensors nobody writes to, as a layer does to those that it is given back
        if self._before is not None:
            copied._before = {
                name: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value) for name, value in self._before.items()
            }
        return copied

    def __reduce__(self) -> tuple[type[Recording], tuple[()]]:
        return Recording, ()

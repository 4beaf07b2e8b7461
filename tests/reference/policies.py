"""One reference for each policy: the paper's scores, used as `EquipCache` uses them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tests.reference.oracles import Head, ReferenceCache, ReferenceLayer, Row


class StreamingLayer(ReferenceLayer):
    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        for head in row.heads:
            head.scores = head.ranks.double()  # float32 would lose count at 2**24


class StreamingReference(ReferenceCache):
    """Sinks and the newest tokens, shifted and appended."""

    layer_class = StreamingLayer
    default_sinks = 4

    def default_recent(self) -> int:
        return self.budget - self.sinks


class H2OLayer(ReferenceLayer):
    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        for head, received in zip(row.heads, attention, strict=True):
            head.scores = head.scores + received.sum(0)


class H2OReference(ReferenceCache):
    """Heavy hitters: the attention that a token received from all queries since it came; half of the budget for the newest tokens."""

    layer_class = H2OLayer

    def default_recent(self) -> int:
        return max(1, min(self.budget // 2, self.budget - self.sinks))


class TOVALayer(ReferenceLayer):
    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        last = torch.stack([received[-1] for received in attention]).mean(0)
        for head in row.heads:
            head.scores = last


class TOVAReference(ReferenceCache):
    """The attention of the last query, one choice for all heads of a layer. The last token of a block always stays."""

    layer_class = TOVALayer

    def make_layer(self, layer_idx: int) -> ReferenceLayer:
        layer = super().make_layer(layer_idx)
        layer.recent = max(layer.recent, 1)
        return layer


class SnapKVLayer(ReferenceLayer):
    first_score = torch.inf

    def __init__(self, cache: SnapKVReference, *args: Any) -> None:
        super().__init__(cache, *args)
        self.window, self.kernel_size = cache.window, cache.kernel_size

    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        # A block is an observation of its own, also where it is shorter than the window.
        row.observed = self.window if block else row.observed + 1
        for head, received in zip(row.heads, attention, strict=True):
            head.received = received[-self.window :].sum(0) + (0 if block else head.received)
            if row.observed == self.window:
                head.scores = self._pooled(head)
                head.received = torch.zeros(len(head))
        row.observed %= self.window

    def idle(self, row: Row) -> None:
        row.observed = (row.observed + 1) % self.window
        if row.observed == 0:
            for head in row.heads:
                head.scores, head.received = self._pooled(head), torch.zeros(len(head))

    def _pooled(self, head: Head) -> torch.Tensor:
        scores = torch.full((len(head),), torch.inf)
        earlier = len(head) - self.window
        if earlier > 0:
            received = (head.received / self.window)[None, :earlier]
            scores[:earlier] = functional.avg_pool1d(received, self.kernel_size, 1, self.kernel_size // 2)[0]
        return scores


class SnapKVReference(ReferenceCache):
    """The pooled attention of the last queries, of a prompt and each time that a window of tokens has come."""

    layer_class = SnapKVLayer

    def __init__(self, model: Any, *, window: int = 32, kernel_size: int = 7, **settings: Any) -> None:
        self.window, self.kernel_size = window, kernel_size
        super().__init__(model, **settings)

    def default_recent(self) -> int:
        return self.window


class KeyDiffLayer(ReferenceLayer):
    """Scores all tokens after a block, and again after each so many steps; new ones stay until then."""

    first_score = torch.inf

    def __init__(self, cache: KeyDiffReference, *args: Any) -> None:
        super().__init__(cache, *args)
        self.interval = cache.interval

    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        row.observed = 0 if block else (row.observed + 1) % self.interval
        if row.observed == 0:
            for head in row.heads:
                head.scores = self._worth(head)

    def idle(self, row: Row) -> None:
        self.rescore(row, [], block=False)

    def _worth(self, head: Head) -> torch.Tensor:
        keys = head.given.float()
        if self.compact:
            keys = self.geometry.rotate(head.keys[None, None], torch.arange(len(head)))[0, 0].float()
        keys = functional.normalize(keys, dim=-1)
        return -functional.cosine_similarity(keys, keys.mean(0), dim=-1)


class KeyDiffReference(ReferenceCache):
    """Keys that point elsewhere than their mean, as attention sees them, stay: scored after a prompt and each `interval` steps."""

    layer_class = KeyDiffLayer

    def __init__(self, model: Any, *, interval: int = 1, **settings: Any) -> None:
        self.interval = interval
        super().__init__(model, **settings)

    def default_recent(self) -> int:
        return max(1, min(64, (self.budget - self.sinks) // 4))

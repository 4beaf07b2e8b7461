"""One reference for each policy: the paper's scores, and the paper's way to use them unless an option says otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn import functional

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError
from tests.reference.oracles import Head, ReferenceCache, ReferenceLayer, Row

EQUIP: dict[str, Any] = {"evict_first": True, "while_decoding": True, "per_query_head": False}
"""The options of `EquipCache`, for all policies."""


class StreamingLayer(ReferenceLayer):
    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        for head in row.heads:
            head.scores = head.ranks.double()  # float32 would lose count at 2**24


class StreamingReference(ReferenceCache):
    """Sinks and the newest tokens, shifted and appended. A step makes room before it attends.

    Args:
        model: As in `ReferenceCache`.
        rerotate: Another word for the positions: True for compact ones (all keys are rotated for each query), False for original ones.
        positions: As in `ReferenceCache`.
        **settings: As in `ReferenceCache`.
    """

    layer_class = StreamingLayer
    paper: ClassVar[dict[str, Any]] = {"sinks": 4, "evict_first": True}

    def __init__(self, model: Any, *, rerotate: bool | None = None, positions: str | None = None, **settings: Any) -> None:
        meant = None if rerotate is None else "compact" if rerotate else "original"
        if None not in (meant, positions) and meant != positions:
            raise ConfigError.of("rerotate", f"what positions={positions!r} says", rerotate, "Give one of the two.")
        super().__init__(model, positions=positions or meant or "compact", **settings)

    def default_recent(self) -> int:
        return self.budget - self.sinks


class H2OLayer(ReferenceLayer):
    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        for head, received in zip(row.heads, attention, strict=True):
            head.scores = head.scores + received.sum(0)


class H2OReference(ReferenceCache):
    """Heavy hitters: the attention that a token received from all queries since it came; half of the budget for the newest tokens."""

    layer_class = H2OLayer
    paper: ClassVar[dict[str, Any]] = {"per_query_head": True}

    def default_recent(self) -> int:
        return max(1, min(self.budget // 2, self.budget - self.sinks))


class TOVALayer(ReferenceLayer):
    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        last = torch.stack([received[-1] for received in attention]).mean(0)
        for head in row.heads:
            head.scores = last


class TOVAReference(ReferenceCache):
    """The attention of the last query, one choice for all heads of a layer.

    Args:
        model: As in `ReferenceCache`.
        keep_last: Whether the last token of a block always stays.
        **settings: As in `ReferenceCache`.
    """

    layer_class = TOVALayer

    def __init__(self, model: Any, *, keep_last: bool = False, **settings: Any) -> None:
        self.keep_last = keep_last
        super().__init__(model, **settings)

    def make_layer(self, layer_idx: int) -> ReferenceLayer:
        layer = super().make_layer(layer_idx)
        layer.recent = max(layer.recent, int(self.keep_last))
        return layer


class SnapKVLayer(ReferenceLayer):
    first_score = torch.inf

    def __init__(self, cache: SnapKVReference, *args: Any) -> None:
        super().__init__(cache, *args)
        self.window, self.kernel_size, self.pooling = cache.window, cache.kernel_size, cache.pooling

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
            pool = functional.max_pool1d if self.pooling == "max" else functional.avg_pool1d
            scores[:earlier] = pool((head.received / self.window)[None, :earlier], self.kernel_size, 1, self.kernel_size // 2)[0]
        return scores


class SnapKVReference(ReferenceCache):
    """The pooled attention of a prompt's last queries. While decoding, the paper's cache grows.

    Args:
        model: As in `ReferenceCache`.
        window: How many queries observe, and how many tokens are recent by default. With `while_decoding`, tokens are observed again
            each time as many have come.
        kernel_size: Of the pool over neighbours; odd.
        pooling: "max", as in the paper's experiments, or "mean", the default of its code.
        **settings: As in `ReferenceCache`.
    """

    layer_class = SnapKVLayer
    paper: ClassVar[dict[str, Any]] = {"while_decoding": False, "per_query_head": True}

    def __init__(self, model: Any, *, window: int = 32, kernel_size: int = 7, pooling: str = "max", **settings: Any) -> None:
        if kernel_size % 2 == 0:
            raise ConfigError.of("kernel_size", "an odd number", kernel_size)
        if pooling not in ("max", "mean"):
            raise ConfigError.of("pooling", "'max' or 'mean'", pooling)
        self.window, self.kernel_size, self.pooling = window, kernel_size, pooling
        super().__init__(model, **settings)

    def default_recent(self) -> int:
        return self.window


class PeriodicLayer(ReferenceLayer):
    """Scores all tokens after a block, and again after each so many steps; new ones stay until then."""

    first_score = torch.inf

    def __init__(self, cache: PeriodicReference, *args: Any) -> None:
        super().__init__(cache, *args)
        self.cache, self.block = cache, cache.block

    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        row.observed = 0 if block else (row.observed + 1) % self.cache.interval
        if row.observed == 0:
            for head in row.heads:
                head.scores = self.cache.worth(head, self.geometry)

    def idle(self, row: Row) -> None:
        self.rescore(row, [], block=False)


class PeriodicReference(ReferenceCache):
    """The base of what is scored by keys and values alone.

    Args:
        model: As in `ReferenceCache`.
        interval: Steps between two scorings while decoding.
        few_recent: Whether a quarter of the budget, at most 64 tokens, holds the newest ones.
        block: Tokens of a prompt that are scored and pruned at a time; None for all.
        **settings: As in `ReferenceCache`.
    """

    layer_class = PeriodicLayer

    def __init__(self, model: Any, *, interval: int = 1, few_recent: bool = False, block: int | None = None, **settings: Any) -> None:
        self.interval, self.few_recent, self.block = interval, few_recent, block
        super().__init__(model, **settings)

    def default_recent(self) -> int:
        return max(1, min(64, (self.budget - self.sinks) // 4)) if self.few_recent else 0

    def worth(self, head: Head, geometry: RotaryGeometry) -> torch.Tensor:
        raise NotImplementedError


class KeyDiffReference(PeriodicReference):
    """Keys that point elsewhere than their mean, as attention sees them, stay. The paper scores after each token, prompts in blocks.

    Args:
        model: As in `ReferenceCache`.
        block: As in `PeriodicReference`.
        **settings: As in `PeriodicReference`.
    """

    def __init__(self, model: Any, *, block: int | None = 128, **settings: Any) -> None:
        super().__init__(model, block=block, **settings)

    def worth(self, head: Head, geometry: RotaryGeometry) -> torch.Tensor:
        keys = head.given.float()
        if self.positions == "compact":
            keys = geometry.rotate(head.keys[None, None], torch.arange(len(head)))[0, 0].float()
        keys = functional.normalize(keys, dim=-1)
        return -functional.cosine_similarity(keys, keys.mean(0), dim=-1)

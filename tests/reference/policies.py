"""One reference for each policy: what it scores tokens by, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError
from tests.reference.oracles import Head, ReferenceCache, ReferenceLayer, Row


class StreamingLayer(ReferenceLayer):
    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        for head in row.heads:
            head.scores = head.ranks.double()  # float32 would lose count at 2**24


class StreamingReference(ReferenceCache):
    """Sinks and the newest tokens, shifted and appended.

    Args:
        model: As in `ReferenceCache`.
        rerotate: Another word for the positions: True for compact ones (all keys are rotated for each query), False for original ones.
        positions: As in `ReferenceCache`.
        **settings: As in `ReferenceCache`.
    """

    layer_class = StreamingLayer

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
    """Heavy hitters: the attention that a token received from all queries since it came."""

    layer_class = H2OLayer

    def default_recent(self) -> int:
        return max(1, min(self.budget // 2, self.budget - self.sinks))


class TOVALayer(ReferenceLayer):
    def __init__(self, cache: ReferenceCache, *args: Any) -> None:
        super().__init__(cache, *args)
        self.recent = max(self.recent, 1)

    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        last = torch.stack([received[-1] for received in attention]).mean(0)
        for head in row.heads:
            head.scores = last


class TOVAReference(ReferenceCache):
    """The attention of the last query, one choice for all heads of a layer. The last token of a block always stays."""

    layer_class = TOVALayer


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

    def _pooled(self, head: Head) -> torch.Tensor:
        scores = torch.full((len(head),), torch.inf)
        earlier = len(head) - self.window
        if earlier > 0:
            mean = (head.received / self.window)[None, :earlier]
            scores[:earlier] = functional.avg_pool1d(mean, self.kernel_size, stride=1, padding=self.kernel_size // 2)[0]
        return scores


class SnapKVReference(ReferenceCache):
    """The pooled attention of the last queries; observed again each time as many more tokens came.

    Args:
        model: As in `ReferenceCache`.
        window: How many queries observe, and how many tokens are recent by default.
        kernel_size: Of the average pool over neighbours; odd.
        **settings: As in `ReferenceCache`.
    """

    layer_class = SnapKVLayer

    def __init__(self, model: Any, *, window: int = 64, kernel_size: int = 5, **settings: Any) -> None:
        if kernel_size % 2 == 0:
            raise ConfigError.of("kernel_size", "an odd number", kernel_size)
        self.window, self.kernel_size = window, kernel_size
        super().__init__(model, **settings)

    def default_recent(self) -> int:
        return self.window


class LagKVLayer(ReferenceLayer):
    first_score = torch.inf

    def __init__(self, cache: LagKVReference, *args: Any) -> None:
        super().__init__(cache, *args)
        self.lag_size = cache.lag_size

    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        complete = (row.real - self.sinks) // self.lag_size
        for head in row.heads:
            for number in range(complete - 1):
                start = self.sinks + number * self.lag_size
                lag = _between(head.ranks, start, start + self.lag_size)
                following = _between(head.ranks, start + self.lag_size, start + 2 * self.lag_size)
                # A lag is scored once, when the one after it is complete; where either was pruned before that, its tokens stay unscored.
                if len(lag) == len(following) == self.lag_size and head.scores[lag].isinf().all():
                    score = (_against(head.given[lag], head.given[following]) + _against(head.values[lag], head.values[following])) / 2
                    head.scores[lag] = score.argsort().argsort() / self.lag_size


class LagKVReference(ReferenceCache):
    """How much keys and values spread over the channels, measured in the range of the lag of tokens after theirs.

    Keys are taken as the model rotated them.

    Args:
        model: As in `ReferenceCache`.
        lag_size: Tokens in a lag; the first one begins after the sinks.
        **settings: As in `ReferenceCache`.
    """

    layer_class = LagKVLayer

    def __init__(self, model: Any, *, lag_size: int = 128, **settings: Any) -> None:
        self.lag_size = lag_size
        super().__init__(model, **settings)

    def default_recent(self) -> int:
        return max(1, min(2 * self.lag_size, (self.budget - self.sinks) // 2))


class KeyNormLayer(ReferenceLayer):
    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        for head in row.heads:
            head.scores = -head.given.float().norm(dim=-1)


class KeyNormReference(ReferenceCache):
    """Small keys stay."""

    layer_class = KeyNormLayer


class PeriodicLayer(ReferenceLayer):
    """Scores all tokens after a block, and each time so many real ones have come; new ones stay until then."""

    first_score = torch.inf

    def __init__(self, cache: PeriodicReference, *args: Any) -> None:
        super().__init__(cache, *args)
        self.cache = cache

    def rescore(self, row: Row, attention: list[torch.Tensor], block: bool) -> None:
        if block or row.real % self.cache.interval == 0:
            for head in row.heads:
                head.scores = self.cache.worth(head, self.geometry)


class PeriodicReference(ReferenceCache):
    """The base of what is scored by keys and values alone.

    Args:
        model: As in `ReferenceCache`.
        interval: Tokens between two scorings.
        **settings: As in `ReferenceCache`.
    """

    layer_class = PeriodicLayer

    def __init__(self, model: Any, *, interval: int = 64, **settings: Any) -> None:
        self.interval = interval
        super().__init__(model, **settings)

    def default_recent(self) -> int:
        return max(1, min(64, (self.budget - self.sinks) // 4))

    def worth(self, head: Head, geometry: RotaryGeometry) -> torch.Tensor:
        raise NotImplementedError


class KeyDiffReference(PeriodicReference):
    """Keys that point elsewhere than the mean direction stay."""

    def worth(self, head: Head, geometry: RotaryGeometry) -> torch.Tensor:
        keys = functional.normalize(head.given.float(), dim=-1)
        return -functional.cosine_similarity(keys, keys.mean(0), dim=-1)


class LeverageReference(PeriodicReference):
    """The diagonal of the hat matrix of centred keys without rotation, sinks left out, with a ridge of a hundredth of their mean square."""

    def worth(self, head: Head, geometry: RotaryGeometry) -> torch.Tensor:
        keys = geometry.unrotate(head.given[None, None], head.ranks)[0, 0].double()
        counted = head.ranks >= self.sinks
        if counted.sum() < 2:  # nothing stands out
            return torch.zeros(len(keys))
        keys = (keys - keys[counted].mean(0)) * counted[:, None]
        moments = keys.T @ keys
        ridge = 1e-2 * moments.diagonal().mean() * torch.eye(len(moments), dtype=torch.float64)
        return (keys @ torch.linalg.inv(moments + ridge) @ keys.T).diagonal().float()


class CURReference(PeriodicReference):
    """The product of a key's and a value's share of the squared lengths of their window of kept neighbours.

    Args:
        model: As in `ReferenceCache`.
        window: Neighbours.
        **settings: As in `PeriodicReference`.
    """

    def __init__(self, model: Any, *, window: int = 16, **settings: Any) -> None:
        self.window = window
        super().__init__(model, **settings)

    def worth(self, head: Head, geometry: RotaryGeometry) -> torch.Tensor:
        parts = []
        for states in (head.given, head.values):
            squares = states.float().square().sum(-1)
            parts.append(torch.cat([part / part.sum() for part in squares.split(self.window)]))
        return parts[0] * parts[1]


def _between(ranks: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return ((ranks >= start) & (ranks < stop)).nonzero()[:, 0]


def _against(states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """(lag_size,) from two times (lag_size, head_dim)."""
    low, high = following.min(0).values, following.max(0).values
    return ((states - low) / (high - low)).std(-1).softmax(-1)

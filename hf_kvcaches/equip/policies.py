"""Policies: which tokens a pruned cache keeps.

A policy scores tokens, and higher scores stay. The base class does the rest: it protects the sinks and the newest tokens, and chooses
what stays after a block and what goes in a decoding step. A policy of your own is a subclass with one method:

    class SmallValues(Policy):
        def score(self, tokens):
            return -tokens.values.float().norm(dim=-1)
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch
from torch.nn import functional

from hf_kvcaches.equip._scoring import lag_ranks, lots
from hf_kvcaches.equip.tokens import Tokens, ages, newest_from
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_choice, whole_number

_HIGHEST = torch.finfo(torch.float32).max


class Policy(ABC):
    """The base of all policies. A subclass writes `score`; a frozen dataclass for one with parameters makes it savable.

    Attributes:
        name: What `resolve_policy` and saved caches call it.
        observes: Whose attention it scores by. 0: none; a number: the last so many queries; None: all queries.
        order_only: Whether the oldest token goes whatever it holds, so that no scores are needed.
        always_recent: Newest tokens that stay after a block even where the cache is told to protect fewer.
        directions: Whether it reads more of the keys than their lengths, and wants them as the model rotated them.
        scores_are_sums: Whether scores after a step are the attention received from all queries so far, as it is.
        mixes_heads: Whether a head's scores depend on other heads, or on how many there are: refused under tensor parallelism.
    """

    name: ClassVar[str] = ""
    observes: int | None = 0
    order_only: ClassVar[bool] = False
    always_recent: ClassVar[int] = 0
    directions: ClassVar[bool] = True
    scores_are_sums: bool = False
    mixes_heads: ClassVar[bool] = False

    def looks(self, seen: int, first: torch.Tensor | int, sinks: int) -> bool:
        """Whether `rescore` reads keys after a step with so many tokens seen. Turning them back takes time that may be spared.

        Args:
            seen: Tokens fed in so far.
            first: As in `Tokens`.
            sinks: Protected first tokens.
        """
        return self.directions

    def recent(self, budget: int, sinks: int) -> int:
        """How many of the newest tokens are protected where the user doesn't say.

        Args:
            budget: Slots of the layer.
            sinks: Protected first tokens.
        """
        return 1

    @abstractmethod
    def score(self, tokens: Tokens) -> torch.Tensor:
        """What each token is worth: (batch, 1 or kv_heads, slots), higher stays, infinite stays while anything finite can go.

        With 1 in the place of the heads, all heads of a layer keep the same tokens. What it says of empty slots does not matter.

        Args:
            tokens: All slots after a block, before it is pruned.
        """

    def checked_score(self, tokens: Tokens) -> torch.Tensor:
        """`score` as float32 without gradients, or an error that names a wrong shape.

        Args:
            tokens: As in `score`.
        """
        scores = self.score(tokens)
        batch, heads, slots, _ = tokens.keys.shape
        if tuple(scores.shape) not in ((batch, 1, slots), (batch, heads, slots)):
            raise ConfigError.of(
                f"{type(self).__name__}.score",
                f"scores of the shape {(batch, heads, slots)}, or {(batch, 1, slots)} for all heads alike",
                tuple(scores.shape),
            )
        return scores.detach().float()

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        """The scores after a decoding step.

        Args:
            scores: (batch, 1 or kv_heads, slots), float32, those before the step; may be changed in place.
            tokens: With the new token and what its query attended to.
            slots: (batch, 1 or kv_heads, 1), where the new token went.
        """
        return self.checked_score(tokens)

    def protect(
        self, scores: torch.Tensor, positions: torch.Tensor, *, sinks_end: torch.Tensor | int, recent_start: torch.Tensor | int
    ) -> torch.Tensor:
        """Scores with +inf for sinks and recent tokens, -inf for empty slots, and finite for all others.

        Args:
            scores: (batch, 1 or kv_heads, slots).
            positions: (batch, 1 or kv_heads, slots).
            sinks_end: Tokens at positions before it are sinks; broadcast to `positions`.
            recent_start: Tokens from it on are recent; broadcast to `positions`.
        """
        worth = scores.float().nan_to_num(nan=-_HIGHEST, posinf=_HIGHEST, neginf=-_HIGHEST)
        worth = torch.where((positions < sinks_end) | (positions >= recent_start), torch.inf, worth)
        return torch.where(positions < 0, -torch.inf, worth)

    def keep(
        self, scores: torch.Tensor, positions: torch.Tensor, budget: int, *, sinks_end: torch.Tensor | int, recent: int
    ) -> torch.Tensor:
        """After a block: the slots to keep, ascending, (batch, 1 or kv_heads, min(budget, slots)).

        Of equal scores those stay that `topk` takes from the row alone, as in kvpress. A row with fewer tokens keeps all, and some empty
        slots.

        Args:
            scores: (batch, 1 or kv_heads, slots).
            positions: (batch, 1 or kv_heads, slots).
            budget: How many slots to keep.
            sinks_end: As in `protect`.
            recent: How many of the newest tokens are protected.
        """
        start = newest_from(positions, max(recent, self.always_recent))
        worth = self.protect(scores, positions, sinks_end=sinks_end, recent_start=start)
        # What the policy calls infinite ties with what is protected, unless there is too much of it: then the oldest go.
        endless = worth >= _HIGHEST
        crowded = endless.sum(-1, keepdim=True) > budget
        by_age = torch.where(worth == torch.inf, torch.inf, torch.where(endless, positions.float(), -torch.inf))
        worth = torch.where(crowded, by_age, torch.where(endless, torch.inf, worth))
        return _best(worth, (positions >= 0).expand_as(worth), min(budget, worth.shape[-1]))

    def victim(
        self, scores: torch.Tensor, positions: torch.Tensor, *, sinks_end: torch.Tensor | int, recent_start: torch.Tensor | int
    ) -> torch.Tensor:
        """Before a decoding step: the slot to write the new token to, (batch, 1 or kv_heads, 1).

        That is the first empty slot, or else the lowest score that is not protected; of equal ones the oldest goes.

        Args:
            scores: (batch, 1 or kv_heads, slots).
            positions: (batch, 1 or kv_heads, slots).
            sinks_end: As in `protect`.
            recent_start: As in `protect`. The token to come is the newest one, so the newest `recent - 1` of these.
        """
        held = (positions < sinks_end) | (positions >= recent_start)
        lowest = torch.where(held, torch.inf, scores).amin(-1, keepdim=True)
        # Also right where all scores are infinite, and where one is NaN: then the oldest goes.
        return ages(positions, held | (scores > lowest)).argmin(-1, keepdim=True)

    def settings(self) -> dict[str, Any]:
        """The policy as plain values for JSON; `policy_from_settings` builds it again."""
        parameters: dict[str, Any] = dataclasses.asdict(self) if dataclasses.is_dataclass(self) else {}
        # A subclass of a built-in policy has its name, and is not it.
        own = _BUILT_IN.get(self.name) is not type(self)
        return {"policy": f"{type(self).__module__}.{type(self).__qualname__}" if own else self.name, **parameters}


def _put(scores: torch.Tensor, slots: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """Writes a new token's score, a number or (batch, 1 or kv_heads, 1), to its slot, in place."""
    slots = slots.expand(*scores.shape[:-1], 1)
    if isinstance(value, torch.Tensor):
        return scores.scatter_(-1, slots, value.to(scores.dtype).expand_as(slots))
    return scores.scatter_(-1, slots, value)


def _plain_count(policy: Policy, name: str, least: int) -> None:
    object.__setattr__(policy, name, whole_number(name, getattr(policy, name), least))


@dataclass(frozen=True)
class StreamingPolicy(Policy):
    """Keeps the sinks and the newest tokens.

    StreamingLLM (Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453): the first tokens of a text soak up
    attention that has nowhere else to go, and a model that loses them breaks down. A text of any length can be read with them and a
    sliding window.

    **Departs from the paper**: in nothing. Its positions within the cache are `positions="compact"` of the cache.
    """

    name = "streaming"
    directions = False
    order_only = True

    def recent(self, budget: int, sinks: int) -> int:
        return max(1, budget - sinks)

    def score(self, tokens: Tokens) -> torch.Tensor:
        # Counted from the end, because float32 holds integers up to 2^24 only.
        return (tokens.positions - tokens.seen).float()


@dataclass(frozen=True)
class H2OPolicy(Policy):
    """Keeps the tokens that received most attention from all queries since they came.

    H2O (Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, arXiv 2306.14048): a small set of tokens gets
    most of the attention and can be told by its running sum. Half of the budget holds the newest tokens.

    **Departs from the paper**: heads that share keys are averaged. `average=True` is kvpress' ObservedAttentionPress and no longer
    favours tokens for their age.

    Args:
        average: Divide the sum by the number of queries that could see the token.
    """

    name = "h2o"
    directions = False
    observes = None
    average: bool = False

    def recent(self, budget: int, sinks: int) -> int:
        return max(1, min(budget // 2, budget - sinks))

    @property
    def scores_are_sums(self) -> bool:  # type: ignore[override]
        return not self.average and type(self).score is H2OPolicy.score and type(self).rescore is H2OPolicy.rescore

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.observed / (tokens.seen - tokens.positions) if self.average else tokens.observed

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        return self.score(tokens)


@dataclass(frozen=True)
class TOVAPolicy(Policy):
    """Keeps the tokens that the last query attends to most, the same for all heads of a layer.

    TOVA (Transformers are Multi-State RNNs, arXiv 2401.06104) drops the token with the lowest attention of the current query.

    **Departs from the paper**: sinks and recent tokens are protected where the cache says so; the last token of a block always stays.
    """

    name = "tova"
    directions = False
    mixes_heads = True
    observes = 1
    always_recent = 1

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.observed.mean(1, keepdim=True)

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        return self.score(tokens)


@dataclass(frozen=True)
class SnapKVPolicy(Policy):
    """Keeps the tokens that the last `window` queries attend to, together with their neighbours.

    SnapKV (LLM Knows What You are Looking for Before Generation, arXiv 2404.14469): the end of a prompt already shows which parts of it
    the answer will need. Pooling over neighbours keeps passages whole.

    **Departs from the paper**: pools by the mean, and averages heads that share keys, as kvpress does. The paper prunes prompts only;
    here the observation is repeated while decoding, each time another `window` tokens have come.

    Args:
        window: How many queries observe; as many of the newest tokens always stay.
        kernel_size: How many neighbours are pooled; odd.
    """

    name = "snapkv"
    directions = False
    window: int = 64
    kernel_size: int = 5

    def __post_init__(self) -> None:
        _plain_count(self, "window", 1)
        _plain_count(self, "kernel_size", 1)
        if self.kernel_size % 2 == 0:
            raise ConfigError.of("kernel_size", "an odd number, so that a token stands in the middle", self.kernel_size)
        object.__setattr__(self, "observes", self.window)

    def recent(self, budget: int, sinks: int) -> int:
        return self.window

    def score(self, tokens: Tokens) -> torch.Tensor:
        order = tokens.positions.argsort(-1).expand_as(tokens.observed)
        # Sorted, empty slots come first: with zeros they count as what lies before the text. Sums order tokens as means do.
        received = torch.where(tokens.positions < 0, 0, tokens.observed).gather(-1, order)
        earlier = received.shape[-1] - self.window
        scores = torch.full_like(received, torch.inf)
        if earlier > 0:
            scores[..., :earlier] = functional.avg_pool1d(received[..., :earlier], self.kernel_size, 1, self.kernel_size // 2)
        return torch.empty_like(scores).scatter_(-1, order, scores)

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        return self.score(tokens) if tokens.complete else _put(scores, slots, torch.inf)


@dataclass(frozen=True)
class LagKVPolicy(Policy):
    """Keeps the tokens whose keys and values stand out against those of the lag of tokens after theirs.

    LagKV (Lag-Relative Information of the KV Cache Tells Which Tokens Are Important, arXiv 2504.04704): tokens are cut into lags. Each
    channel is scaled by its range in the following lag, and what spreads most over the channels is worth most. No attention is needed.

    **Departs from the paper**: the budget is a number of tokens and not a share of each lag; scores are ranks within a lag, so that lags
    can be compared, as in kvpress. A channel that is constant in the following lag says nothing. A lag is scored once, when the following
    one is complete; until then its tokens stay, and the oldest goes if there is nothing else. Where a token of either lag is gone by then
    (the budget is smaller than two lags, or padding lies within), the lag's tokens are never scored.

    Args:
        lag_size: Tokens in a lag.
    """

    name = "lagkv"
    lag_size: int = 128

    def __post_init__(self) -> None:
        _plain_count(self, "lag_size", 2)

    def recent(self, budget: int, sinks: int) -> int:
        return max(1, min(2 * self.lag_size, (budget - sinks) // 2))

    def score(self, tokens: Tokens) -> torch.Tensor:
        ranks = lag_ranks(tokens.keys, tokens.values, tokens.row_index() - tokens.sinks, self.lag_size)
        return ranks if tokens.scores is None else torch.where(tokens.scores.isfinite(), tokens.scores, ranks)

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        scores = _put(scores, slots, torch.inf)
        due = self.looks(tokens.seen, tokens.first, tokens.sinks)
        return self.score(dataclasses.replace(tokens, scores=scores)) if due else scores

    def looks(self, seen: int, first: torch.Tensor | int, sinks: int) -> bool:
        over = (seen - first - sinks) % self.lag_size
        return bool((over == 0).any()) if isinstance(over, torch.Tensor) else over == 0


@dataclass(frozen=True)
class KeyNormPolicy(Policy):
    """Keeps the tokens with the smallest keys.

    A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (arXiv 2406.11430): small keys tend to receive much
    attention. The cheapest score, known before any query; it does not look at what is asked.

    **Departs from the paper**: prunes all layers; the paper leaves the first ones whole, for which the cache takes a budget per layer.
    """

    name = "knorm"
    directions = False

    def score(self, tokens: Tokens) -> torch.Tensor:
        lengths = -torch.linalg.vector_norm(tokens.keys.detach(), dim=-1, dtype=torch.float32)
        # Turning a key changes the last bit of its length, which is not to decide between equals.
        return lengths if tokens.scores is None else torch.where(tokens.scores.isnan(), lengths, tokens.scores)

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        batch, heads, _, width = tokens.keys.shape
        new = tokens.keys.detach().gather(2, slots[..., None].expand(batch, heads, 1, width))
        return _put(scores, slots, -torch.linalg.vector_norm(new, dim=-1, dtype=torch.float32))


@dataclass(frozen=True)
class RandomPolicy(Policy):
    """Keeps tokens by lot: what any other policy has to beat.

    A first block draws as kvpress' RandomPress does, alike in each layer and row; later lots depend on seed, head and position only.

    Args:
        seed: Not negative.
    """

    name = "random"
    directions = False
    mixes_heads = True
    seed: int = 0

    def __post_init__(self) -> None:
        _plain_count(self, "seed", 0)

    def score(self, tokens: Tokens) -> torch.Tensor:
        index = tokens.row_index().expand(tokens.keys.shape[:3])
        if tokens.scores is None and tokens.seen == tokens.keys.shape[2]:
            return torch.stack([self._draw(tokens.keys, row) for row in index])
        drawn = lots(index, self.seed)
        return drawn if tokens.scores is None else torch.where(tokens.scores.isnan(), drawn, tokens.scores)

    def _draw(self, keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """One row's lots, (kv_heads, slots), given the tokens' places in it."""
        generator = torch.Generator(keys.device).manual_seed(self.seed)
        drawn = torch.rand((1, index.shape[0], max(1, int(index.max()) + 1)), generator=generator, device=keys.device, dtype=keys.dtype)
        return drawn[0].float().gather(-1, index.clamp(min=0).long())

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        slots = slots.expand(*scores.shape[:-1], 1)
        return _put(scores, slots, lots(tokens.row_index().expand_as(scores).gather(-1, slots), self.seed))


_BUILT_IN: dict[str, type[Policy]] = {
    policy.name: policy for policy in (StreamingPolicy, H2OPolicy, TOVAPolicy, SnapKVPolicy, LagKVPolicy, KeyNormPolicy, RandomPolicy)
}


def resolve_policy(policy: str | Policy) -> Policy:
    """The policy of that name with its usual parameters, or the policy itself."""
    if isinstance(policy, Policy):
        return policy
    swapped = "It is a model: model and policy seem to be swapped." if isinstance(policy, torch.nn.Module) else ""
    hint = "Pass an object, not its class." if isinstance(policy, type) and issubclass(policy, Policy) else swapped
    require_choice("policy", policy, _BUILT_IN, also=", or a Policy object", hint=hint)
    return _BUILT_IN[policy]()


def policy_from_settings(settings: dict[str, Any]) -> Policy:
    """The policy that `Policy.settings` described."""
    parameters = dict(settings)
    name = parameters.pop("policy", None)
    if name not in _BUILT_IN:
        known = ", ".join(_BUILT_IN)
        why = f"policy: {name!r} is none of this package's ({known}), and a file does not bring the code of another."
        raise UnsupportedError(f"{why} Keep such a cache in memory.")
    return _BUILT_IN[name](**parameters)


def _best(worth: torch.Tensor, real: torch.Tensor, count: int) -> torch.Tensor:
    """The slots of the highest numbers, ascending; empty slots only where there are no others."""
    if bool(real.all()):
        return worth.topk(count, dim=-1).indices.sort(dim=-1).values
    # Where `topk` stops among equals depends on the row's length: padding must not show.
    best = torch.empty(*worth.shape[:2], count, dtype=torch.long, device=worth.device)
    for row, head in product(*map(range, worth.shape[:2])):
        held, empty = real[row, head].nonzero()[:, 0], (~real[row, head]).nonzero()[:, 0]
        own = held[worth[row, head, held].topk(min(count, held.numel())).indices]
        best[row, head] = torch.cat([own, empty[: count - own.numel()]]).sort().values
    return best

"""The base of all policies.

A policy scores tokens, and higher scores stay. The base class does the rest: it protects the sinks and the newest tokens, and chooses
what is kept after a block and what is evicted in a decoding step. A policy of your own is a subclass with one method:

    class SmallValues(Policy):
        def score(self, tokens):
            return -tokens.values.float().norm(dim=-1)
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar

import torch
from torch import nn

from hf_kvcaches.equip.tokens import Tokens, ages, newest_from
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_choice, whole_number

# The policies of this package by name.
BUILT_IN: dict[str, type[Policy]] = {}
_HIGHEST = torch.finfo(torch.float32).max


def count(default: int, *, least: int = 1, **options: Any) -> Any:
    """A parameter of a policy that is a whole number, checked when the policy is made."""
    return field(default=default, metadata={"least": least}, **options)


class Policy(ABC):
    """The base of all policies. A subclass writes `score`; a frozen dataclass for one with parameters makes it savable.

    Scores and positions are (batch, 1 or kv_heads, slots), and the position of an empty slot is -1. Tokens at positions before `sinks_end`
    are sinks, and those from `recent_start` on are recent: numbers, or (batch, 1 or kv_heads, 1).

    Attributes:
        name: What `resolve_policy` and saved caches call it.
        observes: Whose attention it scores by. 0: none; a number: the last so many queries; None: all queries.
        queries: How many of the last queries themselves it has to see while decoding; 0: none.
        sees_block: Whether it is shown the queries of a block, where there are any.
        order_only: Whether the oldest token is evicted whatever it holds, so that no scores are needed.
        reads_inputs: Whether it is shown what the model's attention is called with in a block.
        deferred: Tokens that `EquipCache.compress`, up to which a context is kept whole, feeds again at a time; 0 where nothing waits.
        always_recent: Newest tokens that stay after a block even where the cache is told to protect fewer.
        directions: Whether it reads more of the keys than their lengths, and wants them as the model rotated them.
        scores_are_sums: Whether scores after a step are the attention received from all queries so far, as it is.
        alone: Whether a token's score does not depend on other tokens, so that a step scores the new one only.
        by_head: Whether each head has scores of its own.
        in_graphs: Whether a decoding step can be compiled: no choice in Python depends on what tensors hold.
        asks_all_heads: Whether it asks the tokens for `heads`, `of_all_heads` or `of_these_heads`, which the processes of tensor
            parallelism answer together.
        mixes_heads: Whether a head's scores depend on other heads and it does not ask so: refused under tensor parallelism.
    """

    name: ClassVar[str] = ""
    observes: int | None = 0
    queries: ClassVar[int] = 0
    sees_block: ClassVar[bool] = False
    order_only: ClassVar[bool] = False
    reads_inputs: ClassVar[bool] = False
    deferred: int = 0
    always_recent: ClassVar[int] = 0
    directions: ClassVar[bool] = True
    scores_are_sums: bool = False
    alone: ClassVar[bool] = False
    by_head: bool = True
    in_graphs: ClassVar[bool] = False
    asks_all_heads: bool = False
    mixes_heads: ClassVar[bool] = False

    def __init_subclass__(cls, *, built_in: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        if built_in:
            BUILT_IN[cls.name] = cls

    def __post_init__(self) -> None:
        for parameter in _parameters(self):
            if "least" in parameter.metadata:
                checked = whole_number(parameter.name, getattr(self, parameter.name), parameter.metadata["least"])
                object.__setattr__(self, parameter.name, checked)

    def recent(self, budget: int, sinks: int) -> int:
        """How many of the newest tokens are protected in so many slots where the user doesn't say."""
        return 1

    @abstractmethod
    def score(self, tokens: Tokens) -> torch.Tensor:
        """What each token is worth: (batch, 1 or kv_heads, slots), higher stays, infinite stays while anything finite can go.

        With 1 in the place of the heads, all heads of a layer keep the same tokens. What it says of empty slots does not matter.
        """

    def checked_score(self, tokens: Tokens) -> torch.Tensor:
        """`score` as float32 without gradients, or an error that names a wrong shape."""
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
        if self.alone:
            return put_score(scores, slots, self.checked_score(tokens.pick(slots.expand(-1, tokens.keys.shape[1], -1))))
        return self.checked_score(tokens)

    def protect(
        self, scores: torch.Tensor, positions: torch.Tensor, *, sinks_end: torch.Tensor | int, recent_start: torch.Tensor | int
    ) -> torch.Tensor:
        """Scores with +inf for sinks and recent tokens, -inf for empty slots, and finite for all others."""
        worth = scores.float().nan_to_num(nan=-_HIGHEST, posinf=_HIGHEST, neginf=-_HIGHEST)
        worth = torch.where((positions < sinks_end) | (positions >= recent_start), torch.inf, worth)
        return torch.where(positions < 0, -torch.inf, worth)

    def keep(
        self, scores: torch.Tensor, positions: torch.Tensor, budget: int, *, sinks_end: torch.Tensor | int, recent: int
    ) -> torch.Tensor:
        """After a block: the slots to keep, ascending, (batch, 1 or kv_heads, min(budget, slots)).

        Of equal scores those stay that `topk` takes from the row alone, as in kvpress. A row with fewer tokens keeps all, and some empty
        slots.
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

        That is the first empty slot, or else the lowest score that is not protected; of equal ones the oldest. The token to come is
        the newest one, so `recent_start` protects `recent - 1` of these.
        """
        held = (positions < sinks_end) | (positions >= recent_start)
        lowest = torch.where(held, torch.inf, scores).amin(-1, keepdim=True)
        # Also right where all scores are infinite, and where one is NaN: then it is the oldest.
        return ages(positions, held | (scores > lowest)).argmin(-1, keepdim=True)

    def settings(self) -> dict[str, Any]:
        """The policy as plain values for JSON; `policy_from_settings` builds it again."""
        values = {parameter.name: getattr(self, parameter.name) for parameter in _parameters(self)}
        parameters = {name: value.settings() if isinstance(value, Policy) else value for name, value in values.items()}
        # A subclass of a built-in policy has its name, and is not it.
        own = BUILT_IN.get(self.name) is not type(self)
        return {"policy": f"{type(self).__module__}.{type(self).__qualname__}" if own else self.name, **parameters}


class WaitingPolicy(Policy):
    """A policy that scores all tokens anew in each block, and after the steps that `due` names; until then new ones stay."""

    def recent(self, budget: int, sinks: int) -> int:
        # What is asked next is close to the last tokens, and more would take slots of facts.
        return max(1, min(64, (budget - sinks) // 4))

    def due(self, seen: int | torch.Tensor, sinks: int, complete: bool | torch.Tensor) -> bool | torch.Tensor:
        """Whether a step scores all tokens anew: of all rows, or (batch, 1, 1).

        Args:
            seen: Real tokens fed in so far: a number, or (batch, 1, 1).
            complete: Whether the attention has just got a complete window of observed queries: of all rows, or (batch, 1, 1).
        """
        return False

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        scores = put_score(scores, slots, torch.inf)
        rescored = self.checked_score(replace(tokens, scores=scores))
        return torch.where(torch.as_tensor(tokens.due, device=scores.device), rescored, scores)


@dataclass(frozen=True)
class PeriodicPolicy(WaitingPolicy):
    """A policy that scores all tokens anew each time `interval` others have come.

    Args:
        interval: Tokens that come between two scorings.
    """

    interval: int = count(64, kw_only=True)

    def due(self, seen: int | torch.Tensor, sinks: int, complete: bool | torch.Tensor) -> bool | torch.Tensor:
        return seen % self.interval == 0


@dataclass(frozen=True)
class WrappingPolicy(PeriodicPolicy):
    """Changes the meaning of another policy's scores, and gets the inputs of that policy.

    Args:
        inner: The other policy, or its name.
    """

    inner: Any = "keydiff"

    def __post_init__(self) -> None:
        super().__post_init__()
        policy = resolve_policy(self.inner)
        if policy.deferred or policy.order_only:
            raise UnsupportedError(f"inner: {policy.name!r} gives no scores that {type(self).__name__} could change. Use another policy.")
        object.__setattr__(self, "inner", policy)
        for name in (
            "observes",
            "queries",
            "sees_block",
            "directions",
            "reads_inputs",
            "asks_all_heads",
            "mixes_heads",
            "always_recent",
            "by_head",
        ):
            object.__setattr__(self, name, getattr(policy, name))

    def recent(self, budget: int, sinks: int) -> int:
        return int(self.inner.recent(budget, sinks))

    def inner_score(self, tokens: Tokens) -> torch.Tensor:
        """The other policy's scores, (batch, kv_heads, slots)."""
        scores: torch.Tensor = self.inner.checked_score(tokens)
        return scores.expand(tokens.keys.shape[:3])


def _parameters(policy: Policy) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(policy) if dataclasses.is_dataclass(policy) else ()


def resolve_policy(policy: str | Policy | dict[str, Any]) -> Policy:
    """The policy of that name with its usual parameters, that these settings describe, or the policy itself."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, dict):
        return policy_from_settings(policy)
    if not isinstance(policy, str):
        swapped = "It is a model: model and policy seem to be swapped." if isinstance(policy, nn.Module) else ""
        hint = "Pass an object, not its class." if isinstance(policy, type) and issubclass(policy, Policy) else swapped
        raise ConfigError.of("policy", "the name of a policy, or a Policy object", policy, hint)
    require_choice("policy", policy, BUILT_IN, also=", or a Policy object")
    return BUILT_IN[policy]()


def policy_from_settings(settings: dict[str, Any]) -> Policy:
    """The policy that `Policy.settings` described."""
    parameters = dict(settings)
    name = parameters.pop("policy", None)
    if name not in BUILT_IN:
        known = ", ".join(BUILT_IN)
        why = f"policy: {name!r} is none of this package's ({known}), and a file does not bring the code of another."
        raise UnsupportedError(f"{why} Keep such a cache in memory.")
    return BUILT_IN[name](**parameters)


def put_score(scores: torch.Tensor, slots: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """Writes a new token's score, a number or (batch, 1 or kv_heads, 1), to its slot, in place."""
    slots = slots.expand(*scores.shape[:-1], 1)
    if isinstance(value, torch.Tensor):
        return scores.scatter_(-1, slots, value.to(scores.dtype).expand_as(slots))
    return scores.scatter_(-1, slots, value)


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

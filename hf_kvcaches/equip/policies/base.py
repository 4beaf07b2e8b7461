"""The base of all policies, presses of kvpress as policies, and policies by name."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from hf_kvcaches.equip.policies.tokens import Tokens, unscored
from hf_kvcaches.errors import ConfigError, UnsupportedError, is_number, require_choice, whole_number

BUILT_IN: dict[str, type[Policy]] = {}  # the policies of this package by name
_HIGHEST = 2.0**99


def parameter(default: float, *, least: int = 1, **options: Any) -> Any:
    """A parameter of a policy, checked when the policy is made: a whole number where the default is one."""
    return field(default=default, metadata={"least": least}, **options)


class Policy(ABC):
    """The base of all policies. A subclass writes `score`; a frozen dataclass for one with parameters makes it savable.

    Attributes:
        name: What `resolve_policy` and saved caches call it.
        interval: While decoding, all tokens are scored anew after each so many steps, and until then new ones stay; None: never, and new
            tokens leave by age.
        observes: Whose attention it scores by. 0: none; a number: the last so many queries; None: all queries.
        reads_queries: Whether it is shown the queries of a block, and while decoding the last `interval` ones.
        reads_inputs: Whether it is shown what the model's attention is called with in a block.
        by_head: Whether each head has scores of its own.
        comparable: Whether scores mean the same in all heads and layers, as probabilities of attention do.
        head_budgets: How heads share the budget where the user does not say: "global", "layer" or None.
        first_score: The score of a token that has just been decoded; None: it has none yet.
        order_only: Whether the oldest token is evicted whatever it holds.
        deferred: Tokens of a chunk that `EquipCache.compress`, up to which a context is kept whole, feeds again; 0: nothing waits.
        asks_all_heads: Whether it asks for `heads`, `of_all_heads` or `of_these_heads`, which all processes answer together.
        mixes_heads: Whether a head's scores depend on other heads and it does not ask so: refused under tensor parallelism.
    """

    name: ClassVar[str] = ""
    interval: int | None = 64
    observes: int | None = 0
    reads_queries: bool = False
    reads_inputs: ClassVar[bool] = False
    by_head: bool = True
    comparable: ClassVar[bool] = False
    head_budgets: ClassVar[str | None] = None
    first_score: ClassVar[float | None] = None
    order_only: ClassVar[bool] = False
    deferred: int = 0
    asks_all_heads: bool = False
    mixes_heads: ClassVar[bool] = False

    def __init_subclass__(cls, *, built_in: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        if built_in:
            BUILT_IN[cls.name] = cls

    def __post_init__(self) -> None:
        for name, declared in self._parameters().items():
            value, least = getattr(self, name), declared.metadata.get("least")
            if least is None:
                continue
            if isinstance(declared.default, int):
                object.__setattr__(self, name, whole_number(name, value, least))
            elif not is_number(value) or not least <= value < float("inf"):  # NaN is neither
                raise ConfigError.of(name, f"a number of {least} or more", value)

    def _parameters(self) -> dict[str, dataclasses.Field[Any]]:
        return {field.name: field for field in dataclasses.fields(self)} if dataclasses.is_dataclass(self) else {}

    @property
    def in_graphs(self) -> bool:
        """Whether a decode step can be compiled: no choice in Python depends on the number of the step."""
        return self.interval is None and not self.deferred

    def recent(self, budget: int, sinks: int) -> int:
        """How many of the newest tokens are protected in so many slots where the user doesn't say."""
        # What is asked next is close to the last tokens, and more would take slots of facts.
        return max(1, min(64, (budget - sinks) // 4))

    @abstractmethod
    def score(self, tokens: Tokens) -> torch.Tensor:
        """What each token is worth: (batch, 1 or kv_heads, tokens), higher stays.

        With 1 in the place of the heads, all heads of a layer keep the same tokens. What it says where there is no token does not matter.
        A token that gets +inf is not scored: it stays, by age.
        """

    def checked_score(self, tokens: Tokens) -> torch.Tensor:
        """`score` as finite float32 numbers without gradients, or an error that names a wrong shape."""
        scores = self.score(tokens).detach().float()
        batch, heads, slots, _ = tokens.keys.shape
        if tuple(scores.shape) not in ((batch, 1, slots), (batch, heads, slots)):
            what = f"scores of the shape {(batch, heads, slots)}, or {(batch, 1, slots)} for all heads alike"
            raise ConfigError.of(f"{type(self).__name__}.score", what, tuple(scores.shape))
        finite = scores.nan_to_num(nan=-_HIGHEST).clamp(-_HIGHEST, _HIGHEST)
        return torch.where(scores.isposinf(), unscored(tokens.positions[:, : scores.shape[1]]), finite)

    def watch(self, scores: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor) -> None:
        """Change the scores after a decode step, in place, for a policy that observes attention and has no `interval`.

        Args:
            scores: (batch, 1 or kv_heads, slots): infinite for sinks and for slots without a token, which has to stay so.
            weights: What the query gave to each slot, (batch, kv_heads, slots), float32.
            slot: Of the new token, (batch, 1 or kv_heads, 1).
        """
        return

    def score_new(self, inputs: dict[str, Any], module: nn.Module | None) -> torch.Tensor | None:
        """The score of a step's new token from what the model's attention is called with, (batch, kv_heads, 1); None: it has none yet."""
        return None

    def settings(self) -> dict[str, Any]:
        """The policy as plain values for JSON; `policy_from_settings` builds it again."""
        parameters = {name: getattr(self, name) for name in self._parameters()}
        # A subclass of a built-in policy has its name, and is not it.
        own = BUILT_IN.get(self.name) is not type(self)
        return {"policy": f"{type(self).__module__}.{type(self).__qualname__}" if own else self.name, **parameters}


@dataclass(frozen=True)
class PressPolicy(Policy):
    """Keeps the tokens with the highest scores of a press of kvpress: any object with its `score`.

    **Departs from kvpress**: sinks and recent tokens stay, and decoded ones until the next block. Presses that read attention weights
    (`attentions`), or select in another way than by `score`, are not supported.

    Args:
        press: Has `score(module, hidden_states, keys, values, attentions, kwargs)`, which returns (batch, kv_heads, tokens).
    """

    name = "press"
    interval = None
    reads_inputs = True
    mixes_heads = True
    press: Any = None

    def __post_init__(self) -> None:
        if not callable(getattr(self.press, "score", None)):
            raise ConfigError.of("press", "an object with score(module, hidden_states, keys, values, attentions, kwargs)", self.press)

    def share_left(self) -> float:
        """The budget that the press's `compression_ratio` leaves."""
        ratio: Any = getattr(self.press, "compression_ratio", None)
        if not is_number(ratio) or not 0 <= ratio < 1:
            raise ConfigError.of("budget", "a budget, where the press has no compression_ratio from 0 to 1", ratio)
        return 1.0 - float(ratio)

    def recent(self, budget: int, sinks: int) -> int:
        return 1

    def score(self, tokens: Tokens) -> torch.Tensor:
        if tokens.module is None or tokens.inputs is None:
            raise UnsupportedError("policy: a press reads the inputs of the model's attention, and no model runs now. Use another policy.")
        inputs = dict(tokens.inputs)
        scores = self.press.score(tokens.module, inputs.pop("hidden_states"), tokens.keys, tokens.values, None, inputs)
        if not isinstance(scores, torch.Tensor):
            raise ConfigError.of(f"{type(self.press).__name__}.score", "a tensor", scores)
        return scores

    def settings(self) -> dict[str, Any]:
        return {"policy": f"press of {type(self.press).__module__}.{type(self.press).__qualname__}"}


def resolve_policy(policy: Any) -> Policy:
    """The policy of that name with its usual parameters, that these settings describe, that an artifact makes, or the policy itself."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, dict):
        return policy_from_settings(policy)
    if callable(make := getattr(policy, "as_policy", None)) and not isinstance(policy, type):
        return make()
    if not isinstance(policy, str):
        swapped = "It is a model: model and policy seem to be swapped." if isinstance(policy, nn.Module) else ""
        hint = "Pass an object, not its class." if isinstance(policy, type) and issubclass(policy, Policy) else swapped
        raise ConfigError.of("policy", "the name of a policy, a Policy object, or a KeepProbe", policy, hint)
    require_choice("policy", policy, sorted(BUILT_IN), also=", or a Policy object")
    return BUILT_IN[policy]()


def policy_from_settings(settings: dict[str, Any]) -> Policy:
    """The policy that `Policy.settings` described."""
    name = settings.get("policy")
    if name not in BUILT_IN:
        known = ", ".join(sorted(BUILT_IN))
        why = f"policy: {name!r} is none of this package's ({known}), and a file does not bring the code of another."
        raise UnsupportedError(f"{why} Keep such a cache in memory.")
    return BUILT_IN[name](**{key: value for key, value in settings.items() if key != "policy"})

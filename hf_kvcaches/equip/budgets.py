"""Budgets: how many tokens each layer keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError, is_number, whole_number


@dataclass(frozen=True)
class Limit:
    """How many tokens stay, and how many of the newest whatever they are worth."""

    slots: int
    recent: int


def resolve_budgets(budget: Any, layers: Any) -> tuple[int | float, ...]:
    """One checked budget for each layer, in plain numbers.

    Args:
        budget: A number of tokens, a share of the prompt, or one of these for each layer, also in numbers of NumPy's.
        layers: How many layers there are, or a model's config.
    """
    layers = layers if isinstance(layers, int) else len(compat.layer_plan(layers))
    if not isinstance(budget, Sequence) or isinstance(budget, str):
        return (one_budget("budget", budget),) * layers
    if len(budget) != layers:
        raise ConfigError.of("budget", f"one value for each of {layers} layers", f"{len(budget)} values", "Pass one number for all layers.")
    return tuple(one_budget(f"budget[{layer}]", share) for layer, share in enumerate(budget))


def one_budget(name: str, budget: Any) -> int | float:
    """A budget that is a single number, checked, as a plain number."""
    if isinstance(budget, Integral) and not isinstance(budget, bool) and int(budget) >= 1:
        return int(budget)
    if isinstance(budget, float) and 0 < budget <= 1:
        return budget
    hint = f"Write {int(budget)} for tokens." if isinstance(budget, float) and budget > 1 and budget.is_integer() else ""
    raise ConfigError.of(name, "an integer of at least 1 (tokens), or a float above 0 and up to 1 (share of the prompt)", budget, hint)


def slots_for(budget: int | float, prompt_tokens: int, least: int = 1) -> int:
    """How many tokens a layer keeps.

    Args:
        budget: A number of tokens or a share of the prompt.
        prompt_tokens: The length of the prompt that a share refers to.
        least: A share of a short prompt is no fewer.
    """
    return budget if isinstance(budget, int) else max(least, int(budget * prompt_tokens))


def check_budget(slots: int, sinks: int, recent: int) -> None:
    """Raises where the protected tokens leave no room."""
    # The token to come needs a slot that is not a sink's, whether or not it is to be protected afterwards.
    least = sinks + max(recent, 1)
    if slots < least:
        raise ConfigError(
            f"budget: {slots} tokens are too few for sinks={sinks} + recent={recent}. Give at least {least}, or lower sinks or recent."
        )


def pyramid_budgets(model: Any, budget: int, *, beta: float = 20, floor: int | None = None) -> list[int]:
    """Budgets that fall linearly from the first layer to the last and are `budget` on average.

    PyramidKV (Dynamic KV Cache Compression based on Pyramidal Information Funneling, arXiv 2406.02069): attention is spread over the
    text in low layers and gathers on few tokens in high ones. Pass the result as the budget of a cache.

    Args:
        model: A model, its config, or the number of layers.
        budget: Mean number of tokens for each layer. The budgets sum up to exactly that many for all layers.
        beta: How steep: what is shared out above the floor is `beta` times smaller than the mean in the last layer. At least 1 (flat).
        floor: Tokens that every layer gets beforehand, such as sinks and recent tokens. None: 68 (SnapKV's window and four sinks), but
            at most half of the budget.
    """
    layers = model if isinstance(model, Integral) else len(compat.layer_plan(compat.split_model(model)[1]))
    layers, budget = whole_number("layers", layers, 1), whole_number("budget", budget, 1)
    if not is_number(beta) or not beta >= 1:
        raise ConfigError.of("beta", "a number of at least 1", beta)
    floor = min(68, budget // 2) if floor is None else floor
    floor = whole_number("floor", floor, 0, f"an integer from 0 to the budget ({budget})", most=budget)
    mean = budget - floor
    smallest = mean / beta
    step = 2 * (mean - smallest) / max(layers - 1, 1)
    shares = [smallest + step * (layers - 1 - layer) for layer in range(layers)] if layers > 1 else [float(mean)]
    whole = [int(share) for share in shares]
    missing = layers * mean - sum(whole)
    by_remainder = sorted(range(layers), key=lambda layer: (whole[layer] - shares[layer], layer))
    return [floor + tokens + (layer in by_remainder[:missing]) for layer, tokens in enumerate(whole)]

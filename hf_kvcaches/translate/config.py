"""What a translator is fitted with beside its budget: checked when made, and saved with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from hf_kvcaches.core.codec.sides import WIDTHS
from hf_kvcaches.core.metric import Metric
from hf_kvcaches.errors import ConfigError, is_number, require_choice, whole_number

Method = Literal["joint", "paper"]
# By default so many layers share a code, and so many numbers of keys and values: sums of wider ones take gigabytes.
_MOST_SHARING, _WIDEST_CODE = 4, 2048


@dataclass(frozen=True)
class TranslatorConfig:
    """Options of `CacheTranslator.fit` that have good defaults.

    Args:
        method: `"joint"`: codes of keys and values, by reduced-rank regression, with the tokens as side information. `"paper"`: keys and
            values each for themselves, by an SVD of both models' states, with no side information.
        layers_per_code: How many consecutive layers share a code, which is sent once the producer has the last of them. More layers say
            more at the same bytes; rebuilding takes time in proportion, and fitting takes memory. None: up to 4, as long as their keys and
            values together have at most 2,048 numbers a token.
        widths: The bits that a direction of a code may have, of 1, 2, 3, 4, 5, 6, 8, 16 and 24; None for 1, 2, 4, 6 and 8, or 16 with
            `method="paper"`, which takes a single number.
        metric: What errors cost: by gradients of what the model says (`"loss"`, where they can be had), by queries and output
            projections (`"attention"`), or all the same (`"plain"`, and always with `method="paper"`).
        layer_map: For each layer of the consumer the producer's layer that it is made of; None: the one nearest in depth; `"fit"`: the
            one that predicts it best on the first texts, none below that of the layer before.
        prefill_share: With `recompute_layers="auto"`, the share of the consumer's layers that may be run.
        ridge: Regularisation, as a share of the mean variance. None: as the number of tokens asks for, and with many hardly any.
        heads: Whether `method="paper"` factorises heads jointly or each for itself.
        ranks: `method="paper"`: (of keys, of values) in each layer, in place of the payload.
        aligner: Of patched layers: a linear map, or with a hidden layer, which is trained.
    """

    method: Method = "joint"
    layers_per_code: int | None = None
    widths: Sequence[int] | int | None = None
    metric: Metric = "loss"
    layer_map: Sequence[int] | Literal["fit"] | None = None
    prefill_share: float = 0.25
    ridge: float | None = None
    heads: Literal["joint", "each"] = "joint"
    ranks: tuple[int, int] | None = None
    aligner: Literal["ridge", "mlp"] = "ridge"

    def __post_init__(self) -> None:
        choices = {"method": Method, "metric": Metric, "heads": Literal["joint", "each"], "aligner": Literal["ridge", "mlp"]}
        for name, allowed in choices.items():
            require_choice(name, getattr(self, name), get_args(allowed))
        paper = self.method == "paper"
        if paper:
            object.__setattr__(self, "metric", "plain")  # the only one that it has
        elif self.heads != "joint" or self.ranks is not None:
            raise ConfigError("heads, ranks: only method='paper' has them. Leave them out.")
        if not self.all_widths or any(type(each) is not int or each not in WIDTHS for each in self.all_widths):
            raise ConfigError.of("widths", f"some of {WIDTHS}", self.widths)
        if paper and len(self.all_widths) > 1:
            raise ConfigError.of("widths", "one number with method='paper'", self.widths)
        if self.layers_per_code is not None:
            whole_number("layers_per_code", self.layers_per_code, 1)
        if self.layer_map is not None and self.layer_map != "fit":
            expected = "a layer of the producer for each of the consumer's, or 'fit'"
            if isinstance(self.layer_map, str) or not isinstance(self.layer_map, Sequence):
                raise ConfigError.of("layer_map", expected, self.layer_map)
            object.__setattr__(self, "layer_map", tuple(whole_number("layer_map", layer, 0, expected) for layer in self.layer_map))
        if not is_number(self.prefill_share) or not 0 <= self.prefill_share <= 1:
            raise ConfigError.of("prefill_share", "a share of 0 to 1", self.prefill_share)
        if self.ridge is not None and (not isinstance(self.ridge, float) or not 0 < self.ridge < 1):
            raise ConfigError.of("ridge", "a small share above 0, as 1e-8, or None", self.ridge)
        if self.ranks is not None:
            expected = "two numbers of codes above 0, of keys and of values"
            if not isinstance(self.ranks, tuple | list) or len(self.ranks) != 2:
                raise ConfigError.of("ranks", expected, self.ranks)
            object.__setattr__(self, "ranks", tuple(whole_number("ranks", rank, 1, expected) for rank in self.ranks))

    def layers_of_width(self, width: int) -> int:
        """`layers_per_code`, or the default for layers whose keys and values have so many numbers a token."""
        if self.method == "paper":
            return 1
        return self.layers_per_code or max(1, min(_MOST_SHARING, _WIDEST_CODE // width))

    @property
    def all_widths(self) -> tuple[int, ...]:
        """`widths`, or the default."""
        if self.widths is None:
            return (16,) if self.method == "paper" else (1, 2, 4, 6, 8)
        return tuple(self.widths) if isinstance(self.widths, Sequence) and not isinstance(self.widths, str) else (self.widths,)


@dataclass(frozen=True)
class TranslatorSettings:
    """How a translator was fitted.

    Args:
        payload: What was asked for, as a share of the bytes of bfloat16 keys and values.
        recompute_layers: How many layers the consumer runs.
        config: With the metric that was used, also where another was asked for.
        layers: Of the consumer.
        measured: Divergences on texts that were kept apart, by what was tried.
    """

    payload: float
    recompute_layers: int
    config: TranslatorConfig
    layers: int
    prefixes: int = 0
    tokens: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)

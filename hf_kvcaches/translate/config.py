"""The options that a translator is fitted with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch

from hf_kvcaches.errors import ConfigError, is_number, require_choice, whole_number
from hf_kvcaches.kernels.code_format import WIDTHS

Method = Literal["joint", "paper"]
Metric = Literal["loss", "attention", "plain"]
# Of expected and of actual logits, (positions, vocabulary) each; greater is better.
Score = Callable[[torch.Tensor, torch.Tensor], float]
# Defaults: at most 4 layers and 2,048 numbers a token share a code; moments of wider ones take gigabytes.
_MOST_SHARING, _WIDEST_CODE = 4, 2048


@dataclass(frozen=True)
class TranslatorConfig:
    """Options of `CacheTranslator.fit` that have good defaults.

    Args:
        method: `"joint"`: codes of keys and values, by reduced-rank regression, with the tokens as side information. `"paper"`: keys and
            values coded separately, by an SVD of both models' states, without side information.
        layers_per_code: How many consecutive layers share a code, which is sent once the producer has the last of them. More layers lose
            less at the same bytes; rebuilding takes time in proportion, and fitting takes memory. None: up to 4, as long as their keys and
            values together have at most 2,048 numbers a token.
        widths: The bits that a direction of a code may have, of 1, 2, 3, 4, 5, 6, 8, 16 and 24; None for 1, 2, 4, 6 and 8, or 16 with
            `method="paper"`, which takes a single number.
        metric: What errors cost: by gradients of the predictions (`"loss"`, where the model has them), by queries and output
            projections (`"attention"`), or all the same (`"plain"`, and always with `method="paper"`).
        layer_map: For each layer of the consumer the producer's layer that predicts it; None: the one nearest in depth; `"fit"`: the
            best one on the first texts, none below that of the layer before.
        prefill_share: With `recompute_layers="auto"`, the share of the consumer's layers that may be run.
        ridge: Regularisation, as a share of the mean variance. None: less the more tokens there are.
        heads: `method="paper"`: whether heads are factorised jointly or each for itself.
        ranks: `method="paper"`: (of keys, of values) in each layer, in place of the payload.
        aligner: Of patched layers: a linear map, or a trained one with a hidden layer.
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
        paper = self.method == "paper"
        choices = {"method": get_args(Method), "metric": get_args(Metric), "heads": ("joint", "each"), "aligner": ("ridge", "mlp")}
        for name, allowed in choices.items():
            require_choice(name, getattr(self, name), allowed)
        if paper:
            object.__setattr__(self, "metric", "plain")  # the paper has no other
        elif self.heads != "joint" or self.ranks is not None:
            raise ConfigError("heads, ranks: only method='paper' has them. Leave them out.")
        if not self.all_widths or any(type(width) is not int or width not in WIDTHS for width in self.all_widths):
            raise ConfigError.of("widths", f"some of {WIDTHS}", self.widths)
        if paper and len(self.all_widths) > 1:
            raise ConfigError.of("widths", "one number with method='paper'", self.widths)
        if self.layers_per_code is not None:
            object.__setattr__(self, "layers_per_code", whole_number("layers_per_code", self.layers_per_code, 1))
        if self.layer_map != "fit":
            self._check_numbers("layer_map", 0, "a layer of the producer for each of the consumer's, or 'fit'")
        self._check_numbers("ranks", 1, "two numbers of codes above 0, of keys and of values", 2)
        if not is_number(self.prefill_share) or not 0 <= self.prefill_share <= 1:
            raise ConfigError.of("prefill_share", "a share of 0 to 1", self.prefill_share)
        if self.ridge is not None and (not isinstance(self.ridge, float) or not 0 < self.ridge < 1):
            raise ConfigError.of("ridge", "a small share above 0, as 1e-8, or None", self.ridge)

    def _check_numbers(self, name: str, least: int, expected: str, count: int | None = None) -> None:
        """Check an option that is None or a sequence of whole numbers, which becomes a tuple."""
        values = getattr(self, name)
        if values is None:
            return
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != (count or len(values)):
            raise ConfigError.of(name, expected, values)
        object.__setattr__(self, name, tuple(whole_number(name, value, least, expected) for value in values))

    def layers_of_width(self, width: int) -> int:
        """Return `layers_per_code`, or its default for layers with `width` key and value numbers a token."""
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
    """How a translator was fitted; `config.metric` is the metric in use, `measured` the KL divergences on held-out texts."""

    payload: float
    recompute_layers: int
    config: TranslatorConfig
    layers: int
    prefixes: int = 0
    tokens: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FitOptions:
    """The arguments of `CacheTranslator.fit` beside models and texts. Checked when made."""

    payload: float
    recompute_layers: int | Literal["auto"]
    patch_layers: Literal["auto"] | Sequence[int] | None
    score: Score | None
    config: TranslatorConfig
    max_length: int
    progress: bool

    def __post_init__(self) -> None:
        if not isinstance(self.config, TranslatorConfig):
            raise ConfigError.of("config", "a TranslatorConfig", type(self.config).__name__)
        if not is_number(self.payload) or not 0 <= self.payload <= 2:
            raise ConfigError.of("payload", "a share of the bytes of bfloat16 keys and values, 0 to 2", self.payload)
        if self.patches and self.config.method == "joint":
            if self.config.layers_per_code not in (None, 1):
                raise ConfigError("patch_layers: expected codes of one layer each. Pass config=TranslatorConfig(layers_per_code=1).")
            object.__setattr__(self, "config", replace(self.config, layers_per_code=1))
        whole_number("max_length", self.max_length, 8, "at least 8 tokens")

    def run_layers(self, layers: int) -> list[int]:
        """Return the numbers of layers that the consumer may run, of so many."""
        if self.recompute_layers == "auto":
            return list(range(min(layers - 1, int(self.config.prefill_share * layers)) + 1))
        expected = f"'auto', or fewer than the {layers} layers there are"
        return [whole_number("recompute_layers", self.recompute_layers, 0, expected, most=layers - 1)]

    @property
    def patches(self) -> bool:
        """Whether layers may be patched."""
        return self.patch_layers not in (None, [], ())

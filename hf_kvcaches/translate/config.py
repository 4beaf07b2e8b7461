"""The options that a translator is fitted with, and how it was fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hf_kvcaches.errors import ConfigError, is_number, require_choice, whole_number
from hf_kvcaches.stores.catalog import bytes_of_size

Metric = Literal["loss", "plain"]
# Defaults: at most 4 layers and 2,048 numbers a token share a code; moments and transforms take the square.
_MOST_SHARING, _WIDEST_CODE = 4, 2048


@dataclass(frozen=True)
class TranslatorConfig:
    """Options of `CacheTranslator.fit` that have good defaults.

    Args:
        layers_per_code: How many consecutive layers share a code. More layers lose less at the same bytes, but rebuilding takes more time,
            and fitting more memory. None: up to 4, as long as their keys and values together have at most 2,048 numbers a token.
        metric: What errors cost: by gradients of the predictions after a text (`"loss"`), or all of a layer the same (`"plain"`).
        layer_map: The producer's layer that predicts each layer of the consumer. None: the one nearest in depth; `"fit"`: the best one on
            the first texts, none below that of the layer before.
        prefill_share: The share of the consumer's layers that `recompute_layers="auto"` may run.
        exact_tokens: How many first tokens of a prompt the consumer runs itself. They are unlike all others, which attend to them.
        ridge: Regularisation, as a share of the mean variance. None: less the more tokens there are.
        memory: What the sums over texts may take, in bytes or such as `"8GiB"`. Where they take more, layers are fitted in groups, and both
            models read the texts once for each group.
    """

    layers_per_code: int | None = None
    metric: Metric = "loss"
    layer_map: Sequence[int] | Literal["fit"] | None = None
    prefill_share: float = 0.25
    exact_tokens: int = 4
    ridge: float | None = None
    memory: int | str = "8GiB"

    def __post_init__(self) -> None:
        require_choice("metric", self.metric, get_args(Metric))
        if self.layers_per_code is not None:
            whole_number("layers_per_code", self.layers_per_code, 1)
        whole_number("exact_tokens", self.exact_tokens, 0)
        if self.layer_map not in (None, "fit"):
            expected = "a layer of the producer for each of the consumer's, or 'fit'"
            object.__setattr__(self, "layer_map", tuple(whole_number("layer_map", layer, 0, expected) for layer in self.layer_map or ()))
        if not is_number(self.prefill_share) or not 0 <= self.prefill_share <= 1:
            raise ConfigError.of("prefill_share", "a share of 0 to 1", self.prefill_share)
        if self.ridge is not None and (not isinstance(self.ridge, float) or not 0 < self.ridge < 1):
            raise ConfigError.of("ridge", "a small share above 0, as 1e-8, or None", self.ridge)
        memory = bytes_of_size("memory", self.memory)
        if memory is None:
            raise ConfigError.of("memory", "a number of bytes, or such as '8GiB'", self.memory)
        object.__setattr__(self, "memory", memory)

    def layers_of_width(self, width: int) -> int:
        """Return `layers_per_code`, or its default for layers with `width` key and value numbers a token."""
        return self.layers_per_code or max(1, min(_MOST_SHARING, _WIDEST_CODE // width))

    def run_layers(self, recompute_layers: Any, layers: int) -> list[int]:
        """Return the numbers of layers, of so many, that the consumer may run: with "auto" 0, 1, 2, 4 and so on."""
        if recompute_layers == "auto":
            most = min(layers - 1, int(self.prefill_share * layers))
            return [0, *(1 << power for power in range(most.bit_length()))]
        expected = f"'auto', or fewer than the {layers} layers there are"
        return [whole_number("recompute_layers", recompute_layers, 0, expected, most=layers - 1)]


@dataclass(frozen=True)
class TranslatorSettings:
    """How a translator was fitted: the options in use, how much it read, and KL divergences on held-out texts."""

    payload: float
    recompute_layers: int
    exact_tokens: int
    metric: Metric
    layers_per_code: int
    layer_map: tuple[int, ...]
    texts: int = 0
    tokens: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)

"""What a prefill costs, counted: multiplications and additions in the decoder layers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat


@dataclass(frozen=True)
class Costs:
    """The cost of one token in one layer, in floating-point operations.

    Args:
        scores: In each layer's attention, for each token that is looked at.
    """

    linear: tuple[float, ...]
    scores: tuple[float, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Costs:
        """Read from a model's weights and config. All experts of a mixture are counted."""
        if model in _known:
            return _known[model]
        _, _, layers = compat.decoder_layers(model)
        linear = tuple(float(2 * sum(weight.numel() for weight in layer.parameters() if weight.ndim >= 2)) for layer in layers)
        # A product of queries and keys, and one of weights and values.
        scores = tuple(4.0 * _query_size(config) for config in compat.layer_configs(compat.decoder_config(model.config)))
        costs = _known[model] = cls(linear, scores)
        return costs

    def of_tokens(self, places: npt.NDArray[np.int64], start: int = 0, stop: int | None = None) -> float:
        """The cost of running tokens through some layers.

        Args:
            places: Of the tokens in their row: each looks at all tokens up to itself.
            stop: Behind the highest; None: all.
        """
        chosen = self.linear[start:stop]
        return len(places) * sum(chosen) + sum(self.scores[start:stop]) * float((places + 1).sum())

    def of_prompt(self, begin: int, stop: int) -> float:
        """The cost of all tokens of a stretch."""
        return self.of_tokens(np.arange(begin, stop))


def _query_size(config: PreTrainedConfig) -> int:
    heads: int = config.num_attention_heads
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


_known: weakref.WeakKeyDictionary[PreTrainedModel, Costs] = weakref.WeakKeyDictionary()

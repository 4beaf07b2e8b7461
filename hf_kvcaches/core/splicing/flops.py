"""What a prefill costs, counted: multiplications and additions in the decoder layers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from hf_kvcaches import compat


@dataclass(frozen=True)
class Costs:
    """The cost of one token in one layer, in floating-point operations.

    Args:
        linear: In each layer's matrices.
        scores: In attention, for each token that is looked at.
    """

    linear: tuple[float, ...]
    scores: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> Costs:
        """Read from a model's weights and config. All experts of a mixture are counted.

        Args:
            model: A causal language model.
        """
        if model in _known:
            return _known[model]
        _, _, layers = compat.decoder_layers(model)
        config = compat.decoder_config(model.config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        linear = tuple(float(2 * sum(weight.numel() for weight in layer.parameters() if weight.ndim >= 2)) for layer in layers)
        # A product of queries and keys, and one of weights and values.
        costs = _known[model] = cls(linear, float(4 * config.num_attention_heads * head_dim))
        return costs

    def of_tokens(self, places: npt.NDArray[np.int64], start: int = 0, stop: int | None = None) -> float:
        """The cost of running tokens through some layers.

        Args:
            places: Of the tokens in their row: each looks at all tokens up to itself.
            start: The lowest layer.
            stop: Behind the highest; None: all.
        """
        chosen = self.linear[start:stop]
        return len(places) * sum(chosen) + len(chosen) * self.scores * float((places + 1).sum())

    def of_prompt(self, begin: int, stop: int) -> float:
        """The cost of all tokens of a stretch.

        Args:
            begin: The first.
            stop: Behind the last.
        """
        return self.of_tokens(np.arange(begin, stop))


_known: weakref.WeakKeyDictionary[PreTrainedModel, Costs] = weakref.WeakKeyDictionary()

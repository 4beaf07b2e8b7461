"""Count what a prefill costs: multiplications and additions in the decoder layers."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.reuse.plan import Indices, PromptRow


@dataclass(frozen=True)
class Costs:
    """The cost of one token in one layer, in floating-point operations.

    Args:
        linear: Of each layer's matrices.
        scores: Of each layer's attention, for each key that the token attends to.
    """

    linear: tuple[float, ...]
    scores: tuple[float, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Costs:
        """Read the costs from a model's weights and config, once. All experts of a mixture are counted."""
        if model in _COSTS:
            return _COSTS[model]
        _, _, layers = decoder_layers(model)
        linear = tuple(float(2 * sum(weight.numel() for weight in layer.parameters() if weight.ndim >= 2)) for layer in layers)
        # A product of queries and keys, and one of weights and values.
        scores = tuple(4.0 * _query_size(config) for config in compat.decoder_config(model.config).per_layer_config)
        return _COSTS.setdefault(model, cls(linear, scores))

    def of_tokens(self, indices: Indices, start: int = 0) -> float:
        """Return the cost of running tokens through the layers from `start` on.

        Args:
            indices: The tokens' indices in their row: each attends to all tokens up to itself.
        """
        return len(indices) * sum(self.linear[start:]) + sum(self.scores[start:]) * float((indices + 1).sum())

    def of_prompt(self, begin: int, stop: int) -> float:
        """Return the cost of a span of tokens."""
        return self.of_tokens(np.arange(begin, stop))

    def of_row(self, row: PromptRow) -> float:
        """Return the cost of the tokens that a plan does not reuse, of the last token, and of those that ran once more."""
        repaired = [(span.computed, span.repair_depth) for span in row.spans if span.repair and span.repair_depth is not None]
        saved = sum(self.of_tokens(indices, depth) for indices, depth in repaired)
        probed = self.of_prompt(len(row.ids) - row.probed, len(row.ids))
        return self.of_tokens(np.append(row.computed, len(row.ids) - 1)) + probed - saved


def _query_size(config: PreTrainedConfig) -> int:
    heads: int = config.num_attention_heads
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


_COSTS: WeakKeyDictionary[PreTrainedModel, Costs] = WeakKeyDictionary()

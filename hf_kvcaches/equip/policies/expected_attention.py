"""Expected attention: the attention of future queries, from the statistics of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_kvcaches.equip.policies.base import PeriodicPolicy, count
from hf_kvcaches.equip.tokens import Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError, is_number, require_instance
from hf_kvcaches.kernels.rotation import rotate_

if TYPE_CHECKING:
    from hf_kvcaches.equip.query_statistics import QueryStatistics


@dataclass(frozen=True)
class ExpectedAttentionPolicy(PeriodicPolicy, built_in=True):
    """Keeps the tokens that future queries, with the statistics of known ones, would attend to most.

    Expected Attention (KV Cache Compression by Estimating Attention from Future Queries Distribution, arXiv 2510.00636): queries before
    their rotation are taken as normally distributed, so that the attention weight of a key has an expectation in closed form,
    `exp(m k + k S k / 2)`. It is multiplied by the norm of the value.

    **Departs from the paper**: without `statistics`, mean and covariance are those of the block's queries (while decoding, of the last
    64). A cache of a policy with `statistics` can't be loaded from a file, nor pruned where no model runs (`compress`, `from_cache`).

    Args:
        future: Future positions over which the rotation is averaged.
        epsilon: Added to the expected weight, so that large values stay even without attention.
        statistics: The paper's calibrated mean and covariance.
    """

    name = "expected_attention"
    queries = 64
    sees_block = True
    future: int = count(512)
    epsilon: float = 0.02
    statistics: QueryStatistics | None = None

    def __post_init__(self) -> None:
        from hf_kvcaches.equip.query_statistics import QueryStatistics

        super().__post_init__()
        if not is_number(self.epsilon) or self.epsilon < 0:
            raise ConfigError.of("epsilon", "a number of 0 or more", self.epsilon)
        if self.statistics is not None:
            require_instance("statistics", self.statistics, QueryStatistics, {}, "Use QueryStatistics.calibrate or from_pretrained.")
            for name, value in (("queries", 0), ("sees_block", False), ("asks_all_heads", True)):
                object.__setattr__(self, name, value)

    def settings(self) -> dict[str, Any]:
        return super().settings() if self.statistics is None else {"policy": f"{self.name} with statistics"}

    def score(self, tokens: Tokens) -> torch.Tensor:
        mean, covariance, scaling = self._moments(tokens)
        mean = self._rotated(tokens, mean[:, :, None])
        covariance = self._rotated(tokens, self._rotated(tokens, covariance).mT)
        keys = tokens.keys.detach().float()[:, :, None]  # (batch, kv_heads, 1, slots, head_dim)
        mean, covariance = (part.unflatten(1, (keys.shape[1], -1)) for part in (mean, covariance))
        logits = (keys @ mean.mT)[..., 0] * scaling + ((keys @ covariance) * keys).sum(-1) * (scaling**2 / 2)
        counted = tokens.counted()[:, :, None]
        expected = logits.masked_fill(~counted, torch.finfo(torch.float32).min).softmax(-1).mean(2)
        return (expected + self.epsilon) * tokens.values.detach().float().norm(dim=-1)

    def _moments(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Mean (batch, heads, head_dim), covariance (batch, heads, head_dim, head_dim) and scaling of the queries."""
        if self.statistics is None:
            queries, real = tokens.unrotated_queries().detach().float(), tokens.counted_queries()[:, None, :, None]
            count = real.sum(2).clamp(min=1)
            mean = (queries * real).sum(2) / count
            centered = (queries - mean[:, :, None]) * real
            return mean, centered.mT @ centered / count[..., None], tokens.scaling
        if tokens.module is None:
            raise UnsupportedError("statistics: no model runs now, so the layer is not known. Prune while the model runs, or pass none.")
        layer, keys = self.statistics.layers.get(int(getattr(tokens.module, "layer_idx", -1))), tokens.keys
        if layer is None or layer.mean.shape[-1] != keys.shape[-1] or layer.mean.shape[0] % tokens.heads:
            raise ConfigError.of("statistics", "those of this model", self.statistics, "Calibrate them with this model.")
        mean, covariance = (
            tokens.of_these_heads(part[None]).to(keys.device).expand(keys.shape[0], -1, *part.shape[1:]) for part in layer[:2]
        )
        return mean, covariance, float(layer.scaling)

    def _rotated(self, tokens: Tokens, rows: torch.Tensor) -> torch.Tensor:
        """Vectors without rotation, rotated to the future positions, on average."""
        if (geometry := tokens.rotation) is None:
            return rows
        length = torch.as_tensor(tokens.seen - tokens.first, device=rows.device).view(-1, 1)
        tables = geometry.cos_sin(length + torch.arange(self.future, device=rows.device))
        cos, sin = (table.mean(1)[:, None, None] * geometry.attention_scaling for table in tables)
        return rotate_(rows.clone(), cos, sin, geometry.layout)

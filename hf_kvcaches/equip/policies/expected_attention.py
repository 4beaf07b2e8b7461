"""Expected attention: the attention of future queries, from the statistics of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_kvcaches.equip.policies.base import Policy, count
from hf_kvcaches.equip.policies.tokens import Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError, is_number
from hf_kvcaches.kernels.rotation import rotate_


@dataclass(frozen=True)
class ExpectedAttentionPolicy(Policy, built_in=True):
    """Keeps the tokens that future queries, with the statistics of known ones, would attend to most.

    Expected Attention (KV Cache Compression by Estimating Attention from Future Queries Distribution, arXiv 2510.00636): queries before
    their rotation are taken as normally distributed, so that the attention weight of a key has an expectation in closed form,
    `exp(m k + k S k / 2)`. It is multiplied by the norm of the value.

    **Departs from the paper**: without `statistics`, mean and covariance are those of the block's queries (while decoding, of the last
    `interval`). A cache of a policy with `statistics` can't be loaded from a file, nor pruned where no model runs (`from_cache`).

    Args:
        future: Future positions over which the rotation is averaged.
        epsilon: Added to the expected weight, so that large values stay even without attention.
        statistics: The paper's calibrated mean and covariance, a `QueryStatistics`.
        interval: Decode steps between two scorings.
    """

    name = "expected_attention"
    reads_queries = True
    future: int = count(512)
    epsilon: float = 0.02
    statistics: Any = None
    interval: int = count(64, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.epsilon) or self.epsilon < 0:
            raise ConfigError.of("epsilon", "a number of 0 or more", self.epsilon)
        if self.statistics is not None:
            if getattr(self.statistics, "artifact_type", None) != "query-statistics":
                raise ConfigError.of(
                    "statistics", "a QueryStatistics", self.statistics, "Use QueryStatistics.calibrate or from_pretrained."
                )
            object.__setattr__(self, "reads_queries", False)
            object.__setattr__(self, "asks_all_heads", True)

    def settings(self) -> dict[str, Any]:
        return super().settings() if self.statistics is None else {"policy": f"{self.name} with statistics"}

    def score(self, tokens: Tokens) -> torch.Tensor:
        mean, covariance, scaling = self._moments(tokens)
        mean = self._rotated(tokens, mean[:, :, None])
        covariance = self._rotated(tokens, self._rotated(tokens, covariance).mT)
        keys = tokens.keys.detach().float()[:, :, None]  # (batch, kv_heads, 1, tokens, head_dim)
        mean, covariance = (part.unflatten(1, (keys.shape[1], -1)) for part in (mean, covariance))
        logits = (keys @ mean.mT)[..., 0] * scaling + ((keys @ covariance) * keys).sum(-1) * (scaling**2 / 2)
        expected = logits.masked_fill(~tokens.counted[:, :, None], torch.finfo(torch.float32).min).softmax(-1).mean(2)
        return (expected + self.epsilon) * tokens.values.detach().float().norm(dim=-1)

    def _moments(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Mean (batch, heads, head_dim), covariance (batch, heads, head_dim, head_dim) and scaling of the queries."""
        if self.statistics is None:
            queries, real = tokens.unrotated_queries().detach().float(), tokens.real_queries[:, None, :, None]
            total = real.sum(2).clamp(min=1)
            mean = (queries * real).sum(2) / total
            centered = (queries - mean[:, :, None]) * real
            return mean, centered.mT @ centered / total[..., None], tokens.scaling
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
        if (geometry := tokens.angles) is None:
            return rows
        end = torch.as_tensor(tokens.end, device=rows.device).view(-1, 1)
        tables = geometry.cos_sin(end + torch.arange(self.future, device=rows.device))
        cos, sin = (table.mean(1)[:, None, None] * geometry.attention_scaling for table in tables)
        return rotate_(rows.clone(), cos, sin, geometry.layout)

"""Expected attention: what queries to come will attend to, from the statistics of those that came."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import PeriodicPolicy, check_count
from hf_kvcaches.equip.tokens import Tokens
from hf_kvcaches.errors import ConfigError, is_number
from hf_kvcaches.kernels.rotation import rotate_


@dataclass(frozen=True)
class ExpectedAttentionPolicy(PeriodicPolicy):
    """Keeps the tokens that queries like those so far would attend to most, from the positions to come.

    Expected Attention (KV Cache Compression by Estimating Attention from Future Queries Distribution, arXiv 2510.00636): queries before
    their rotation are taken as normally distributed, so that the attention weight of a key has an expectation in closed form,
    `exp(m k + k S k / 2)`. It is scaled by the length of the value.

    **Departs from the paper**: mean and covariance are those of the block's queries (or of the last 64 while decoding), not of a
    calibration.

    Args:
        future: Positions to come, over which the rotation is averaged.
        epsilon: Added to the expected weight before it is scaled, so that large values stay even where nothing attends.
    """

    name = "expected_attention"
    queries = 64
    sees_block = True
    future: int = 512
    epsilon: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "future", 1)
        if not is_number(self.epsilon) or self.epsilon < 0:
            raise ConfigError.of("epsilon", "a number of 0 or more", self.epsilon)

    def score(self, tokens: Tokens) -> torch.Tensor:
        queries, real = tokens.unrotated_queries().detach().float(), tokens.counted_queries()
        count = real.sum(-1)[:, None, None].clamp(min=1)
        weights = real[:, None, :, None].float()
        mean = (queries * weights).sum(2) / count
        centred = (queries - mean[:, :, None]) * weights
        covariance = centred.transpose(2, 3) @ centred / count[..., None]
        mean = self._ahead(tokens, mean[:, :, None])[:, :, 0]
        covariance = self._ahead(tokens, self._ahead(tokens, covariance).transpose(2, 3))
        heads, scaling = tokens.keys.shape[1], tokens.scaling
        keys = tokens.keys.detach().float()[:, :, None]
        mean, covariance = mean.unflatten(1, (heads, -1)), covariance.unflatten(1, (heads, -1))
        logits = (keys @ mean[..., None])[..., 0] * scaling + ((keys @ covariance) * keys).sum(-1) * (scaling**2 / 2)
        counted = (tokens.row_index() >= tokens.sinks)[:, :, None]
        expected = logits.masked_fill(~counted, torch.finfo(torch.float32).min).softmax(-1).mean(2)
        return (expected + self.epsilon) * tokens.values.detach().float().norm(dim=-1)

    def _ahead(self, tokens: Tokens, rows: torch.Tensor) -> torch.Tensor:
        """Vectors before rotation, rotated to the positions to come, on average."""
        geometry = tokens.rotation
        if geometry is None:
            return rows
        length = torch.as_tensor(tokens.seen - tokens.first, device=rows.device).view(-1, 1)
        tables = geometry.cos_sin(length + torch.arange(self.future, device=rows.device))
        cos, sin = (table.mean(1)[:, None, None] for table in tables)
        return rotate_(rows.clone(), cos, sin, geometry.layout)

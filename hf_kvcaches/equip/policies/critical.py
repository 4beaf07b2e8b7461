"""CriticalKV: what a value contributes to the layer's output, besides its attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.codec.metric import output_rows
from hf_kvcaches.equip.policies.base import WrappingPolicy
from hf_kvcaches.equip.tokens import Tokens
from hf_kvcaches.errors import ConfigError, is_number


@dataclass(frozen=True)
class CriticalPolicy(WrappingPolicy, built_in=True):
    """Fills a part of the budget by another policy's scores, and the rest by these times the norm of the value in the layer's output.

    CriticalKV (Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective, arXiv 2502.03805): the error that an
    evicted token causes is bounded by its attention times the norm of its value behind the output projection.

    **Departs from the paper**: without a projection (keys from another cache) the norm of the value itself is taken.

    Args:
        share: Of the budget that the other policy alone fills.
        epsilon: Added to scores before they are multiplied.
    """

    name = "critical"
    inner: object = "snapkv"
    share: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "asks_all_heads", True)
        for name, most in (("share", 1.0), ("epsilon", float("inf"))):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= most:
                raise ConfigError.of(name, f"a number from 0 to {most:g}", value)

    def score(self, tokens: Tokens) -> torch.Tensor:
        scores = torch.where(tokens.positions < 0, -torch.inf, self.inner_score(tokens))
        weighted = torch.where(scores.isposinf(), torch.inf, (scores.clamp(min=0) + self.epsilon) * self._value_norms(tokens))
        first = 0 if tokens.budget is None else int(self.share * min(tokens.budget, scores.shape[-1]))
        return weighted.scatter(-1, scores.topk(first, -1).indices, torch.inf)

    def _value_norms(self, tokens: Tokens) -> torch.Tensor:
        """The L1 norm of each value behind the projection, the mean over a group, (batch, kv_heads, slots)."""
        values = tokens.values.detach().float()
        heads = values.shape[1] * int(getattr(tokens.module, "num_key_value_groups", 1))
        rows = None if tokens.module is None else output_rows(tokens.module, heads, tokens.values.detach(), tokens.shard)
        if rows is None:
            return values.norm(dim=-1)
        grouped = rows.float().unflatten(0, (values.shape[1], -1))  # (kv_heads, group, value_dim, hidden)
        norms = [torch.stack([(values[:, h] @ part).abs().sum(-1) for part in group]) for h, group in enumerate(grouped)]
        return torch.stack(norms, 2).mean(0)

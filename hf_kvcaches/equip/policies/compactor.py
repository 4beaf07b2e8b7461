"""Compactor: leverage scores and non-causal attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from hf_kvcaches.codec.moments import second_moment
from hf_kvcaches.equip.policies.base import Policy, count
from hf_kvcaches.equip.policies.future import piece
from hf_kvcaches.equip.policies.tokens import NOTHING, Tokens
from hf_kvcaches.equip.storage import pick
from hf_kvcaches.errors import ConfigError, is_number


@dataclass(frozen=True)
class CompactorPolicy(Policy, built_in=True):
    """Keeps the tokens with outlying keys, and those that the tokens around them, later or earlier, attend to.

    Compactor (Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores, arXiv 2507.08143): the leverage of each
    centered key before its rotation, `x (X'X)^-1 x'`, which is large for keys that are no combination of others; and the attention of a
    block's queries to the keys of their chunk without a causal mask, times the norm of the value, pooled over neighbours.

    **Departs from the paper**: leverage is exact, from the second moments of a head's keys, and not from a random sketch; sinks, with keys
    unlike all others, are left out of the moments; terms are standardized over a head's tokens; attention is added for those tokens
    alone whose queries are there. Logits are not scaled, as in its authors' code.

    Args:
        weight: Of the leverage term; the attention term has 1.
        chunk: Tokens that attend to each other.
        interval: Decode steps between two scorings.
    """

    name = "compactor"
    reads_queries = True
    weight: float = 1.0
    chunk: int = count(256)
    interval: int = count(64, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.weight) or self.weight < 0:
            raise ConfigError.of("weight", "a number of 0 or more", self.weight)

    def score(self, tokens: Tokens) -> torch.Tensor:
        scores = self.weight * _standardized(leverage(tokens), tokens.real)
        if tokens.queries is None or not 1 < tokens.queries.shape[2] <= tokens.keys.shape[2]:
            return scores
        attention, asked = self._attention(tokens, tokens.queries.detach())
        return scores + torch.where(asked, _standardized(attention, asked), 0.0)

    def _attention(self, tokens: Tokens, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention term of each token, and True for tokens whose queries are there, (batch, kv_heads, tokens) each."""
        (batch, heads, slots, _), (length, index) = tokens.keys.shape, (queries.shape[2], tokens.query_index)
        assert index is not None
        # A block's tokens are the last ones; chunks begin at a row's first real one.
        order = (index < 0).byte().argsort(dim=-1, stable=True).expand(batch, -1)[:, None]
        slot = (order + slots - length).expand(-1, heads, -1)
        rotated = (tokens.positions if tokens.index is None else tokens.index).expand(-1, heads, -1).gather(-1, slot)
        asked = (rotated == index.expand(batch, -1)[:, None].gather(-1, order)) & (rotated >= 0)
        size = min(self.chunk, length)
        in_chunks = lambda part: functional.pad(part, (0, 0, 0, -length % size)).unflatten(2, (-1, size))  # noqa: E731
        keys = in_chunks(pick(tokens.keys.detach(), slot).float()).flatten(0, 2)
        queries = in_chunks(pick(queries, order).float()).unflatten(1, (heads, -1)).transpose(2, 3).flatten(3, 4).flatten(0, 2)
        present = in_chunks(asked[..., None].float()).flatten(0, 2).mT  # (batch * kv_heads * chunks, 1, chunk)
        # Each query that is there counts once, and no key that is not.
        bias, counts = (1 - present) * NOTHING, present.repeat(1, 1, queries.shape[1] // size)
        step = max(1, piece(keys) // (queries.shape[1] * size))
        parts = [slice(start, start + step) for start in range(0, len(keys), step)]
        received = torch.cat([counts[p] @ torch.baddbmm(bias[p], queries[p], keys[p].mT).softmax(-1) for p in parts])
        received = received.view(batch, heads, -1)[..., :length] / (queries.shape[1] // size)
        norms = tokens.values.detach().float().norm(dim=-1).gather(2, slot)
        pooled = functional.avg_pool1d(received * norms * asked, 3, 1, 1)
        empty = pooled.new_zeros(batch, heads, slots)
        return empty.scatter(-1, slot, pooled), empty.bool().scatter(-1, slot, asked)


def leverage(tokens: Tokens) -> torch.Tensor:
    """The leverage of each token's key among those of its row and head, (batch, kv_heads, tokens); 0 for sinks."""
    counted = tokens.counted.float()[..., None]
    keys = tokens.unrotated_keys().detach().float()
    keys = (keys - (keys * counted).sum(2, keepdim=True) / counted.sum(2, keepdim=True).clamp(min=1)) * counted
    moments = second_moment(keys)  # float64: with fewer keys than dimensions they are singular, and rounding would decide
    # The ridge takes the weight from directions that hold nothing but rounding errors.
    ridge = 1e-2 * moments.diagonal(dim1=2, dim2=3).mean(-1).clamp(min=torch.finfo(torch.float32).tiny)
    moments.diagonal(dim1=2, dim2=3).add_(ridge[..., None])
    factor = torch.linalg.cholesky(moments)
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    # Solving for each key takes ten times longer than this product.
    return (keys @ torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False).mT.float()).square().sum(-1)


def _standardized(scores: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Scores with mean 0 and deviation 1 over the real tokens of a head."""
    count = real.sum(-1, keepdim=True).clamp(min=1)
    centered = scores - scores.masked_fill(~real, 0.0).sum(-1, keepdim=True) / count
    deviation = (centered.masked_fill(~real, 0.0).square().sum(-1, keepdim=True) / count).sqrt()
    return centered / deviation.clamp(min=1e-6)

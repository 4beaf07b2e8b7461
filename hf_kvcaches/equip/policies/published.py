"""Policies that papers describe: by age, keys, the attention that was paid, or the queries of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from hf_kvcaches.codec.moments import second_moment
from hf_kvcaches.equip.policies.base import Policy, parameter
from hf_kvcaches.equip.policies.future import in_chunks, weights_in_chunks
from hf_kvcaches.equip.policies.tokens import NOTHING, Tokens
from hf_kvcaches.equip.storage import pick
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.rotation import rotate_


@dataclass(frozen=True)
class StreamingPolicy(Policy, built_in=True):
    """Keeps the sinks and the newest tokens.

    StreamingLLM (Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453): the first tokens of a text take the
    attention that no other token needs, and a model without them fails. With them and a sliding window it reads a text of any length.

    **Departs from the paper**: in nothing. The paper's positions within the cache are `positions="compact"` of the cache.
    """

    name = "streaming"
    interval = None
    order_only = True

    def recent(self, budget: int, sinks: int) -> int:
        return max(1, budget - sinks)

    def score(self, tokens: Tokens) -> torch.Tensor:
        # Counted from the end, because float32 holds integers up to 2^24 only.
        return (tokens.positions - tokens.count).float()


@dataclass(frozen=True)
class KeyDiffPolicy(Policy, built_in=True):
    """Keeps the tokens with the keys least similar to the mean direction of all keys.

    KeyDiff (Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference, arXiv 2504.15364): similar keys can replace each
    other. No attention is needed, and the score does not depend on the question.

    **Departs from the paper**: prompts are scored as a whole and not in blocks, decoded tokens `interval` at a time.

    Args:
        interval: Decode steps between two scorings.
    """

    name = "keydiff"
    interval: int = parameter(64, kw_only=True)

    def score(self, tokens: Tokens) -> torch.Tensor:
        keys = functional.normalize(tokens.keys.detach().float(), dim=-1)
        anchor = (keys * tokens.real[..., None]).sum(2, keepdim=True)
        return -functional.cosine_similarity(keys, anchor, dim=-1)


@dataclass(frozen=True)
class H2OPolicy(Policy, built_in=True):
    """Keeps the tokens that received most attention from all queries since they came.

    H2O (Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, arXiv 2306.14048): the running sum of attention
    identifies the few tokens that get most of it. Half of the budget holds the newest tokens.

    **Departs from the paper**: sinks stay, a token is evicted before the new query attends, and heads that share keys are averaged.
    """

    name = "h2o"
    interval = None
    observes = None
    first_score = 0.0
    comparable = True

    def recent(self, budget: int, sinks: int) -> int:
        return max(1, min(budget // 2, budget - sinks))

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.observed

    def watch(self, scores: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor) -> None:
        scores.add_(weights)


@dataclass(frozen=True)
class TOVAPolicy(Policy, built_in=True):
    """Keeps the tokens that the last query attends to most, the same for all heads of a layer.

    TOVA (Transformers are Multi-State RNNs, arXiv 2401.06104) evicts the token with the lowest attention of the current query.

    **Departs from the paper**: a token is evicted before the new query attends; sinks and the newest token stay.
    """

    name = "tova"
    interval = None
    observes = 1
    by_head = False
    asks_all_heads = True

    def recent(self, budget: int, sinks: int) -> int:
        return 1

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.of_all_heads(tokens.observed).mean(1, keepdim=True)

    def watch(self, scores: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor) -> None:
        scores.copy_(torch.where(scores.isinf(), scores, weights.mean(1, keepdim=True)))


@dataclass(frozen=True)
class SnapKVPolicy(Policy, built_in=True):
    """Keeps the tokens that the last `window` queries attend to, together with their neighbours.

    SnapKV (LLM Knows What You are Looking for Before Generation, arXiv 2404.14469): the end of a prompt already shows which spans of it
    the answer will need. Prune with the question in the prompt: without it, a fact that nobody has asked for yet is lost.

    **Departs from the paper**: pools by the mean and averages heads that share keys, as kvpress does; sinks stay; heads and layers share
    their budgets; tokens are evicted while decoding too, and observed again after each `window` tokens.

    Args:
        window: Queries that observe; as many of the newest tokens always stay.
        kernel_size: Neighbours that are pooled; odd.
    """

    name = "snapkv"
    comparable = True
    head_budgets = "global"
    window: int = parameter(64)
    kernel_size: int = parameter(5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel_size % 2 == 0:
            raise ConfigError.of("kernel_size", "an odd number, so that neighbours lie on both sides of a token", self.kernel_size)
        object.__setattr__(self, "observes", self.window)
        object.__setattr__(self, "interval", self.window)

    def recent(self, budget: int, sinks: int) -> int:
        return self.window

    def score(self, tokens: Tokens) -> torch.Tensor:
        order = tokens.positions.argsort(-1).expand_as(tokens.observed)
        # Empty slots sort first, with zeros, like padding of the pool. Sums rank tokens as means do.
        received = torch.where(tokens.real, tokens.observed, 0).gather(-1, order)
        scores = torch.full_like(received, torch.inf)
        if (earlier := received.shape[-1] - self.window) > 0:
            scores[..., :earlier] = functional.avg_pool1d(received[..., :earlier], self.kernel_size, 1, self.kernel_size // 2)
        return torch.empty_like(scores).scatter_(-1, order, scores)


@dataclass(frozen=True)
class CompactorPolicy(Policy, built_in=True):
    """Keeps the tokens with outlying keys, and those that the tokens around them, later or earlier, attend to.

    Compactor (Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores, arXiv 2507.08143): the leverage of each
    centered key before its rotation, `x (X'X)^-1 x'`, which is large for keys that are no combination of others; and the attention of a
    block's queries to the keys of their chunk without a causal mask, times the norm of the value, pooled over neighbours.

    **Departs from the paper**: leverage is exact, without sinks, and not from a random sketch; terms are standardized over a head's tokens;
    attention is added for those tokens alone whose queries are there. Logits are not scaled, as in its authors' code.

    Args:
        weight: Of the leverage term; the attention term has 1.
        chunk: Tokens that attend to each other.
        interval: Decode steps between two scorings.
    """

    name = "compactor"
    reads_queries = True
    weight: float = parameter(1.0, least=0)
    chunk: int = parameter(256)
    interval: int = parameter(64, kw_only=True)

    def score(self, tokens: Tokens) -> torch.Tensor:
        scores = self.weight * _standardized(leverage(tokens), tokens.real)
        if tokens.queries is None or not 1 < tokens.queries.shape[2] <= tokens.keys.shape[2]:
            return scores
        attention, asked = self._attention(tokens, tokens.queries.detach())
        return scores + torch.where(asked, _standardized(attention, asked), 0.0)

    def _attention(self, tokens: Tokens, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention term of each token, and True for tokens whose queries are there, (batch, kv_heads, tokens) each."""
        (batch, heads, slots, _), length, index = tokens.keys.shape, queries.shape[2], tokens.query_index
        # A block's tokens are the last ones; chunks begin at a row's first real one.
        order = (index < 0).byte().argsort(dim=-1, stable=True).expand(batch, -1)[:, None]
        slot = (order + slots - length).expand(-1, heads, -1)
        rotated = tokens.rotated_to.expand(-1, heads, -1).gather(-1, slot)
        asked = (rotated == index.expand(batch, -1)[:, None].gather(-1, order)) & (rotated >= 0)
        size = min(self.chunk, length)
        filled = lambda part: functional.pad(part, (0, 0, 0, -length % size))  # noqa: E731
        keys = filled(pick(tokens.keys.detach(), slot).float()).unflatten(2, (-1, size))
        queries = in_chunks(filled(pick(queries, order).float()), heads, size)
        # Each query that is there counts once, and no key that is not.
        present = filled(asked[..., None].float())[..., 0].unflatten(2, (-1, size))
        group = queries.shape[3] // size
        received = weights_in_chunks(queries, keys, (1 - present) * NOTHING, present.repeat(1, 1, 1, group)) / group
        received = received.flatten(2)[..., :length]
        norms = tokens.values.detach().float().norm(dim=-1).gather(2, slot)
        pooled = functional.avg_pool1d(received * norms * asked, 3, 1, 1)
        empty = pooled.new_zeros(batch, heads, slots)
        return empty.scatter(-1, slot, pooled), empty.bool().scatter(-1, slot, asked)


def leverage(tokens: Tokens) -> torch.Tensor:
    """The leverage of each token's key among those of its row and head, (batch, kv_heads, tokens); 0 for sinks."""
    counted = (tokens.positions >= tokens.sinks).float()[..., None]
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


@dataclass(frozen=True)
class ExpectedAttentionPolicy(Policy, built_in=True):
    """Keeps the tokens that future queries, with the statistics of known ones, would attend to most.

    Expected Attention (KV Cache Compression by Estimating Attention from Future Queries Distribution, arXiv 2510.00636): queries before
    their rotation are taken as normally distributed, so that a key's weight has an expectation, `exp(m k + k S k / 2)`. It is multiplied by
    the norm of the value.

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
    future: int = parameter(512)
    epsilon: float = parameter(0.02, least=0)
    statistics: Any = None
    interval: int = parameter(64, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.statistics is not None:
            if getattr(self.statistics, "artifact_type", None) != "query-statistics":
                hint = "Use QueryStatistics.calibrate or from_pretrained."
                raise ConfigError.of("statistics", "a QueryStatistics", self.statistics, hint)
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
        expected = logits.masked_fill((tokens.positions < tokens.sinks)[:, :, None], torch.finfo(torch.float32).min).softmax(-1).mean(2)
        return (expected + self.epsilon) * tokens.values.detach().float().norm(dim=-1)

    def _moments(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Mean (batch, heads, head_dim), covariance (batch, heads, head_dim, head_dim) and scaling of the queries."""
        if self.statistics is None:
            queries = tokens.unrotated(tokens.asked.detach(), tokens.query_index).float()
            real = (tokens.query_index >= tokens.sinks)[:, None, :, None]
            total = real.sum(2).clamp(min=1)
            mean = (queries * real).sum(2) / total
            centered = (queries - mean[:, :, None]) * real
            return mean, centered.mT @ centered / total[..., None], tokens.scaling
        if tokens.module is None:
            raise UnsupportedError("statistics: no model runs now, so the layer is not known. Prune while the model runs, or pass none.")
        layer, keys = self.statistics.layers.get(int(getattr(tokens.module, "layer_idx", -1))), tokens.keys
        if layer is None or layer.mean.shape[-1] != keys.shape[-1] or layer.mean.shape[0] % tokens.heads:
            raise ConfigError.of("statistics", "those of this model", self.statistics, "Calibrate them with this model.")
        of_layer = (tokens.of_these_heads(part[None]).to(keys.device) for part in layer[:2])
        mean, covariance = (part.expand(keys.shape[0], *part.shape[1:]) for part in of_layer)
        return mean, covariance, float(layer.scaling)

    def _rotated(self, tokens: Tokens, rows: torch.Tensor) -> torch.Tensor:
        """Vectors without rotation, rotated to the future positions, on average."""
        if (geometry := tokens.angles) is None:
            return rows
        end = torch.as_tensor(tokens.end, device=rows.device).view(-1, 1)
        tables = geometry.cos_sin(end + torch.arange(self.future, device=rows.device))
        cos, sin = (table.mean(1)[:, None, None] * geometry.attention_scaling for table in tables)
        return rotate_(rows.clone(), cos, sin, geometry.layout)

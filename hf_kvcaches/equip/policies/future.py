"""Policies that score by what the model would look for in the context again: future attention and KVzip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvcaches.equip.policies.base import Policy, parameter
from hf_kvcaches.equip.policies.tokens import NOTHING, UNSCORED, Tokens
from hf_kvcaches.equip.storage import pick

# How many tokens stand for those outside of a chunk.
_SAMPLE = 128


@dataclass(frozen=True)
class FuturePolicy(Policy, built_in=True):
    """Keeps the tokens that queries of the context attend to once they are rotated to a position behind its end.

    What will be asked is asked from behind the context, and by queries of this model. So each query is rotated behind the end, where it
    sees its neighbours as a later one would, and a token scores the largest weight that any query of its chunk gives it. Sinks and a sample
    of all other tokens share the weights, so that a head that looks anywhere gives little to each. One pass, no calibration. KVzip takes
    the same maximum over a second reading, Expected Attention a mean over a distribution of queries.

    Args:
        ahead: How far behind the end.
        chunk: Consecutive tokens whose queries attend to each other.
        interval: Decode steps between two scorings. A token's score does not fall.
    """

    name = "future"
    reads_queries = True
    comparable = True
    head_budgets = "global"
    ahead: int = parameter(32, least=0)
    chunk: int = parameter(256)
    interval: int = parameter(64, kw_only=True)

    def score(self, tokens: Tokens) -> torch.Tensor:
        return future_attention(tokens, self.ahead, self.chunk)


def future_attention(tokens: Tokens, ahead: int = 32, chunk: int = 256) -> torch.Tensor:
    """The largest weight that a query of its chunk, over the heads of a group, gives to each token, (batch, kv_heads, tokens).

    Where an adopted prompt has fewer queries than tokens, all are asked about each chunk. Older tokens keep their scores; +inf for none.
    """
    index, (_, heads, slots, _) = tokens.query_index, tokens.keys.shape
    few = tokens.scores is None and tokens.asked.shape[2] < slots
    end = tokens.end.flatten(1) if isinstance(tokens.end, torch.Tensor) else tokens.end
    queries = tokens.moved(tokens.asked.detach(), end + ahead - index)
    order, real = _in_order(tokens.positions)
    asking, asked = _in_order(index)
    length = slots if few else queries.shape[2]
    # The newest tokens of each row and head, as many as it has queries.
    total = real.sum(-1, keepdim=True)
    count = total if few else total.minimum(asked.sum(-1).view(-1, 1, 1))
    # The last chunk ends with the last token and overlaps the one before: among few tokens each would get much of the attention.
    size = min(chunk, length)
    starts = torch.arange(0, length, size, device=count.device).minimum((count - size).clamp(min=0))
    places = starts[..., None] + torch.arange(size, device=count.device)  # (batch, 1 or kv_heads, chunks, size)
    there, first = places < count[..., None], places + (total - count)[..., None]
    picks = order.gather(-1, first.clamp(max=slots - 1).flatten(2))
    keys = pick(tokens.keys.detach(), picks).float().unflatten(2, places.shape[2:])
    bias = torch.where(there, 0.0, NOTHING)
    if slots > size:  # others share the weights, too
        sample, weight = _sample(total, tokens.sinks)
        others = pick(tokens.keys.detach(), order.gather(-1, sample.clamp(max=slots - 1))).float()
        keys = torch.cat([keys, others[:, :, None].expand(-1, -1, places.shape[2], -1, -1)], 3)
        outside = (sample[:, :, None] < first[..., :1]) | (sample[:, :, None] > first[..., -1:])
        bias = torch.cat([bias, torch.where(outside & (sample < total)[:, :, None], weight[:, :, None], NOTHING)], -1)
    if few:
        queries = pick(queries, asking[:, None]).unflatten(1, (heads, -1)).flatten(2, 3)[:, :, None].expand(-1, -1, places.shape[2], -1, -1)
    else:  # behind the last token asks the query of the last one
        asking = asking[:, None].expand(*places.shape[:2], -1).gather(-1, places.minimum((count - 1).clamp(min=0)[..., None]).flatten(2))
        queries = in_chunks(pick(queries, asking.repeat_interleave(queries.shape[1] // asking.shape[1], 1)), heads, size)
    best = weights_in_chunks(queries.float() * tokens.scaling, keys, bias.expand(*keys.shape[:4]))[..., :size]
    best = torch.where(there, best, -torch.inf).flatten(2)
    scores = torch.full(tokens.keys.shape[:3], -torch.inf, device=keys.device)
    scores.scatter_reduce_(-1, picks.expand_as(best), best, "amax")
    if tokens.scores is not None:
        scores = torch.maximum(scores, torch.where(tokens.scores < UNSCORED, tokens.scores, -torch.inf))
    return scores.masked_fill(scores == -torch.inf, torch.inf)


def _sample(count: torch.Tensor, sinks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sinks, and others evenly, of so many tokens, and the logarithm of how many each stands for, (batch, 1 or kv_heads, n) each."""
    rest, number = (count - sinks).clamp(min=0), torch.arange(_SAMPLE, device=count.device)
    every = torch.arange(sinks, device=count.device).expand(*count.shape[:2], -1)
    weight = (rest / _SAMPLE).log().expand(-1, -1, _SAMPLE)
    return torch.cat([every, sinks + number * rest // _SAMPLE], -1), torch.nn.functional.pad(weight, (sinks, 0))


def _in_order(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which token comes at each place in order of position, those that are none last, and True for those that are one."""
    ordered, order = torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions).sort(dim=-1, stable=True)
    return order, ordered < torch.iinfo(positions.dtype).max


def in_chunks(queries: torch.Tensor, kv_heads: int, size: int) -> torch.Tensor:
    """Queries, (batch, heads, chunks * size, head_dim), for `weights_in_chunks`."""
    return queries.unflatten(1, (kv_heads, -1)).unflatten(3, (-1, size)).transpose(2, 3).flatten(3, 4)


def weights_in_chunks(queries: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """The largest weight that a chunk's queries, (batch, kv_heads, chunks, queries, head_dim), give to each key, of the shape of `bias`.

    With `counts`, how often each query counts, (batch, kv_heads, chunks, queries), the sum of the weights in place of the largest.
    """
    shape, bias = bias.shape, bias.flatten(0, 2)[:, None]
    queries, keys = queries.flatten(0, 2), keys.flatten(0, 2)
    step, parts = max(1, piece(keys) // (queries.shape[1] * keys.shape[1])), list[torch.Tensor]()
    for part in (slice(start, start + step) for start in range(0, len(keys), step)):
        weights = torch.baddbmm(bias[part], queries[part], keys[part].mT).softmax(-1)
        parts.append(weights.amax(1) if counts is None else counts.flatten(0, 2)[part, None] @ weights)
    return torch.cat(parts).view(shape)


def piece(keys: torch.Tensor) -> int:
    """How many weights of attention are computed at a time: what a CPU's cache holds, and elsewhere what memory can spare."""
    return 1 << 20 if keys.device.type == "cpu" else 1 << 26


def even_chunks(tokens: int, most: int) -> list[slice]:
    """So many tokens in chunks of about one length, `most` at most: in a short one each token would get much of the attention."""
    count = -(-tokens // most)
    return [slice(tokens * number // count, tokens * (number + 1) // count) for number in range(count)]


def most_received(
    queries: torch.Tensor, keys: torch.Tensor, repeated: torch.Tensor, softcap: float | None, real: torch.Tensor | None = None
) -> torch.Tensor:
    """The largest weight that a query of a repetition, scaled, gives to each token of what it repeats, (batch, kv_heads, tokens).

    The `repeated` keys up to a query share its attention. `real` is False for padding, (batch, 1, tokens + queries).
    """
    grouped, tokens, count = queries.unflatten(1, (keys.shape[1], -1)), keys.shape[2], queries.shape[2]
    scores = (grouped @ torch.cat([keys, repeated], 2)[:, :, None].mT).float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores[..., tokens:].masked_fill_(torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1), NOTHING)
    if real is not None:
        scores.masked_fill_(~real[:, :, None, None], NOTHING)
    weights = scores.softmax(-1)[..., :tokens]
    if real is not None:
        weights = weights * real[:, :, None, tokens:, None] * real[:, :, None, None, :tokens]
    return weights.amax((2, 3))


@dataclass(frozen=True)
class KVZipPolicy(Policy, built_in=True):
    """Keeps the tokens that the model attends to when it reproduces the context, once, for many questions.

    KVzip (Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv 2505.23416): the context is fed a second time behind
    itself, and a token scores the largest attention weight that these queries give it. `EquipCache.compress(model)` does that and prunes;
    until then the whole context is kept.

    **Departs from the paper**: no instruction to repeat the context; sinks, recent and later tokens stay, and some of each head's best.

    Args:
        deferred: Tokens that are fed again at a time, and scored by it alone.
    """

    name = "kvzip"
    interval = None
    comparable = True
    head_budgets = "global"
    deferred: int = parameter(512)

    def score(self, tokens: Tokens) -> torch.Tensor:
        if tokens.attention is not None:
            return tokens.attention
        if tokens.scores is None:
            return torch.full(tokens.positions.shape, torch.inf, device=tokens.keys.device)
        return torch.where(tokens.scores.abs() < UNSCORED, tokens.scores, torch.inf)  # later tokens stay

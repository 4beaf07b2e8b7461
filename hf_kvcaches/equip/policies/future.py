"""Future attention: what the context's queries would attend to from behind its end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip.policies.base import Policy, count
from hf_kvcaches.equip.policies.tokens import UNSCORED, Tokens
from hf_kvcaches.errors import whole_number

_NOTHING = -1e30


@dataclass(frozen=True)
class FuturePolicy(Policy, built_in=True):
    """Keeps the tokens that queries of the context attend to once they are rotated to positions behind its end.

    What will be asked is not known yet, but it is asked from behind the context, and by queries of this model. The attention of the
    context's queries, rotated there, finds what can be looked up from afar; a token scores the largest weight that any of them gives it.
    One pass, no calibration, and nothing to learn from a question. KVzip (arXiv 2505.23416) takes the maximum over a second reading,
    Expected Attention (arXiv 2510.00636) a mean over a distribution of queries.

    Args:
        queries: How many of the queries are asked, evenly spaced.
        ahead: How far behind the end.
        chunk: Tokens, in order of position, that share one softmax, so that no token takes the attention of all; None: all tokens.
        interval: Decode steps between two scorings. A token's score does not fall.
    """

    name = "future"
    reads_queries = True
    comparable = True
    head_budgets = "global"
    queries: int = count(256)
    ahead: int = count(32, least=0)
    chunk: int | None = 256
    interval: int = count(64, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk is not None:
            object.__setattr__(self, "chunk", whole_number("chunk", self.chunk, 1, "an integer of at least 1, or None"))

    def score(self, tokens: Tokens) -> torch.Tensor:
        return with_earlier(tokens, future_attention(tokens, *future_queries(tokens, self.queries, self.ahead), chunk=self.chunk))


def future_queries(tokens: Tokens, most: int, ahead: int, spread: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Some of the queries, evenly spaced and rotated to positions behind the end of the tokens.

    Args:
        spread: To how many positions, of which the first is `ahead` behind the end, the queries are rotated in turn.

    Returns:
        The queries, (batch, heads, n, head_dim), and True for real ones, (batch or 1, n). Padding comes first.
    """
    queries, index = tokens.asked, tokens.query_index
    assert index is not None
    length, n = index.shape[-1], min(most, index.shape[-1])
    real = (index >= 0).sum(-1, keepdim=True).clamp(min=n)  # a row's real queries, which are the last ones in order
    picks = length - real + real * torch.arange(n, device=index.device) // n
    picks = index.argsort(dim=-1, stable=True).gather(-1, picks)
    index, queries = index.gather(-1, picks), queries.detach().take_along_dim(picks[:, None, :, None], 2)
    if (geometry := rotation(tokens)) is not None:
        end = tokens.end.flatten(1) if isinstance(tokens.end, torch.Tensor) else tokens.end
        turn = ((index >= 0).cumsum(-1) - 1).clamp(min=0) % spread
        queries = geometry.shift(queries, end + ahead + turn - index)
    return queries, index >= 0


def future_attention(tokens: Tokens, queries: torch.Tensor, real: torch.Tensor, *, chunk: int | None = 256) -> torch.Tensor:
    """The largest weight that any of the queries, and of the query heads of a group, gives to each token, (batch, kv_heads, tokens).

    Args:
        queries: As `future_queries` gives them, with `real`.
        chunk: Tokens, in order of position, that share one softmax; None: all.
    """
    (batch, heads, slots, _), positions = tokens.keys.shape, tokens.positions
    order = torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions).argsort(dim=-1, stable=True)
    size = min(chunk or slots, slots)
    keys = tokens.keys.detach().take_along_dim(order[..., None], 2).float()
    keys = functional.pad(keys, (0, 0, 0, -slots % size)).flatten(0, 1).mT
    empty = functional.pad((positions < 0).gather(-1, order), (0, -slots % size), value=True).float() * _NOTHING
    bias = empty.expand(batch, heads, -1).flatten(0, 1)[:, None]
    # Padding asks what the last query asks, which does not change a maximum.
    queries = torch.where(real[:, None, :, None], queries, queries[:, :, -1:]).float().unflatten(1, (heads, -1))
    queries = (queries * tokens.scaling).transpose(2, 3).flatten(0, 1)  # (batch * kv_heads, n, group, head_dim)
    best = keys.new_zeros(batch * heads, keys.shape[-1])
    for part in queries.split(max(1, piece(keys) // (queries[:, 0, :, 0].numel() * keys.shape[-1])), 1):
        weights = torch.baddbmm(bias, part.flatten(1, 2), keys).unflatten(-1, (-1, size)).softmax(-1)
        best = torch.maximum(best, weights.flatten(2).amax(1))
    best = best[:, :slots].unflatten(0, (batch, heads)) * real.any(-1)[:, None, None]
    return torch.empty_like(best).scatter_(-1, order.expand_as(best), best)


def with_earlier(tokens: Tokens, scores: torch.Tensor) -> torch.Tensor:
    """The maximum of new scores and of those that the policy gave before."""
    if tokens.scores is None:
        return scores
    return torch.maximum(scores, torch.where(tokens.scores < UNSCORED, tokens.scores, -torch.inf))


def piece(keys: torch.Tensor) -> int:
    """How many weights of attention are computed at a time: what a CPU's cache holds, and elsewhere what memory can spare."""
    return 1 << 20 if keys.device.type == "cpu" else 1 << 26


def rotation(tokens: Tokens) -> RotaryGeometry | None:
    """How the model rotates keys, where it does by known angles."""
    geometry = tokens.geometry
    return geometry if geometry is not None and geometry.kind == "rope" and geometry.refusal is None else None

"""What a policy looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import UnsupportedError

_PER_SLOT = ("keys", "values", "positions", "attention", "scores")


@dataclass(frozen=True)
class Tokens:
    """What a policy looks at. Slots come in any order; after a block they are in order of position.

    Args:
        keys: (batch, kv_heads, slots, head_dim), as the model rotated them, for policies with `directions`; else in any rotation.
        values: (batch, kv_heads, slots, value_dim).
        positions: (batch, 1 or kv_heads, slots), integers: the index of a slot's token among the tokens seen; -1: empty slot.
        attention: (batch, kv_heads, slots), float32: the sum of what the observed queries gave to each slot since its token came, as
            the mean over the query heads of a group; None where nothing observes.
        seen: Tokens fed in so far, padding included.
        sinks: How many of a row's first tokens are always kept.
        due: True, or after a step (batch, 1, 1): the rows for which a `WaitingPolicy` takes over the new scores.
        first: The position of each row's first real token, (batch,), or one number for all rows.
        scores: (batch, 1 or kv_heads, slots), what the policy said before about tokens that were kept; NaN for new ones. None in the
            first block and after single steps.
        queries: The last queries, (batch, heads, queries, head_dim), as the model rotated them, the newest at the end; None where the
            policy is shown none.
        scaling: What the model's attention multiplies scores with.
        geometry: How the model rotates keys; None for a policy that is tried on tensors alone.
        budget: How many tokens will stay in each head, or None.
        module: The model's attention while it is asked; None in decoding steps and for keys from another cache.
        inputs: What that is called with for a block, `hidden_states` (batch, new tokens, hidden) among it; None without `reads_inputs`.
        shard: Which of the model's heads these are, under tensor parallelism; None for all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    attention: torch.Tensor | None
    seen: int
    sinks: int
    due: bool | torch.Tensor = True
    first: torch.Tensor | int = 0
    scores: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    scaling: float = 1.0
    geometry: RotaryGeometry | None = None
    budget: int | None = None
    module: nn.Module | None = None
    inputs: Mapping[str, Any] | None = None
    shard: HeadShard | None = None

    def pick(self, slots: torch.Tensor) -> Tokens:
        """The tokens in some slots, (batch, kv_heads, tokens to pick)."""
        picked: dict[str, Any] = {name: at_slots(tensor, slots) for name in _PER_SLOT if (tensor := getattr(self, name)) is not None}
        return replace(self, **picked)

    def in_order(self) -> torch.Tensor:
        """The slots of each head in order of position, empty ones last, (batch, kv_heads, slots)."""
        return order_of(self.positions.expand(self.keys.shape[:3]))

    @property
    def heads(self) -> int:
        """How many KV heads the model's layer has, in all processes together."""
        return self.keys.shape[1] * (1 if self.shard is None else self.shard.size)

    def of_all_heads(self, scores: torch.Tensor) -> torch.Tensor:
        """Something of every head of the model's layer, (batch, kv_heads, ...), of that of these heads."""
        return scores if self.shard is None else self.shard.gather(scores)

    def of_these_heads(self, scores: torch.Tensor) -> torch.Tensor:
        """The inverse of `of_all_heads`."""
        return scores if self.shard is None else scores[:, self.shard.span(scores.shape[1])]

    def unrotated_keys(self) -> torch.Tensor:
        """`keys` as they were before their rotation; as they are where that is not known."""
        rotation = self.rotation
        return self.keys if rotation is None else rotation.unrotate(self.keys, self.row_index().clamp(min=0))

    @property
    def rotation(self) -> RotaryGeometry | None:
        """How the model rotates keys, where it does and keys can be brought back."""
        known = self.geometry is not None and self.geometry.kind == "rope" and self.geometry.refusal is None
        return self.geometry if known else None

    def unrotated_queries(self) -> torch.Tensor:
        """`queries` as they were before their rotation, or an error that says how to get them."""
        if self.queries is None:
            raise UnsupportedError("This policy scores by queries, and these tokens came without. Set `queries` and `sees_block`.")
        rotation = self.rotation
        return self.queries if rotation is None else rotation.unrotate(self.queries, self._query_index().clamp(min=0))

    def counted_queries(self) -> torch.Tensor:
        """True for queries of real tokens that are no sinks, (batch, queries)."""
        return self._query_index() >= self.sinks

    def _query_index(self) -> torch.Tensor:
        """The queries' places in their rows, (batch, queries); below 0 where there is none."""
        assert self.queries is not None
        index = torch.arange(self.seen - self.queries.shape[2], self.seen, device=self.queries.device)[None]
        return (index - torch.as_tensor(self.first, device=index.device).view(-1, 1)).expand(self.queries.shape[0], -1)

    @property
    def observed(self) -> torch.Tensor:
        """`attention`, or an error that says how to get it."""
        if self.attention is None:
            raise UnsupportedError(
                "This policy scores by attention, and these tokens came without: it was not asked to observe any. Set `observes`."
            )
        return self.attention

    @property
    def row_start(self) -> torch.Tensor | int:
        """`first` in the shape of `positions`: (batch, 1, 1), or one number for all rows."""
        return self.first.view(-1, 1, 1) if isinstance(self.first, torch.Tensor) else self.first

    def row_index(self) -> torch.Tensor:
        """Like `positions`, counted from each row's first real token; below 0 for empty slots."""
        return torch.where(self.positions < 0, -1, self.positions - self.row_start)

    def counted(self) -> torch.Tensor:
        """True for tokens that are no sinks, (batch, 1 or kv_heads, slots)."""
        return self.row_index() >= self.sinks


def at_slots(tensor: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What a tensor, (batch, 1 or kv_heads, slots) or with one more dimension, has in some slots, (batch, 1 or kv_heads, tokens)."""
    return tensor.take_along_dim(slots if tensor.ndim == 3 else slots[..., None], 2)


def order_of(positions: torch.Tensor) -> torch.Tensor:
    """The slots in order of position, those with -1 last."""
    return torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions).argsort(stable=True, dim=-1)


def newest_from(positions: torch.Tensor, recent: int) -> torch.Tensor:
    """The position of the oldest of the newest `recent` tokens, (batch, 1 or kv_heads, 1); 0 where there are not so many."""
    if recent == 0:
        return positions.amax(-1, keepdim=True) + 1
    return positions.topk(min(recent, positions.shape[-1]), dim=-1).values[..., -1:].clamp(min=0)


def ages(positions: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Positions, with the greatest number for tokens that are held, so that the least is an empty slot's or the oldest other token's."""
    # Four times faster than torch.where on a CPU; -1 stays -1.
    return positions | held.to(positions.dtype) * torch.iinfo(positions.dtype).max

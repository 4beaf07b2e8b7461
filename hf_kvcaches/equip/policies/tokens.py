"""What a policy looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import UnsupportedError

# Above every score that a policy gives. Between it and infinity stand tokens that were not scored yet, by age.
UNSCORED = 2.0**100
# A score of attention for what takes no part in it: softmax makes 0 of it, and sums with it stay finite.
NOTHING = -1e30


class ModuleCall(NamedTuple):
    """What the model's attention module is called with."""

    module: nn.Module
    mask: Any  # with which it will attend; False where it has another name
    positions: torch.Tensor | None  # the model's, of the new tokens, (batch or 1, tokens)
    inputs: Mapping[str, Any] | None  # all arguments, for policies that read them


def unscored(positions: torch.Tensor) -> torch.Tensor:
    """The scores of tokens that no policy has scored yet: above all others, and the newer the higher."""
    return positions.float() * 2.0**77 + UNSCORED  # float32 counts in steps of 2**77 there


@dataclass(frozen=True)
class Tokens:
    """What a policy looks at: the tokens that a layer keeps, and in a block the new ones, in any order."""

    keys: torch.Tensor  # (batch, kv_heads, tokens, head_dim), each rotated to its `index`
    values: torch.Tensor  # (batch, kv_heads, tokens, value_dim)
    positions: torch.Tensor  # (batch, 1 or kv_heads, tokens): how many real tokens came before it in its row; -1: no token
    count: int | torch.Tensor  # real tokens of each row so far: a number, or (batch, 1, 1)
    sinks: int  # how many of a row's first tokens always stay
    index: torch.Tensor | None = None  # to which position each key is rotated, as `positions`; None: to its own
    # What the observed queries gave to each token, (batch, kv_heads, tokens), float32, as the mean over the query heads of a group; None
    # where the policy observes none.
    attention: torch.Tensor | None = None
    # (batch, heads, queries, head_dim), rotated to `query_index`: those of the block, or the last ones; None where it is shown none.
    queries: torch.Tensor | None = None
    query_index: torch.Tensor = None  # type: ignore[assignment]  # (batch or 1, queries); -1: padding. None without queries
    scaling: float = 1.0  # what the model's attention multiplies scores with
    geometry: RotaryGeometry | None = None  # how the model rotates keys; None for a policy that is tried on tensors alone
    # What the policy said before of kept tokens, (batch, 1 or kv_heads, tokens); -inf where it said nothing. None in the first block.
    scores: torch.Tensor | None = None
    budget: int | None = None  # how many tokens will stay in each head
    module: nn.Module | None = None  # the model's attention while it is asked; None in decode steps and for keys from another cache
    inputs: Mapping[str, Any] | None = None  # what it is called with for a block, `hidden_states` (batch, new tokens, hidden) among it
    shard: HeadShard | None = None  # which of the model's heads these are, under tensor parallelism; None for all

    @property
    def real(self) -> torch.Tensor:
        """True for tokens, (batch, 1 or kv_heads, tokens)."""
        return self.positions >= 0

    @property
    def observed(self) -> torch.Tensor:
        """`attention`, or an error that says how to get it."""
        if self.attention is None:
            raise UnsupportedError(
                "This policy scores by attention, and these tokens came without: it was not asked to observe any. Set `observes`."
            )
        return self.attention

    @property
    def asked(self) -> torch.Tensor:
        """`queries`, or an error that says how to get them."""
        if self.queries is None:
            raise UnsupportedError("This policy scores by queries, and these tokens came without. Set `reads_queries`.")
        return self.queries

    @property
    def heads(self) -> int:
        """How many KV heads the model's layer has, in all processes together."""
        return self.keys.shape[1] * (1 if self.shard is None else self.shard.size)

    def of_all_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this process's heads (dimension 1) with those of all processes."""
        return tensor if self.shard is None else self.shard.gather(tensor)

    def of_these_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor of all heads (dimension 1) those of this process."""
        return tensor if self.shard is None else tensor[:, self.shard.span(tensor.shape[1])]

    @property
    def angles(self) -> RotaryGeometry | None:
        """`geometry`, where keys are rotated and the angles are known."""
        geometry = self.geometry
        return geometry if geometry is not None and geometry.kind == "rope" and geometry.refusal is None else None

    def moved(self, x: torch.Tensor, by: int | torch.Tensor) -> torch.Tensor:
        """Queries or keys, rotated further by a number of positions, where their angles are known."""
        return x if (geometry := self.angles) is None else geometry.shift(x, by)

    def unrotated(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Queries or keys that are rotated to some positions before their rotation, where its angles are known."""
        return x if (geometry := self.angles) is None else geometry.unrotate(x, index.clamp(min=0))

    def unrotated_keys(self) -> torch.Tensor:
        return self.unrotated(self.keys, self.rotated_to)

    @property
    def rotated_to(self) -> torch.Tensor:
        """`index`, or `positions` where it is None."""
        return self.positions if self.index is None else self.index

    @property
    def end(self) -> int | torch.Tensor:
        """The position behind the newest token, in the numbers of `index`: a number, or (batch, 1, 1)."""
        return self.count if self.index is None else self.index.amax((1, 2), keepdim=True) + 1

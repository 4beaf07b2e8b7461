"""Where slots lie when heads have different numbers of them: one behind the other, without gaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_kvcaches.equip.store import FlatStore, Slots, room_for
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels import slots as kernels

Attended = tuple[torch.Tensor, torch.Tensor | None]


class RaggedStore(FlatStore):
    """`keys` and `values` are (slots of all rows and heads, head_dim): those of row 0 and head 0, then of row 0 and head 1, and so on.

    On a CPU attention looks at one head of a row after the other. Elsewhere, and wherever keys of a whole layer are asked for, the heads
    are copied into one padded tensor for as long as a layer takes.

    Attributes:
        rooms: How many slots there are, (batch, kv_heads, 1).
    """

    in_graphs = False
    exported = ("keys", "values", "rooms")
    rooms: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        return 0 if self.rooms is None else int(self.rooms.max())

    @property
    def shape(self) -> tuple[int, int]:
        return (0, 0) if self.rooms is None else (self.rooms.shape[0], self.rooms.shape[1])

    def own(self, owned: Callable[[torch.Tensor], torch.Tensor], needs_graph: bool) -> None:
        if needs_graph:
            raise UnsupportedError("head_budgets: there are no gradients. Run the model under torch.no_grad(), or leave head_budgets out.")
        super().own(owned, needs_graph)

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.rooms is None:
            return
        rows = function(torch.arange(self.rooms.shape[0])).tolist()
        sizes = self.rooms.sum((1, 2)).tolist()
        self.keys, self.values = (torch.cat([content.split(sizes)[row] for row in rows]) for content in self._contents())
        self.rooms = function(self.rooms)

    def install(self, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, most: Any, source: torch.Tensor | None = None) -> None:
        """Makes these the first slots, and all others empty.

        Args:
            most: How many slots there may ever be: a number, or (batch, kv_heads, 1) where heads differ, which are then all made.
        """
        if not isinstance(most, torch.Tensor):
            most = keys.new_full((*keys.shape[:2], 1), room_for(keys.shape[2], most), dtype=torch.long)
        self.rooms = most
        total = int(most.sum())
        held = torch.arange(keys.shape[2], device=keys.device) < most
        index = self._index(torch.arange(keys.shape[2], device=keys.device)[None, None])[held]
        self.keys, self.values = (new.new_zeros(total, new.shape[-1]).index_copy_(0, index, new[held]) for new in (keys, values))

    def reserve(self, slots: int, most: int) -> None:
        if slots > self.capacity:  # Heads that differ have all their slots, of which the longest are no fewer than this.
            keys, values = (torch.nn.functional.pad(held, (0, 0, 0, slots - held.shape[2])) for held in self.read(self.capacity))
            self.install(keys, values, keys.new_zeros(0), most)

    def read(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (self._padded(list(self._heads(content)), used) for content in self._contents())
        return keys, values

    def at(self, slots: Slots) -> tuple[torch.Tensor, ...]:
        index = self._index(slots)
        return tuple(content[index] for content in self._contents())

    def write(self, slots: Slots, *states: torch.Tensor) -> None:
        index = self._index(slots).flatten()
        for content, new in zip(self._contents(), states, strict=True):
            content.index_copy_(0, index, new.flatten(0, 2))

    def rotate_down(self, which: torch.Tensor) -> None:
        index = self._index(torch.arange(which.shape[-1], device=which.device)[None, None])[which.expand(*self.shape, -1)]
        self.rotate_tokens_down(self._contents()[0], index)

    def attend(
        self,
        query: torch.Tensor,
        used: int,
        scaling: float,
        *,
        ranks: torch.Tensor | None,
        valid: torch.Tensor | None = None,
        leading: int | None = None,
        leading_query: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
        **options: Any,
    ) -> Attended:
        if query.is_cuda:
            options |= {"valid": valid, "leading": leading, "leading_query": leading_query, "sink_logits": sink_logits}
            return super().attend(query, used, scaling, ranks=ranks, **options)
        rows, heads = self.shape
        queries = query.reshape(rows * heads, -1, 1, query.shape[-1])
        leading_queries = None if leading_query is None else leading_query.reshape(queries.shape)
        sinks = None if sink_logits is None else sink_logits.view(heads, -1).repeat(rows, 1)
        ranks, valid = (None if slots is None else slots.expand(rows, heads, -1).reshape(rows * heads, 1, -1) for slots in (ranks, valid))
        outputs, weights = [], []
        for index, (keys, values) in enumerate(zip(*map(self._heads, self._contents()), strict=True)):
            count, one = min(used, len(keys)), slice(index, index + 1)
            output, received = kernels.slot_attention(
                queries[one],
                keys[None, None, :count],
                values[None, None, :count],
                scaling,
                valid=None if valid is None else valid[one, :, :count],
                leading=None if leading is None else min(leading, count),
                leading_query=None if leading_queries is None else leading_queries[one],
                rotation=None if ranks is None else self.tables(ranks[one, :, :count]),
                sink_logits=None if sinks is None else sinks[index],
                backend=self.backend,
                check=False,
                **options,
            )
            outputs.append(output)
            weights += [] if received is None else [received.view(-1, 1)]
        output = torch.cat(outputs, 2).view(rows, 1, query.shape[1], -1)
        return output, self._padded(weights, used)[..., 0] if weights else None

    def _contents(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _index(self, slots: Slots) -> torch.Tensor:
        """Where slots lie in the buffers, (batch, kv_heads, tokens)."""
        assert self.rooms is not None
        ends = self.rooms.flatten().cumsum(0).view(self.rooms.shape)
        return ends - self.rooms + slots

    def _heads(self, content: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A view of each head of each row, (slots, width)."""
        assert self.rooms is not None
        return content.split(self.rooms.flatten().tolist())

    def _padded(self, heads: list[torch.Tensor], used: int) -> torch.Tensor:
        """The first slots of all heads, a copy with zeros for slots that a head doesn't have, (batch, kv_heads, slots in use, width)."""
        padded = torch.nn.utils.rnn.pad_sequence([head[:used] for head in heads], batch_first=True)
        padded = torch.nn.functional.pad(padded, (0, 0, 0, used - padded.shape[1]))
        return padded.unflatten(0, self.shape)

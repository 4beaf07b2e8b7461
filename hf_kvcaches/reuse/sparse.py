"""Passes over tokens that are not consecutive: the tokens between them are in the cache.

The queries of tokens that are near each other form a block. A block sees all slots before it, without a mask, and those from its first
token on, causally: two calls of attention whose results are merged by their sums of exponentials. So there is no mask over all slots, and
no key is copied for each query head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.call import Call
from hf_kvcaches.core.prompt import PrefillCall
from hf_kvcaches.core.refusal import Refusal
from hf_kvcaches.core.source import TensorView
from hf_kvcaches.core.view import previous_implementation, why_not_answering
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.attention import AttentionPart, exact_part, exponentials, merged
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.plan import PROBING, Indices

# Queries whose scores are held at a time where no fused attention computes them: of tokens with gaps between them, or behind a window.
_BLOCK = 256
# Tokens with more slots between them are in different blocks.
_GAP = 64


def spans_refused(model: PreTrainedModel) -> Refusal | None:
    """Why a model can't run spans of a prompt between others, as the end of a sentence; None if it can."""
    if reason := why_not_answering(model):
        return reason
    config = compat.decoder_config(model.config)
    implementation = previous_implementation(config)
    # Pages, and functions from elsewhere, may compute anything.
    module = getattr(compat.attention_function(implementation, model), "__module__", "") if implementation != "eager" else ""
    if implementation != "eager" and ("|" in implementation or not module.startswith("transformers.integrations.")):
        return Refusal(f"attention {implementation!r} is not transformers' own, and tokens between reused ones would not pass through it")
    if not compat.is_family(config, "spans"):
        name = type(model).__name__
        return Refusal(f"{name} is of a family ({config.model_type}) not known to compute each token from its own mask and position")
    return None


class Block(NamedTuple):
    """Queries of a row, from `first` to before `last` of those that a pass runs, in the slots from `start` to before `stop`."""

    first: int
    last: int
    start: int
    stop: int

    @property
    def consecutive(self) -> bool:
        """Whether there is a query for each slot."""
        return self.stop - self.start == self.last - self.first


@dataclass(frozen=True, eq=False)
class SparsePass:
    """Which tokens a pass runs, and which slots they see.

    A token's slot is its column in the padded prompt and in the layers' buffers. Rows with fewer tokens to run than others begin with
    fillers, tokens that are written to the slot behind the prompt, which no query sees.

    Args:
        ids: (batch, tokens), as `positions`, on the device of the model's input; any for fillers.
        host_slots: (batch, tokens), ascending in each row but for fillers, which have `total`.
        padding: How many slots at the start of each row hold no token.
        windows: How many tokens a query sees in each layer, its own included; None: all.
        total: How many tokens the cache has seen behind the pass.
        shares: Of each layer in the upper half, once it has run, the largest share of the weights of the last `PROBING` queries that a slot
            has in any head, (batch, slots). None: nothing is measured.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    host_slots: np.ndarray[Any, np.dtype[np.int64]]
    padding: Sequence[int]
    windows: Sequence[int | None]
    total: int
    shares: list[torch.Tensor] | None = None
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, call: PrefillCall, indices: Sequence[Indices], padding: Sequence[int], total: int, shares: list[torch.Tensor] | None = None
    ) -> SparsePass:
        """Return the pass over some indices of each row of a prompt."""
        tokens, device = call.input_ids.shape[1], call.input_ids.device
        slots = np.full((len(indices), max(map(len, indices))), total)
        for row_slots, row_indices, pad in zip(slots, indices, padding, strict=True):
            row_slots[len(row_slots) - len(row_indices) :] = row_indices + pad
        columns = np.minimum(slots - (total - tokens), tokens - 1)
        positions = np.where(slots < total, slots - np.asarray(padding)[:, None], 0)
        ids = call.input_ids.gather(1, torch.from_numpy(columns).to(device))
        plan = compat.layer_plan(compat.decoder_config(call.model.config))
        windows = [layer.sliding_window if kind == "sliding_attention" else None for kind, layer in plan]
        return cls(ids, torch.from_numpy(positions).to(device), slots, padding, windows, total, shares)

    @cached_property
    def slots(self) -> torch.Tensor:
        """(batch, tokens), on the device."""
        return torch.from_numpy(self.host_slots).to(self.ids.device)

    @cached_property
    def blocks(self) -> list[list[Block]]:
        """The blocks of each row, which leave out fillers."""
        return [list(_blocks(slots, int((slots == self.total).sum()))) for slots in self.host_slots]

    def visible(self, row: int, block: Block, low: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Return which slots from `low` on each query of a block sees, (queries, slots); among its own, made once for all layers."""
        key = row, block, low, window, device
        if key in self._masks:
            return self._masks[key]
        queries = self.slots[row, block.first : block.last, None].to(device)
        slots = torch.arange(low, block.stop, device=device)
        mask = slots <= queries if window is None else (slots <= queries) & (slots > queries - window)
        if low >= block.start:  # those of all slots before, of all blocks, would be of the square of the prompt's length
            self._masks[key] = mask
        return mask

    def bias(self, row: int, block: Block, dtype: torch.dtype) -> torch.Tensor:
        """Return what is added to the scores of a block with its own slots, (queries, slots), on the CPU; made once for all layers."""
        key = row, block, dtype
        if key not in self._masks:
            visible = self.visible(row, block, block.start, None, torch.device("cpu"))
            self._masks[key] = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
        return self._masks[key]

    def write(self, layer: SplicedLayer, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> SparseView:
        """Write the tokens into their slots of a layer, and return the view that answers their queries."""
        states, shares = layer.write(key_states, value_states, self.slots, self.total), None
        if self.shares is not None and 2 * layer_idx >= len(self.windows):
            shares = torch.zeros(len(key_states), self.total, device=key_states.device)
            self.shares.append(shares)
        return SparseView(self, self.windows[layer_idx], states, shares)


def _blocks(slots: Indices, fillers: int) -> Iterator[Block]:
    """Yield the blocks of a row: consecutive tokens of any number, or `_BLOCK` tokens with small gaps between them."""
    if fillers == len(slots):
        return
    edges = [fillers, *(fillers + 1 + np.flatnonzero(np.diff(slots[fillers:]) > _GAP)).tolist(), len(slots)]
    for begin, end in pairwise(edges):
        whole = _block(slots, begin, end)
        step = end - begin if whole.consecutive else _BLOCK
        yield from (_block(slots, first, min(first + step, end)) for first in range(begin, end, step))


def _block(slots: Indices, first: int, last: int) -> Block:
    return Block(first, last, int(slots[first]), int(slots[last - 1]) + 1)


class SparseView(TensorView):
    """Keys and values of all slots, (batch, kv_heads, total, head_dim), for the queries of a sparse pass.

    Args:
        shares: Where the largest shares of the last queries' weights go, (batch, slots), zeros before; None: they are not measured.
    """

    def __init__(self, sparse: SparsePass, window: int | None, states: Sequence[torch.Tensor], shares: torch.Tensor | None) -> None:
        super().__init__(*states)
        self.sparse, self.window, self.shares = sparse, window, shares

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        call = Call(module, mask, kwargs)
        call.check("Reuse between computed tokens", sinks=True)
        if call.bias is not None:
            raise UnsupportedError("Reuse between computed tokens does not support attention with a bias of positions. Use mode='exact'.")
        batch, heads, tokens, _ = query.shape
        output = query.new_zeros(batch, tokens, heads, self.values.shape[-1])  # fillers stay zeros
        for row, blocks in enumerate(self.sparse.blocks):
            for block in blocks:
                own = slice(block.first, block.last)
                output[row, own] = self._attended(query[row : row + 1, :, own], row, block, call)[0]
            if self.shares is not None:
                self._measure(query[row : row + 1], row, call)
        return output, None

    def _attended(self, query: torch.Tensor, row: int, block: Block, call: Call) -> torch.Tensor:
        """Return the attention of a block, (1, queries, heads, value_dim), for its queries, (1, heads, queries, head_dim)."""
        keys, values, lowest = self.keys[row : row + 1], self.values[row : row + 1], self.sparse.padding[row]
        plain = call.softcap is None and call.sink_logits is None and keys.shape[-1] == values.shape[-1]
        fused = plain and (query.device.type == "cpu" or (query.is_cuda and keys.shape[-1] % 8 == 0))
        if not fused or (self.window is not None and block.stop - lowest > self.window):
            outputs = []
            for first in range(block.first, block.last, _BLOCK):
                some = _block(self.sparse.host_slots[row], first, min(first + _BLOCK, block.last))
                part = self._masked(query[:, :, first - block.first : some.last - block.first], row, some, lowest, call)
                outputs.append(merged([part] if call.sink_logits is None else [part, _sinks(part, call.sink_logits)]))
            return torch.cat(outputs, 1)
        own, before = slice(block.start, block.stop), slice(lowest, block.start)
        if block.consecutive or query.device.type == "cpu":
            bias = None if block.consecutive else self.sparse.bias(row, block, query.dtype)
            part = _fused(query, keys[:, :, own], values[:, :, own], call.scaling, block.consecutive, bias)
        else:
            part = self._masked(query, row, block, block.start, call)
        if block.start == lowest:
            return merged([part])
        return merged([_fused(query, keys[:, :, before], values[:, :, before], call.scaling), part])

    def _masked(self, query: torch.Tensor, row: int, block: Block, lowest: int, call: Call) -> AttentionPart:
        """Attention of a block over the slots from `lowest` on."""
        seen, visible = self._seen(row, block, lowest)
        keys, values = self.keys[row : row + 1, :, seen], self.values[row : row + 1, :, seen]
        return exact_part(query, keys, values, call.scaling, visible, call.softcap)

    def _seen(self, row: int, block: Block, lowest: int) -> tuple[slice, torch.Tensor]:
        """The slots from `lowest` on that a block sees, and which of them each query does, (1, queries, slots)."""
        low = lowest if self.window is None else max(lowest, block.start - self.window + 1)
        return slice(low, block.stop), self.sparse.visible(row, block, low, self.window, self.keys.device)[None]

    def _measure(self, query: torch.Tensor, row: int, call: Call) -> None:
        """Add the weights of the last queries of a row, (1, heads, queries, head_dim), to the shares of the slots."""
        assert self.shares is not None
        for block in self.sparse.blocks[row]:
            first = max(block.first, query.shape[2] - PROBING)
            if first >= block.last:
                continue
            last = _block(self.sparse.host_slots[row], first, block.last)
            seen, visible = self._seen(row, last, self.sparse.padding[row])
            states, keys = query[:, :, first : block.last].float(), self.keys[row : row + 1, :, seen].float()
            scores = (states.reshape(1, keys.shape[1], -1, states.shape[-1]) * call.scaling) @ keys.mT
            weights, highest = exponentials(scores.view(1, -1, last.last - first, scores.shape[-1]), visible, call.softcap)
            total = weights.sum(-1, keepdim=True)
            if call.sink_logits is not None:
                total += (call.sink_logits.to(total.dtype).view(1, -1, 1, 1) - highest).exp()
            slots = self.shares[row, seen]
            torch.maximum(slots, (weights / total).amax((0, 1, 2)).to(slots.dtype), out=slots)


def _sinks(part: AttentionPart, logits: torch.Tensor) -> AttentionPart:
    """Return learned sinks beside a part: they take a share of the weights and give nothing."""
    highest = logits.to(part.total.dtype).reshape(1, -1, 1, 1).expand_as(part.total)
    return AttentionPart(torch.zeros_like(part.sums), torch.ones_like(part.total), highest.clone())


def _fused(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    causal: bool = False,
    bias: torch.Tensor | None = None,
) -> AttentionPart:
    """Attention by PyTorch's fused kernels, with the logarithm of its sum of exponentials.

    Args:
        query: (1, heads, queries, head_dim).
        keys: (1, kv_heads, tokens, head_dim); as many tokens as queries, if causal.
        bias: What is added to the scores, (queries, tokens); on a CPU only.
    """
    (_, heads, tokens, _), kv_heads = query.shape, keys.shape[1]
    if query.device.type == "cpu":
        output, total = compat.fused_attention("flash_attention_for_cpu")(
            query, keys, values, 0.0, causal, attn_mask=None if bias is None else bias[None, None], scale=scaling
        )
    else:
        if causal and heads > kv_heads:  # of the run's own tokens alone
            keys, values = (states.repeat_interleave(heads // kv_heads, 1) for states in (keys, values))
        elif heads > kv_heads:  # the queries of a group are more queries of its key head
            query = query.reshape(1, kv_heads, -1, query.shape[-1])
        if query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256:
            attend = compat.fused_attention("flash_attention")
            output, total = attend(query, keys, values, 0.0, causal, scale=scaling)[:2]
        else:
            attend = compat.fused_attention("efficient_attention")
            output, total = attend(query, keys, values, None, True, 0.0, causal, scale=scaling)[:2]
            total = total[:, :, : query.shape[2]]
        output, total = output.reshape(1, heads, tokens, -1), total.reshape(1, heads, tokens)
    dtype = torch.promote_types(query.dtype, torch.float32)
    highest = total.to(dtype)[..., None]
    return AttentionPart(output.to(dtype), torch.ones_like(highest), highest)

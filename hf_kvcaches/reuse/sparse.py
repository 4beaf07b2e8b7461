"""Passes over tokens that are not consecutive: the tokens between them are in the cache.

The queries of tokens that are near each other form a block. A block sees all slots before it, without a mask, and those from its first
token on, causally: two calls of attention, merged by their sums of exponentials. There is no mask over all slots, and no expanded key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.call import Call
from hf_kvcaches.core.source import PrefillCall, TensorView
from hf_kvcaches.core.view import previous_implementation, why_not_answering
from hf_kvcaches.errors import Refusal, UnsupportedError
from hf_kvcaches.kernels.attention import AttentionPart, attention, exact_part, merged
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.plan import PROBING, Indices

_BLOCK = 256  # queries whose scores are held at a time where no fused attention computes them
_SCORES, _FEW = 2**26, 32  # scores at which they are fewer, with copies of a gigabyte; never fewer than so many
_GAP = 64  # tokens with more slots between them are in different blocks


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


class SparsePass:
    """Which tokens of a prompt a pass runs, and which slots they see.

    A token's slot is its column in the padded prompt and in the layers' buffers. Rows with fewer tokens to run than others begin with
    fillers, tokens that are written to the slot behind the prompt, `total`, which no query sees. If `shares` is a list, it gets the largest
    shares of the weights of the last `PROBING` queries that each slot has in any head, (batch, slots), of each layer in the upper half.
    """

    def __init__(
        self, call: PrefillCall, indices: Sequence[Indices], padding: Sequence[int], total: int, shares: list[torch.Tensor] | None = None
    ) -> None:
        tokens, device = call.input_ids.shape[1], call.input_ids.device
        slots = np.full((len(indices), max(map(len, indices))), total)
        for row_slots, row_indices, pad in zip(slots, indices, padding, strict=True):
            row_slots[len(row_slots) - len(row_indices) :] = row_indices + pad
        columns = np.minimum(slots - (total - tokens), tokens - 1)
        positions = np.where(slots < total, slots - np.asarray(padding)[:, None], 0)
        # All (batch, tokens), on the device of the model's input but for `host_slots`.
        self.ids = call.input_ids.gather(1, torch.from_numpy(columns).to(device))
        self.positions, self.slots = torch.from_numpy(positions).to(device), torch.from_numpy(slots).to(device)
        self.host_slots, self.padding, self.total, self.shares = slots, padding, total, shares
        # Those of each row leave out fillers.
        self.blocks = [list(_blocks(row, int((row == total).sum()))) for row in slots]
        plan = compat.layer_plan(compat.decoder_config(call.model.config))
        self._windows = [layer.sliding_window if kind == "sliding_attention" else None for kind, layer in plan]

    def visible(
        self, row: int, block: Block, low: int, window: int | None, device: torch.device, bias: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return which slots from `low` on each query of a block sees, (queries, slots), or what is added to their scores, as a bias."""
        queries = self.slots[row, block.first : block.last, None].to(device)
        slots = torch.arange(low, block.stop, device=device)
        mask = slots <= queries if window is None else (slots <= queries) & (slots > queries - window)
        return mask if bias is None else torch.zeros(mask.shape, dtype=bias, device=device).masked_fill_(~mask, -torch.inf)

    def write(self, layer: SplicedLayer, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> SparseView:
        """Write the tokens into their slots of a layer, and return the view that answers their queries."""
        states, shares = layer.write(key_states, value_states, self.slots, self.total), None
        if self.shares is not None and 2 * layer_idx >= len(self._windows):
            shares = torch.zeros(len(key_states), self.total, device=key_states.device)
            self.shares.append(shares)
        return SparseView(self, self._windows[layer_idx], states, shares)


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
    """Keys and values of all slots, (batch, kv_heads, total, head_dim), for the queries of a sparse pass."""

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
                output[row, block.first : block.last] = self._attended(query, row, block, call)[0]
                if self.shares is not None and block.last > tokens - PROBING:
                    last = _block(self.sparse.host_slots[row], max(block.first, tokens - PROBING), block.last)
                    seen, weights = self._masked(query, row, last, call, values=False)
                    slots = self.shares[row, seen]
                    torch.maximum(slots, weights.amax((0, 1, 2, 3)).to(slots.dtype), out=slots)
        return output, None

    def _attended(self, query: torch.Tensor, row: int, block: Block, call: Call) -> torch.Tensor:
        """Return the attention of a block, (1, queries, heads, value_dim), for the queries of the pass."""
        lowest = self.sparse.padding[row]
        plain = call.softcap is None and call.sink_logits is None and self.keys.shape[-1] == self.values.shape[-1]
        fused = plain and (query.device.type == "cpu" or (query.is_cuda and self.keys.shape[-1] % 8 == 0))
        if not fused or (self.window is not None and block.stop - lowest > self.window):
            seen = min(block.stop - lowest, (self.window or block.stop) + _BLOCK)
            step = min(_BLOCK, max(_FEW, _SCORES // (query.shape[1] * seen)))
            edges = [*range(block.first, block.last, step), block.last]
            parts = [_block(self.sparse.host_slots[row], first, last) for first, last in pairwise(edges)]
            return torch.cat([self._masked(query, row, part, call)[1] for part in parts], 1)
        own, keys, values = query[row : row + 1, :, block.first : block.last], self.keys[row : row + 1], self.values[row : row + 1]
        slots, before = slice(block.start, block.stop), slice(lowest, block.start)
        if block.consecutive:
            part = _fused(own, keys[:, :, slots], values[:, :, slots], call.scaling, causal=True)
        elif query.is_cuda:
            visible = self.sparse.visible(row, block, block.start, None, query.device)[None]
            part = exact_part(own, keys[:, :, slots], values[:, :, slots], call.scaling, visible)
        else:
            bias = self.sparse.visible(row, block, block.start, None, query.device, query.dtype)
            part = _fused(own, keys[:, :, slots], values[:, :, slots], call.scaling, bias=bias[None, None])
        return merged([part] if block.start == lowest else [_fused(own, keys[:, :, before], values[:, :, before], call.scaling), part])

    def _masked(self, query: torch.Tensor, row: int, block: Block, call: Call, values: bool = True) -> tuple[slice, torch.Tensor]:
        """Return the slots that a block sees, and its attention over them; without values, its weights."""
        lowest = self.sparse.padding[row]
        seen = slice(lowest if self.window is None else max(lowest, block.start - self.window + 1), block.stop)
        visible = self.sparse.visible(row, block, seen.start, self.window, self.keys.device)[None, None]
        exact = torch.promote_types(query.dtype, torch.float32)
        own, keys = query[row : row + 1, :, block.first : block.last].to(exact), self.keys[row : row + 1, :, seen].to(exact)
        states = self.values[row : row + 1, :, seen].to(exact) if values else None
        output, weights = attention(own, keys, states, call.scaling, visible, softcap=call.softcap, sink_logits=call.sink_logits)
        return seen, weights if output is None else output


def _fused(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    causal: bool = False,
    bias: torch.Tensor | None = None,
) -> AttentionPart:
    """Attention of (1, heads, queries, head_dim), and its log-sum-exp, by PyTorch's fused kernels.

    `causal` needs as many keys as queries, and `bias` a CPU.
    """
    (_, heads, tokens, _), kv_heads = query.shape, keys.shape[1]
    if query.device.type == "cpu":
        output, total = compat.fused_attention("flash_attention_for_cpu")(query, keys, values, 0.0, causal, attn_mask=bias, scale=scaling)
    else:
        if causal and heads > kv_heads:  # of the run's own tokens alone
            keys, values = (states.repeat_interleave(heads // kv_heads, 1) for states in (keys, values))
        elif heads > kv_heads:  # the queries of a group are more queries of its key head
            query = query.reshape(1, kv_heads, -1, query.shape[-1])
        if query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256:
            output, total = compat.fused_attention("flash_attention")(query, keys, values, 0.0, causal, scale=scaling)[:2]
        else:
            attend = compat.fused_attention("efficient_attention")
            output, total = attend(query, keys, values, None, True, 0.0, causal, scale=scaling)[:2]
            total = total[:, :, : query.shape[2]]
        output, total = output.reshape(1, heads, tokens, -1), total.reshape(1, heads, tokens)
    dtype = torch.promote_types(query.dtype, torch.float32)
    highest = total.to(dtype)[..., None]
    return AttentionPart(output.to(dtype), torch.ones_like(highest), highest)

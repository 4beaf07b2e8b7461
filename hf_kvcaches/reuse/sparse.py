"""Passes over tokens that are not consecutive: the tokens between them are in the cache.

The queries of consecutive tokens form a run. A run sees all slots before it, without a mask, and itself, causally: two calls of a fused
attention whose results are merged by their sums of exponentials. So there is no mask over all slots, and no key is copied for each query
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
from hf_kvcaches.kernels.parts import AttentionPart, exact_part, merged
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.plan import Indices

# Queries whose scores are held at a time where no fused attention computes them, and queries that share a mask behind a window.
_BLOCK = 256


def spans_refused(model: PreTrainedModel) -> Refusal | None:
    """Why a model can't run spans of a prompt between others, as the end of a sentence; None if it can."""
    if reason := why_not_answering(model):
        return reason
    config = compat.decoder_config(model.config)
    if not _is_plain(implementation := previous_implementation(config), model):
        return Refusal(f"attention {implementation!r} is not transformers' own, and tokens between reused ones would not pass through it")
    if not compat.is_family(config, "spans"):
        name = type(model).__name__
        return Refusal(f"{name} is of a family ({config.model_type}) not known to compute each token from its own mask and position")
    return None


def _is_plain(attention: str, model: PreTrainedModel) -> bool:
    """Whether transformers' own code computes the attention of that name, without pages; that of anybody else may compute anything."""
    if attention == "eager":
        return True
    module = getattr(compat.attention_function(attention, model), "__module__", "")
    return "|" not in attention and module.startswith("transformers.integrations.")


class Stretch(NamedTuple):
    """Consecutive tokens of a row that a pass runs: the queries from `first` to before `last`, of the slots from `slot` on."""

    first: int
    last: int
    slot: int


@dataclass(frozen=True, eq=False)
class SparsePass:
    """Which tokens a pass runs, and which slots they see.

    A token's slot is its column in the padded prompt and in the layers' buffers. Rows with fewer tokens to run than others begin with
    fillers, tokens that are written to the slot behind the prompt, which no query sees.

    Args:
        host_slots: (batch, tokens), ascending in each row but for fillers, which have `total`.
        padding: How many slots at the start of each row hold no token.
        device: Of the model's input.
    """

    host_slots: np.ndarray[Any, np.dtype[np.int64]]
    padding: Sequence[int]
    total: int
    device: torch.device

    @classmethod
    def of(cls, indices: Sequence[Indices], padding: Sequence[int], total: int, device: torch.device) -> SparsePass:
        """Return the pass over some indices of each row."""
        slots = np.full((len(indices), max(map(len, indices))), total)
        for row_slots, row_indices, pad in zip(slots, indices, padding, strict=True):
            row_slots[len(row_slots) - len(row_indices) :] = row_indices + pad
        return cls(slots, padding, total, device)

    @cached_property
    def slots(self) -> torch.Tensor:
        """(batch, tokens), on the device."""
        return torch.from_numpy(self.host_slots).to(self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """(batch, tokens); 0 for fillers."""
        pads = np.asarray(self.padding)[:, None]
        return torch.from_numpy(np.where(self.host_slots < self.total, self.host_slots - pads, 0)).to(self.device)

    @cached_property
    def runs(self) -> list[list[Stretch]]:
        """The runs of each row."""
        found = []
        for slots in self.host_slots:
            edges = np.flatnonzero(np.diff(slots, prepend=-2, append=-2) != 1)
            pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
            found.append([Stretch(first, last, int(slots[first])) for first, last in pairs if slots[first] < self.total])
        return found

    def ids(self, call: PrefillCall) -> torch.Tensor:
        """Return the token ids of a prompt that the pass runs; fillers get any."""
        columns = np.minimum(self.host_slots - (self.total - call.input_ids.shape[1]), call.input_ids.shape[1] - 1)
        return call.input_ids.gather(1, torch.from_numpy(columns).to(self.device))


@dataclass(frozen=True, eq=False)
class RunningPass:
    """A sparse pass with the types of a model's layers."""

    sparse: SparsePass
    kinds: Sequence[tuple[str, int | None]]

    @property
    def total(self) -> int:
        """How many tokens the cache has seen behind the pass."""
        return self.sparse.total

    @classmethod
    def of(cls, sparse: SparsePass, model: PreTrainedModel) -> RunningPass:
        """Return the pass for a model."""
        plan = compat.layer_plan(compat.decoder_config(model.config))
        return cls(sparse, [(kind, getattr(layer, "sliding_window", None)) for kind, layer in plan])

    def write(self, layer: SplicedLayer, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> SparseView:
        """Write the pass's tokens into their slots of a layer, and return the view that answers their queries."""
        keys, values = layer.write(key_states, value_states, self.sparse.slots, self.total)
        return SparseView(self.sparse, *self.kinds[layer_idx], keys, values)


class SparseView(TensorView):
    """Keys and values of all slots, for the queries of a sparse pass.

    Args:
        kind: The type of the layer, one of transformers' names.
        window: How many tokens a query sees, its own included, or the size of a chunk; None: all.
        keys: (batch, kv_heads, total, head_dim).
    """

    def __init__(self, sparse: SparsePass, kind: str, window: int | None, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__(keys, values)
        self.sparse, self.kind, self.window = sparse, kind, window

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        call = Call(module, mask, kwargs)
        call.check("Reuse between computed tokens", sinks=True)
        if call.bias is not None:
            raise UnsupportedError("Reuse between computed tokens does not support attention with a bias of positions. Use mode='exact'.")
        batch, heads, tokens, _ = query.shape
        output = query.new_zeros(batch, tokens, heads, self.values.shape[-1])  # fillers stay zeros
        for row, runs in enumerate(self.sparse.runs):
            keys, values = self.keys[row : row + 1], self.values[row : row + 1]
            for part, lowest in (pair for run in runs for pair in self._visible(run, self.sparse.padding[row])):
                states = query[row : row + 1, :, part.first : part.last]
                output[row, part.first : part.last] = self._attended(states, keys, values, part, lowest, call)[0]
        return output, None

    def _visible(self, run: Stretch, padding: int) -> list[tuple[Stretch, int]]:
        """Return the run with the lowest slot that its queries see, cut where that is another one."""
        if self.kind != "chunked_attention" or self.window is None:
            return [(run, padding)]
        parts, slot, stop = [], run.slot, run.slot + run.last - run.first
        while slot < stop:
            chunk = padding + (slot - padding) // self.window * self.window
            end = min(stop, chunk + self.window)
            parts.append((Stretch(run.first + slot - run.slot, run.first + end - run.slot, slot), chunk))
            slot = end
        return parts

    def _attended(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, run: Stretch, lowest: int, call: Call
    ) -> torch.Tensor:
        """Return the attention of a run of one row, (1, queries, heads, value_dim)."""
        tokens, stop = query.shape[2], run.slot + query.shape[2]
        slides = self.kind == "sliding_attention" and self.window is not None and stop - lowest > self.window
        plain = call.softcap is None and call.sink_logits is None and keys.shape[-1] == values.shape[-1]
        fused = plain and (query.device.type == "cpu" or (query.is_cuda and keys.shape[-1] % 8 == 0))
        if fused and not slides:
            own = _fused(query, keys[:, :, run.slot : stop], values[:, :, run.slot : stop], call.scaling, causal=True)
            if run.slot == lowest:
                return merged([own])
            before = slice(lowest, run.slot)
            return merged([_fused(query, keys[:, :, before], values[:, :, before], call.scaling, causal=False), own])
        outputs = []
        for first in range(0, tokens, _BLOCK):
            last = min(first + _BLOCK, tokens)
            low = lowest if not slides or self.window is None else max(lowest, run.slot + first - self.window + 1)
            slots = torch.arange(low, run.slot + last, device=query.device)
            own_slots = torch.arange(run.slot + first, run.slot + last, device=query.device)[:, None]
            visible = slots <= own_slots
            if slides and self.window is not None:
                visible &= slots > own_slots - self.window
            seen = slice(low, run.slot + last)
            part = exact_part(query[:, :, first:last], keys[:, :, seen], values[:, :, seen], call.scaling, visible[None], call.softcap)
            outputs.append(merged([part, *_sinks(part, call.sink_logits)]))
        return torch.cat(outputs, 1)


def _sinks(part: AttentionPart, logits: torch.Tensor | None) -> list[AttentionPart]:
    """Return learned sinks as a part: they take a share of the weights and give nothing."""
    if logits is None:
        return []
    highest = logits.to(part.total.dtype).reshape(1, -1, 1, 1).expand_as(part.total)
    return [AttentionPart(torch.zeros_like(part.sums), torch.ones_like(part.total), highest.clone())]


def _fused(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, causal: bool) -> AttentionPart:
    """Attention by PyTorch's fused kernels, with the logarithm of its sum of exponentials.

    Args:
        query: (1, heads, queries, head_dim).
        keys: (1, kv_heads, tokens, head_dim); as many tokens as queries, if causal.
    """
    (_, heads, tokens, _), kv_heads = query.shape, keys.shape[1]
    if query.device.type == "cpu":
        output, total = compat.fused_attention("flash_attention_for_cpu")(query, keys, values, 0.0, causal, scale=scaling)
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

"""Passes over tokens that are not consecutive: the tokens between them are in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.prompt import PrefillCall
from hf_kvcaches.core.refusal import Refusal
from hf_kvcaches.core.source import TensorView
from hf_kvcaches.core.view import LayerView, previous_attention, previous_implementation, why_not_answering
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.partial import LayerPass
from hf_kvcaches.reuse.plan import Indices

# Queries of a block: a smaller block makes slower products, a larger one attends to more masked keys. On a GPU a launch costs as much as
# many products.
_BLOCK, _BLOCK_ON_CPU = 512, 64

# From a layer's index and its queries to the mask of its attention, (batch, 1, tokens, total).
Masks = Callable[[int, torch.Tensor], torch.Tensor]


def spans_refused(model: PreTrainedModel) -> Refusal | None:
    """Why a model can't run spans of a prompt between others, as the end of a sentence; None if it can."""
    config, name = compat.decoder_config(model.config), type(model).__name__
    implementation = previous_implementation(config)
    if reason := why_not_answering(model):
        return reason
    if implementation not in ("sdpa", "eager"):
        return Refusal(f"attention {implementation!r} takes no ready masks; load the model with attn_implementation='sdpa'")
    if not compat.is_family(config, "spans"):
        return Refusal(f"{name} is of a family ({config.model_type}) not known to compute each token from its own mask and position")
    return None


class SparsePass:
    """Which tokens a pass runs, and which slots they see.

    A token's slot is its column in the padded prompt and in the layers' buffers. Rows with fewer tokens to run than others get fillers,
    tokens that are written to the slot behind the prompt, which no query sees.

    Args:
        slots: (batch, tokens), ascending in each row; `total` for fillers, at either end of a row.
        padding: (batch,), how many slots at the start of each row hold no token.
    """

    def __init__(self, slots: torch.Tensor, padding: torch.Tensor, total: int) -> None:
        self.slots, self.padding, self.total = slots, padding, total

    @property
    def positions(self) -> torch.Tensor:
        """(batch, tokens)."""
        real = self.slots < self.total
        return torch.where(real, self.slots - self.padding[:, None], 0)

    @cached_property
    def blocks(self) -> list[tuple[int, int, int]]:
        """The blocks of queries: (start, stop, end), where no query of the block sees slot `end` or a later one."""
        size = _BLOCK_ON_CPU if self.slots.device.type == "cpu" else _BLOCK
        tokens = self.slots.shape[1]
        if tokens <= size:
            return [(0, tokens, self.total)]
        ends = torch.where(self.slots < self.total, self.slots, -1).amax(0).cummax(0).values.tolist()
        return [(start, stop, ends[stop - 1] + 1) for start in range(0, tokens, size) for stop in [min(start + size, tokens)]]

    def masks(self, model: PreTrainedModel) -> Masks:
        """Return the function that makes the mask of each layer."""
        plan = compat.layer_plan(compat.decoder_config(model.config))
        masks: dict[Any, torch.Tensor] = {}

        def mask(index: int, query: torch.Tensor) -> torch.Tensor:
            kind, layer = plan[index]
            window = getattr(layer, "sliding_window", None)
            key = (kind, window, query.device, query.dtype)
            if key not in masks:
                visible = self.visible(kind, window, query.device)
                masks[key] = _additive(visible, query.dtype) if _is_eager(model) else visible
            return masks[key]

        return mask

    def visible(self, kind: str, window: int | None, device: torch.device) -> torch.Tensor:
        """Return which slots each token sees, (batch, 1, tokens, total)."""
        padding = self.padding.to(device)[:, None, None, None]
        query_slots, key_slots = self.slots.to(device)[:, None, :, None], torch.arange(self.total, device=device)
        visible = (key_slots <= query_slots) & (key_slots >= padding)
        if kind == "sliding_attention":
            visible = visible & (key_slots > query_slots - _size(window))
        elif kind == "chunked_attention":
            visible = visible & ((key_slots - padding) // _size(window) == (query_slots - padding) // _size(window))
        else:
            assert kind == "full_attention", kind
        # Fillers see the first token, because a softmax over nothing is NaN.
        return torch.where(query_slots >= self.total, key_slots == padding, visible)


def slots_of(indices: Sequence[Indices], padding: Sequence[int], total: int, device: torch.device) -> torch.Tensor:
    """Return the slots of each row's indices, (batch, most tokens); short rows are filled with slot `total`, which no query sees.

    Args:
        padding: Slots at the start of each row that hold no token.
    """
    slots = np.full((len(indices), max(map(len, indices))), total)
    for row_slots, row_indices, pad in zip(slots, indices, padding, strict=True):
        row_slots[: len(row_indices)] = row_indices + pad
    return torch.from_numpy(slots).to(device)


def ids_at(call: PrefillCall, slots: torch.Tensor, total: int) -> torch.Tensor:
    """Return the token ids of a prompt in some slots; filler slots get any id.

    Args:
        slots: (batch, tokens).
    """
    ids = torch.cat([call.input_ids, call.input_ids[:, -1:]], dim=1)
    return ids.gather(1, slots - (total - call.input_ids.shape[1]))


def _size(window: int | None) -> int:
    assert window is not None
    return window


def _is_eager(model: PreTrainedModel) -> bool:
    return previous_implementation(compat.decoder_config(model.config)) == "eager"


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a mask to the form of eager attention: a bias that is added to the scores."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


def _grouped_attention(
    module: nn.Module, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's own attention; with sdpa on a CPU without a copy of the keys for each query head, which transformers makes for a mask."""
    special = kwargs.get("dropout") or kwargs.get("position_bias") is not None
    if query.device.type != "cpu" or special or previous_implementation(module.config) != "sdpa":
        return previous_attention(module, query, keys, values, mask, **kwargs)
    attend = nn.functional.scaled_dot_product_attention
    return attend(query, keys, values, attn_mask=mask, scale=kwargs.get("scaling"), enable_gqa=True).transpose(1, 2), None


class Look(LayerView):
    """Records the keys and queries that a layer computes for some tokens; its attention output is zeros and not used.

    Args:
        keys: (batch, kv_heads, tokens, head_dim), computed in this pass and rotated.
    """

    def __init__(self, keys: torch.Tensor, value_dim: int) -> None:
        self.fresh, self._value_dim = keys, value_dim
        self.query: torch.Tensor | None = None

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.query = query
        batch, heads, tokens, _ = query.shape
        return query.new_zeros(batch, tokens, heads, self._value_dim), None


class SparseView(TensorView):
    """Keys and values of all slots, for the queries of a sparse pass; each block of queries attends to the slots up to its last one.

    Args:
        keys: (batch, kv_heads, total, head_dim).
    """

    def __init__(self, running: RunningPass, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__(keys, values)
        self.running, self.layer_idx = running, layer_idx

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        mask = self.running.masks(self.layer_idx, query)
        outputs = []
        for start, stop, end in self.running.sparse.blocks:
            keys, values = self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)
            output, _ = _grouped_attention(module, query[:, :, start:stop], keys, values, mask[..., start:stop, :end], **kwargs)
            outputs.append(output)
        return torch.cat(outputs, 1), None


class RunningPass(NamedTuple):
    """A sparse pass with the masks of a model."""

    sparse: SparsePass
    masks: Masks

    @property
    def total(self) -> int:
        """How many tokens the cache has seen behind the pass."""
        return self.sparse.total

    @classmethod
    def of(cls, sparse: SparsePass, model: PreTrainedModel) -> RunningPass:
        """Return the pass for a model."""
        return cls(sparse, sparse.masks(model))

    def write(self, layer: SplicedLayer, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> SparseView:
        """Write the pass's tokens into their slots of a layer, and return the view that answers their queries."""
        return SparseView(self, layer_idx, *layer.write(key_states, value_states, self.sparse.slots, self.sparse.total))


class SplicingPass(LayerPass):
    """A layer pass that writes the tokens of a sparse pass into their slots."""

    def __init__(self, cache: KVCache, sparse: SparsePass, start: int) -> None:
        super().__init__(cache, start)
        self.running = RunningPass.of(sparse, cache.model)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        view = self.running.write(self.layers[layer_idx], layer_idx, key_states, value_states)
        self.cache.answer_next(view)
        return view, view

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        # The views have masks of their own, so the size of the model's does not matter.
        return self.running.sparse.total, 0


class LookingPass(SplicingPass):
    """A layer pass that writes nothing, and keeps what the layer computed in `look`."""

    look: Look | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.look = Look(key_states, value_states.shape[-1])
        self.cache.answer_next(self.look)
        return self.look, self.look

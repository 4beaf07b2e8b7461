"""What a context's tokens get of attention while the model reads the context once more."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from hf_kvcaches import compat
from hf_kvcaches.equip.blocks import block_index
from hf_kvcaches.equip.frames import keys_for_queries
from hf_kvcaches.equip.layer import EquipLayer, detours
from hf_kvcaches.kernels.blocks import Visibility, block_attention

if TYPE_CHECKING:
    from hf_kvcaches.core.call import Call
    from hf_kvcaches.equip.cache import EquipCache
    from hf_kvcaches.equip.rotation import RotatingPass


class Reconstruction:
    """The most that any query of the repeated context gave to each slot of one layer; the layer takes none of these tokens.

    Weights are shared among the tokens of the repeated chunk: no table of all tokens by all tokens is made.

    Attributes:
        span: The positions of the chunk that is repeated, from the first one up to the one behind the last.
        received: (batch, kv_heads, slots), float32, the largest over the heads of a group.
    """

    def __init__(self, layer: EquipLayer) -> None:
        self.span = (0, 0)
        self.received = torch.zeros(*layer.store.shape, layer.state.used(), device=layer.positions.device)

    def attend(
        self, layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: RotatingPass
    ) -> torch.Tensor:
        """Attention of repeated tokens over the context and each other, (batch, tokens, heads, head_dim)."""
        geometry = layer.rotation.geometry
        to = None if geometry is None else running.rotation(geometry, block_index(layer, running))
        if to is not None:
            query, keys = to(query), to(keys)
        held, held_values = keys_for_queries(layer), layer.store.read(layer.state.used())[1]
        positions = layer.positions[:, :1]  # nothing is pruned yet: all heads hold the same tokens
        inside = (positions >= self.span[0]) & (positions < self.span[1])
        columns = inside.any(0).any(0).nonzero()[:, 0]
        self._observe(inside, columns, query, held[:, :, columns], call, running.valid)
        kept = int(columns[-1]) + 1 if columns.numel() else 0
        visible = Visibility((positions[..., :kept] >= 0) & (positions[..., :kept] < self.span[1]), kept, running.valid)
        keys, values = (torch.cat([past[:, :, :kept], new], 2) for past, new in ((held, keys), (held_values, values)))
        if call.softcap is None and call.bias is None and call.sink_logits is None:
            mask = visible.rows(0, query.shape[2], keys.device)
            output = functional.scaled_dot_product_attention(query, keys, values, mask, scale=call.scaling, enable_gqa=True)
            return output.transpose(1, 2).nan_to_num(0.0)
        result, _ = block_attention(
            query, keys, values, call.scaling, visible, softcap=call.softcap, bias=call.bias, sink_logits=call.sink_logits
        )
        assert result is not None
        return result

    def _observe(
        self, inside: torch.Tensor, columns: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, call: Call, valid: torch.Tensor | None
    ) -> None:
        """Notes what the chunk's slots get of its repetition.

        Args:
            inside: True for slots of the chunk, (batch, 1, slots).
            columns: Where these are in any row.
            keys: In these slots, (batch, kv_heads, columns, head_dim), in one frame with the queries.
            valid: True where a repeated token is real, (batch, tokens), or None for all.
        """
        grouped = (query * call.scaling).unflatten(1, (keys.shape[1], -1))
        scores = (grouped @ keys[:, :, None].mT).float()
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        hidden = ~inside[:, :, None, None, columns]
        weights = (scores.masked_fill_(hidden, torch.finfo(scores.dtype).min) if bool(hidden.any()) else scores).softmax(-1)
        if valid is not None:
            weights = weights.masked_fill(hidden, 0.0) * valid[:, None, None, :, None]
        self.received[..., columns] = torch.maximum(self.received[..., columns], weights.amax((2, 3)))


def reconstruct(cache: EquipCache, model: Any, layers: list[EquipLayer], ids: torch.Tensor, chunk: int) -> list[torch.Tensor]:
    """Feeds a context again, and returns what the slots of each layer got of it.

    Args:
        model: The model that filled the cache.
        layers: Those with full attention; others are put back as they were.
        ids: Of the context, (rows, tokens).
        chunk: Tokens fed at a time.
    """
    others = {index: copy.deepcopy(layer) for index, layer in enumerate(cache.layers) if layer not in layers}
    padding = layers[0].state.padding
    padding = ids.new_ones(ids.shape[0], 0, dtype=torch.bool) if padding is None else padding.to(ids.device)
    real = functional.pad(padding, (0, cache.seen - padding.shape[1]), value=True)
    passes = [Reconstruction(layer) for layer in layers]
    try:
        with detours(layers, passes):
            for start in range(0, ids.shape[1], chunk):
                part = ids[:, start : start + chunk]
                for reconstruction in passes:
                    reconstruction.span = (start, start + part.shape[1])
                mask = torch.cat([real, real[:, start : start + part.shape[1]]], 1).long()
                model(
                    input_ids=part,
                    attention_mask=mask if not bool(mask.all()) else None,
                    position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -part.shape[1] :],
                    **compat.cache_kwargs(model, cache),
                    logits_to_keep=1,
                )
                for index, layer in others.items():
                    cache.layers[index] = copy.deepcopy(layer)
    finally:
        for index, layer in others.items():
            cache.layers[index] = layer
    return [reconstruction.received for reconstruction in passes]

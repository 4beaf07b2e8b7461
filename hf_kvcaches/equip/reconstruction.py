"""What a context's tokens get of attention while the model reads the context once more."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from hf_kvcaches.core.blocks import Visibility, block_attention, observers
from hf_kvcaches.equip.candidates import block_places
from hf_kvcaches.equip.frames import TurningPass

if TYPE_CHECKING:
    from hf_kvcaches.core.calls import Call
    from hf_kvcaches.equip.cache import EquipCache
    from hf_kvcaches.equip.layer import EquipLayer


class Reconstruction:
    """The most that any query of the repeated context gave to each slot of one layer; the layer takes none of these tokens.

    Attributes:
        received: (batch, kv_heads, slots), float32, the largest over the heads of a group; None before the first chunk.
    """

    def __init__(self) -> None:
        self.received: torch.Tensor | None = None

    def attend(
        self, layer: EquipLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: TurningPass
    ) -> torch.Tensor:
        """Attention of repeated tokens over the context and each other, (batch, tokens, heads, head_dim)."""
        geometry, kept, tokens = layer.frames.geometry, layer.used, keys.shape[2]
        turn = None if geometry is None else running.turn(geometry, block_places(layer, running))
        if turn is not None:
            query, keys = turn(query), turn(keys)
        output, received = block_attention(
            query,
            torch.cat([layer.near_keys(running), keys], 2),
            torch.cat([layer.held_now()[1], values], 2),
            call.scaling,
            Visibility(layer.holding(), kept, running.valid),
            softcap=call.softcap,
            observers=observers(None, running.valid, tokens, keys.device),
            most=True,
        )
        assert output is not None
        assert received is not None
        received = received[..., :kept]
        self.received = received if self.received is None else torch.maximum(self.received, received)
        return output


def reconstruct(cache: EquipCache, model: Any, layers: list[EquipLayer], ids: torch.Tensor, chunk: int) -> list[torch.Tensor | None]:
    """Feeds a context again, and returns what the slots of each layer got of it.

    Args:
        model: The model that filled the cache.
        layers: Those with full attention; others are put back as they were.
        ids: Of the context, (rows, tokens).
        chunk: Tokens fed at a time.
    """
    others = {index: copy.deepcopy(layer) for index, layer in enumerate(cache.layers) if layer not in layers}
    real = real_tokens(layers[0], ids)
    seen = torch.nn.functional.pad(real, (0, cache.seen - real.shape[1]), value=True)
    for layer in layers:
        layer.reconstruction = Reconstruction()
    try:
        for part, new in zip(ids.split(chunk, 1), real.split(chunk, 1), strict=True):
            mask = torch.cat([seen, new], 1).long()
            with torch.no_grad():
                model(
                    input_ids=part,
                    attention_mask=mask if not bool(mask.all()) else None,
                    position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -part.shape[1] :],
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            for index, layer in others.items():
                cache.layers[index] = copy.deepcopy(layer)
        return [None if layer.reconstruction is None else layer.reconstruction.received for layer in layers]
    finally:
        for layer in layers:
            layer.reconstruction = None
        for index, layer in others.items():
            cache.layers[index] = layer


def real_tokens(layer: EquipLayer, ids: torch.Tensor) -> torch.Tensor:
    """True where a token of a context is no padding, (rows, tokens)."""
    real = torch.ones(ids.shape, dtype=torch.bool, device=ids.device)
    if layer.padding is not None:
        width = min(layer.padding.shape[1], ids.shape[1])
        real[:, :width] = layer.padding[:, :width].to(ids.device)
    return real

"""The second reading of a context: what its tokens get of attention while the model reproduces it (KVzip, arXiv 2505.23416)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.call import Call
from hf_kvcaches.core.identity import Provenance
from hf_kvcaches.core.step import Pass
from hf_kvcaches.equip.policies.kvzip import even_chunks, most_received
from hf_kvcaches.equip.prompt import Detour, PromptLayer
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.blocks import Visibility


@contextmanager
def detours(cache: Any, layers: Sequence[PromptLayer], ways: Sequence[Detour]) -> Iterator[Provenance]:
    """Have each layer's new tokens take a detour, without gradients; what computed them is noted apart from what the cache was fed."""
    for layer, way in zip(layers, ways, strict=True):
        layer.detour = way
    fed, cache.provenance = cache.provenance, Provenance()
    try:
        with torch.no_grad():
            yield cache.provenance
    finally:
        cache.provenance = fed
        for layer in layers:
            layer.detour = None


class Reconstruction:
    """The most that any query of the repeated context gave to each slot of one layer; the layer takes none of these tokens.

    A chunk's tokens are scored by its own repetition alone: no table of all tokens by all tokens is made.

    Attributes:
        span: Where the repeated chunk begins and ends in the text.
        received: (batch, kv_heads, slots), float32, the largest over the heads of a group.
    """

    def __init__(self, layer: PromptLayer) -> None:
        self.span = (0, 0)
        self.received = torch.zeros(*layer.storage.shape, layer.table.used, device=layer.device)

    def __call__(
        self, layer: PromptLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Pass
    ) -> torch.Tensor:
        """Attention of repeated tokens over the context and each other, (batch, tokens, heads, head_dim)."""
        table, rotation = layer.table, layer.rotation
        steps = torch.arange(running.tokens, device=keys.device)[None] if running.valid is None else running.valid.cumsum(-1) - 1
        count = table.count if isinstance(table.count, int) else table.count.view(-1, 1)
        index = rotation.index_of_new(table, steps.clamp(min=0) + count)
        query, keys = (rotation.to_frame(x, running.positions(), index, table) for x in (query, keys))
        kept_states = layer.kept_states()
        text = table.text_index()[:, :1]  # nothing is pruned yet: all heads hold the same tokens
        inside = (text >= self.span[0]) & (text < self.span[1])
        columns = inside.any(0).any(0).nonzero()[:, 0]
        real = None
        if running.valid is not None:
            real = torch.cat([inside[..., columns], running.valid[:, None]], -1)
        received = most_received(query * call.scaling, kept_states[0][:, :, columns], keys, call.softcap, real)
        self.received[..., columns] = torch.maximum(self.received[..., columns], received)
        kept = int(columns[-1]) + 1 if columns.numel() else 0
        visible = Visibility((text[..., :kept] >= 0) & (text[..., :kept] < self.span[1]), kept, running.valid)
        return layer.attend_with(query, kept_states, keys, values, call, visible, call.bias)[0]


def reconstruct(cache: Any, model: Any, layers: list[Any], ids: torch.Tensor, chunk: int) -> list[torch.Tensor]:
    """Feed a context again, and return what the slots of each layer got of it.

    Args:
        cache: An `EquipCache` that holds the context.
        model: The model that filled it.
        layers: Those with full attention; others are put back as they were.
        ids: Of the context, (rows, tokens).
        chunk: Tokens fed at a time.
    """
    if not all(layer.waiting for layer in layers):
        raise UnsupportedError(
            "compress: this policy reads a context again while all of it is held, and this one was compressed before. Feed the longer text "
            "to a new cache, or use a policy that can compress again, such as 'future'."
        )
    others = {index: copy.deepcopy(layer) for index, layer in enumerate(cache.layers) if layer not in layers}
    text = layers[0].table.text
    real = torch.ones(ids.shape[0], cache.seen, dtype=torch.bool, device=ids.device)
    if text is not None:
        places = torch.where(text < 0, cache.seen, text)[:, 0].to(ids.device)
        real = real.new_zeros(ids.shape[0], cache.seen + 1).scatter_(1, places, True)[:, :-1]
    passes = [Reconstruction(layer) for layer in layers]
    try:
        with detours(cache, layers, passes):
            for span in even_chunks(ids.shape[1], chunk):
                part = ids[:, span]
                for reconstruction in passes:
                    reconstruction.span = (span.start, span.stop)
                mask = torch.cat([real, real[:, span]], 1).long()
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

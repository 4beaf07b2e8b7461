"""A cache that keeps every token."""

from __future__ import annotations

from hf_kvcaches.core.holder import HolderCache
from hf_kvcaches.core.layers import GrowingLayer


class GrowingCache(HolderCache):
    """Keeps every token, like `DynamicCache`, without copying the whole cache for each new one.

    The ground that lossy caches are measured from, and what a cache with nothing to save falls back to.

    **Departs from** `DynamicCache`: a decoding step writes one slot into a buffer instead of concatenating. Rows,
    cropping, saving and copying work alike. Sliding, linear and shared layers of hybrid models are transformers' own.

    **Refuses**: `torch.compile` of the cache itself (`is_compileable` is False; a compiled model is fine).

    **Memory per token**: 2 x kv_heads x head_dim x bytes per element x layers, plus an eighth (at least 64 slots) of reserve.

    Args:
        model: A transformers model, or its config.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    def make_layer(self, layer_idx: int) -> GrowingLayer:
        return GrowingLayer()

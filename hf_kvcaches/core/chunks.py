"""Attention of a chunk of new tokens behind others, on a CPU without copied keys and without masked products.

With a mask, transformers copies keys and values for each query head of a group, and sdpa computes what the mask hides. Where the mask is
causal and nothing else, the chunk attends to the tokens before it without a mask and to itself causally, and the two are merged by their
log-sum-exp: 2.1 times as fast for 205 tokens behind 1,843 in float32 (16 query and 8 KV heads of 128).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_kvcaches import compat
from hf_kvcaches.core.attention import LayerView, previous_attention, previous_implementation
from hf_kvcaches.core.masks import TokenMask
from hf_kvcaches.kernels.attention_parts import Part, merge_attention


def chunk_attention(
    module: nn.Module, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's own attention of the newest tokens, (batch, queries, heads, head_dim), and the weights where it returns them.

    Args:
        query: (batch, heads, queries, head_dim).
        keys: Of all tokens, (batch, kv_heads, tokens, head_dim).
        values: Like `keys`.
    """
    tokens, seen = query.shape[2], keys.shape[2] - query.shape[2]
    plain = tokens > 1 and seen > 0 and _is_cpu_sdpa(module, query, **kwargs) and _only_causal(mask, seen, tokens)
    if plain and _has_flash_with_lse(query, values):
        return _behind(query, keys, values, kwargs.get("scaling")), None
    return grouped_attention(module, query, keys, values, mask, **kwargs)


def grouped_attention(
    module: nn.Module, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's own attention, with any mask. Arguments and result are those of `chunk_attention`."""
    if not _is_cpu_sdpa(module, query, **kwargs) or not isinstance(mask, torch.Tensor):
        return previous_attention(module, query, keys, values, mask, **kwargs)
    scale = kwargs.get("scaling")
    output = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return output.transpose(1, 2), None


def _is_cpu_sdpa(module: nn.Module, query: torch.Tensor, **kwargs: Any) -> bool:
    special = kwargs.get("dropout") or kwargs.get("position_bias") is not None
    return query.device.type == "cpu" and not special and previous_implementation(module.config) == "sdpa"


def _has_flash_with_lse(query: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether torch has flash attention for these tensors that tells the log of its sums, too: on a CPU, heads of one size."""
    fast = query.dtype in (torch.float32, torch.float64, torch.bfloat16)
    return query.device.type == "cpu" and fast and query.shape[-1] == values.shape[-1]


def _only_causal(mask: Any, seen: int, tokens: int) -> bool:
    """Whether a mask hides later tokens, and nothing else."""
    if not isinstance(mask, torch.Tensor) or mask.shape[-1] != seen + tokens:
        return False
    read = TokenMask.read(mask, seen, tokens)
    hides_padding = read.valid is not None or (read.real_before is not None and bool((read.real_before < seen).any()))
    return read.allowed is None and not hides_padding


def _behind(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None) -> torch.Tensor:
    batch, heads, tokens, head_dim = query.shape
    kv_heads, group, seen = keys.shape[1], heads // keys.shape[1], keys.shape[2] - tokens
    # Without a mask the query heads of a group are more queries of their KV head.
    together = query.reshape(batch, kv_heads, group * tokens, head_dim)
    before = compat.flash_with_lse(together, keys[:, :, :seen], values[:, :, :seen], scaling, causal=False)
    own_keys, own_values = (states[:, :, seen:].repeat_interleave(group, dim=1) for states in (keys, values))
    own = compat.flash_with_lse(query, own_keys, own_values, scaling, causal=True)
    parts = (_as_part(output.reshape(query.shape), lse.reshape(query.shape[:3])) for output, lse in (before, own))
    return merge_attention(parts)[0].view(batch, tokens, heads, head_dim)


def _as_part(output: torch.Tensor, lse: torch.Tensor) -> Part:
    """Attention as `merge_attention` takes it, in which each token is a row.

    Args:
        output: (batch, heads, tokens, head_dim).
        lse: (batch, heads, tokens).
    """
    return output.transpose(1, 2).flatten(0, 1)[:, None], lse.transpose(1, 2).flatten(0, 1)


class ChunkView(LayerView):
    """In the place of keys and of values of all tokens, in a pass of several new ones.

    Args:
        keys: (batch, kv_heads, tokens, head_dim).
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return chunk_attention(module, query, self.keys, self.values, mask, **kwargs)

"""What the functions of `codes.py` do, written down plainly, with loops and in float64. Arguments and results are theirs."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch

from hf_kvcaches.kernels.attention_parts_reference import exact_attention
from hf_kvcaches.kernels.code_layout import TILE
from hf_kvcaches.kernels.rotation import cos_sin, rotate_

if TYPE_CHECKING:
    from hf_kvcaches.kernels.attention_parts import KeyRotation, Part
    from hf_kvcaches.kernels.code_layout import CodeMap, Counts


def unpack(packed: torch.Tensor, counts: Counts) -> torch.Tensor:
    """Reads one level at a time."""
    levels = torch.zeros(len(packed), sum(counts), packed.shape[2], dtype=torch.int8, device=packed.device)
    first_row = first_level = 0
    for bits, count in zip((8, 4, 2, 1), counts, strict=True):
        rows = count * bits // 8
        for j in range(count):
            byte = packed[:, first_row + j % rows].to(torch.int64)
            code = (byte >> bits * (j // rows)) % 2**bits
            levels[:, first_level + j] = code - 2 ** (bits - 1)
        first_row, first_level = first_row + rows, first_level + count
    return levels


def decode_codes(packed: torch.Tensor, code_map: CodeMap, basis_of: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Decodes one token of one head at a time."""
    levels = unpack(packed, code_map.counts).double()
    batch, _, tokens = packed.shape
    kv_heads, dim = len(code_map.index), code_map.decode.shape[-2]
    vectors = torch.zeros(batch, kv_heads, tokens, dim, dtype=torch.float64, device=packed.device)
    for b, h, t in product(range(batch), range(kv_heads), range(tokens)):
        basis: tuple[int, ...] = (h,)
        if code_map.decode.ndim == 5:
            basis = (b, h, 0 if basis_of is None else int(basis_of[b, h, t // TILE]))
        vectors[b, h, t] = code_map.decode[basis].double() @ levels[b, code_map.index[h], t] + code_map.offset[basis].double()
    return vectors.to(dtype)


def code_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_map: CodeMap,
    value_map: CodeMap,
    scaling: float,
    *,
    valid: torch.Tensor | None = None,
    rotation: KeyRotation | None = None,
    key_basis_of: torch.Tensor | None = None,
    value_basis_of: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Part:
    """`exact_attention` of all tokens, decoded and rotated one by one."""
    key_vectors = decode_codes(keys, key_map, key_basis_of, torch.float64)
    value_vectors = decode_codes(values, value_map, value_basis_of, torch.float64)
    batch, _, tokens = keys.shape
    if rotation is not None:
        for b, t in product(range(batch), range(tokens)):
            if valid is None or valid.expand(batch, -1, -1)[b, :, t].any():
                known = rotation.positions
                position = rotation.start + t if known is None else int(known[b % len(known), t])
                cos, sin = cos_sin(rotation.inv_freq, position, torch.float64)
                rotate_(key_vectors[b, :, t], cos * rotation.attention_scaling, sin * rotation.attention_scaling, rotation.layout)
    return exact_attention(query, key_vectors, value_vectors, scaling, valid, softcap)

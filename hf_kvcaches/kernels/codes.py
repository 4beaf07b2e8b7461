"""Attention over tokens that are kept as packed codes: integers of 8, 4, 2 or 1 bits, one for each direction of a calibrated basis.

Paper: Online Subspace Projection for KV Caches, sections 4 and 6. Keys are decoded and rotated block by block, or, where codes are of
rotated keys, the query is projected into the basis instead. Values are summed up as codes and decoded once. `code_layout.py` says how
codes are packed.

Each function has a `backend`: `"torch"` (fast on CPUs, has gradients), `"triton"` (reads each code once; CUDA, no gradients),
`"reference"` (loops in float64 that are easy to read), or `"auto"`: Triton for CUDA tensors where it can, else torch.
"""

from __future__ import annotations

import torch

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels import codes_reference, codes_torch
from hf_kvcaches.kernels.attention_parts import KeyRotation, Part, check_rotation, no_tokens
from hf_kvcaches.kernels.checks import INTEGERS, check_mask, check_query, check_tensor
from hf_kvcaches.kernels.code_layout import BITS, TILE, CodeMap, CodeOptions, Counts, packed_rows, planes
from hf_kvcaches.kernels.launch import Backend, choose

__all__ = ["TILE", "CodeMap", "Counts", "code_attention", "decode_codes", "pack", "pack_codes", "packed_rows", "unpack"]


def pack(levels: torch.Tensor, counts: Counts) -> torch.Tensor:
    """Packs levels, (batch, sum of counts, tokens), int8, each within -2**(bits - 1) to 2**(bits - 1) - 1: (batch, rows, tokens), uint8."""
    _check_counts("counts", counts)
    check_tensor("levels", levels, (None, sum(counts), None), torch.int8)
    centers = [1 << plane.bits - 1 for plane in planes(counts) for _ in range(plane.size)]
    center = torch.tensor(centers, dtype=torch.uint8, device=levels.device)[:, None]
    return pack_codes(levels.view(torch.uint8) + center, counts)  # wraps around


def pack_codes(codes: torch.Tensor, counts: Counts) -> torch.Tensor:
    """Packs codes, (batch, sum of counts, tokens), uint8, each within 0 to 2**bits - 1: (batch, rows, tokens), uint8. Not checked."""
    packed = codes.new_empty(codes.shape[0], packed_rows(counts), codes.shape[2])
    for plane in planes(counts):
        shifts = torch.arange(0, 8, plane.bits, dtype=torch.uint8, device=codes.device)[:, None, None]
        slots = codes[:, plane.level : plane.level + plane.size].unflatten(1, (-1, plane.rows)) << shifts
        torch.sum(slots, 1, dtype=torch.uint8, out=packed[:, plane.row : plane.row + plane.rows])
    return packed


def unpack(packed: torch.Tensor, counts: Counts) -> torch.Tensor:
    """The levels, (batch, sum of counts, tokens), int8, of packed codes, (batch, rows, tokens), uint8."""
    _check_counts("counts", counts)
    check_tensor("packed", packed, (None, packed_rows(counts), None), torch.uint8)
    return codes_torch.unpacked(packed, counts)


def decode_codes(
    packed: torch.Tensor,
    code_map: CodeMap,
    basis_of: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    backend: Backend = "auto",
    check: bool = True,
) -> torch.Tensor:
    """The vectors of all tokens, (batch, kv_heads, tokens, dim).

    Args:
        packed: (batch, rows, tokens), uint8, the last dimension contiguous.
        basis_of: Which basis of the bank each tile of TILE tokens uses, (batch, kv_heads, tiles), int16, int32 or int64; None where there
            is one.
        dtype: Of the result; None: that of `decode`.
        backend: See the module. There is no kernel in Triton: `"auto"` is `"torch"`.
        check: Whether to look at the arguments first. Not for tensors that fit by construction.
    """
    if check:
        _check_side("", packed, code_map, basis_of)
    dtype = dtype or code_map.decode.dtype
    if backend == "reference":
        return codes_reference.decode_codes(packed, code_map, basis_of, dtype)
    return codes_torch.decode(packed, code_map, basis_of, dtype)


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
    backend: Backend = "auto",
    check: bool = True,
) -> Part:
    """Attention of one query token a row over tokens that are kept as packed codes.

    Invalid tokens take no part: their codes may be anything.

    Args:
        query: (batch, heads, 1, dim), in the frame of the keys; with `rotation`, as the model rotated it. Consecutive heads share a
            key head.
        keys: Packed codes of keys, (batch, rows, tokens), uint8, the last dimension contiguous.
        values: Packed codes of values, likewise.
        key_map: What the codes of keys stand for.
        value_map: What the codes of values stand for; counts, rank and dim may be others.
        valid: True for tokens that take part, (batch or 1, kv_heads or 1, tokens); None for all.
        rotation: For codes of keys that were not rotated.
        key_basis_of: Which basis of the bank each tile of TILE tokens uses, (batch, kv_heads, tiles), int16, int32 or int64; None where
            there is one.
        softcap: If given, scores are softcap * tanh(scores * scaling / softcap).
        backend: See the module.
        check: Whether to look at the arguments first. Not for tensors that fit by construction.

    Returns:
        The output, (batch, 1, heads, value_dim), in the query's dtype; and log sum exp of the scores, (batch, heads), in float64: a large
        score leaves float32 no digits for what `merge_attention` needs. A row without valid tokens gives zeros, and minus infinity.
    """
    options = CodeOptions(valid, rotation, key_basis_of, value_basis_of, softcap)
    if check:
        _check_attention(query, keys, values, key_map, value_map, options)
    asked, backend = backend, choose(backend, query, key_map.decode, key_map.offset, value_map.decode, value_map.offset)
    if backend == "reference":
        return codes_reference.code_attention(query, keys, values, key_map, value_map, scaling, **options._asdict())
    if keys.shape[2] == 0:
        return no_tokens(query, value_map.decode.shape[-2])
    if backend == "triton":
        from hf_kvcaches.kernels import codes_triton

        if asked == "triton" or codes_triton.fits(query, key_map, value_map, rotation):
            return codes_triton.attend(query, keys, values, key_map, value_map, scaling, options)
    return codes_torch.attend(query, keys, values, key_map, value_map, scaling, options)


def _check_counts(name: str, counts: Counts) -> None:
    whole = len(counts) == len(BITS) and all(count >= 0 and count * bits % 8 == 0 for count, bits in zip(counts, BITS, strict=True))
    if not whole:
        raise ConfigError.of(name, "four numbers of codes, of 8, 4, 2 and 1 bits, that fill whole bytes", counts)


def _check_side(name: str, packed: torch.Tensor, code_map: CodeMap, basis_of: torch.Tensor | None) -> None:
    """Refuses packed codes, their map, and bases of tiles that don't fit together.

    Args:
        name: "key", "value", or "" where there is only one side.
    """
    data_name, map_name, basis_name = (f"{name}s", f"{name}_map", f"{name}_basis_of") if name else ("packed", "code_map", "basis_of")
    counts, index, decode, offset = code_map
    _check_counts(f"{map_name}.counts", counts)
    check_tensor(data_name, packed, (None, packed_rows(counts), None), torch.uint8, contiguous=True)
    check_tensor(f"{map_name}.index", index, (None, None), torch.int64)
    batch, (kv_heads, rank) = len(packed), index.shape
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < sum(counts):
        raise ConfigError.of(f"{map_name}.index", f"numbers of {sum(counts)} levels", (int(index.min()), int(index.max())))
    check_tensor(f"{map_name}.decode", decode, (*((kv_heads,) if decode.ndim == 3 else (batch, kv_heads, None)), None, rank))
    check_tensor(f"{map_name}.offset", offset, decode.shape[:-1])
    bases = decode.shape[2] if decode.ndim == 5 else 0
    if basis_of is None and bases > 1:
        raise ConfigError.of(basis_name, f"which of {bases} bases each tile uses", None)
    if basis_of is not None:
        if not bases:
            raise ConfigError.of(basis_name, "None, as there is one basis a head", tuple(basis_of.shape))
        check_tensor(basis_name, basis_of, (batch, kv_heads, -(-packed.shape[2] // TILE)), (torch.int16, *INTEGERS))


def _check_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key_map: CodeMap, value_map: CodeMap, options: CodeOptions
) -> None:
    """Refuses arguments of `code_attention` that don't fit together."""
    _check_side("key", keys, key_map, options.key_basis_of)
    _check_side("value", values, value_map, options.value_basis_of)
    batch, kv_heads, tokens, dim = len(keys), len(key_map.index), keys.shape[2], key_map.decode.shape[-2]
    check_tensor("values", values, (batch, None, tokens), torch.uint8)
    check_tensor("value_map.index", value_map.index, (kv_heads, None), torch.int64)
    check_query(query, batch, kv_heads, dim)
    if options.valid is not None:
        check_mask("valid", options.valid, (batch, kv_heads, tokens))
    if options.rotation is not None:
        check_rotation(options.rotation, batch, tokens, dim)

"""Attention over tokens that are kept as coefficients in a low-rank basis, and exact merging of attention over parts of the tokens.

Paper: Online Subspace Projection for KV Caches, sections 4 and 6. Scores are taken in coefficient space (or, where coefficients are of
unrotated keys, against keys that are rotated on the way), and values never leave it: softmax times coefficients, then one product with
the basis. Each part gives its output and the log of its sum of exponentials, from which `merge_attention` makes the softmax over all.

Each function has a `backend`: `"torch"` (fast on CPUs, has gradients), `"triton"` (reads each coefficient once; CUDA, no gradients),
`"reference"` (loops in float64 that are easy to read), or `"auto"`: Triton for CUDA tensors where it can, else torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels._coefficients_checks import (
    TILE,
    Coefficients,
    Options,
    Part,
    Rotation,
    check_coefficient_attention,
    check_exact,
    computing,
    nothing,
    precise,
)
from hf_kvcaches.kernels._coefficients_reference import (
    coefficient_attention_reference,
    exact_attention_reference,
    merge_attention_reference,
    quantize_tiles_reference,
)
from hf_kvcaches.kernels._coefficients_rotation import CACHED, picked, pieces, spans, turned_logits, units
from hf_kvcaches.kernels._shared import Backend, choose

__all__ = [
    "TILE",
    "Coefficients",
    "Rotation",
    "coefficient_attention",
    "coefficient_attention_reference",
    "exact_attention",
    "exact_attention_reference",
    "merge_attention",
    "merge_attention_reference",
    "quantize_tiles",
    "quantize_tiles_reference",
]


def coefficient_attention(
    query: torch.Tensor,
    keys: Coefficients,
    values: Coefficients,
    scaling: float,
    *,
    valid: torch.Tensor | None = None,
    rotation: Rotation | None = None,
    key_basis_of: torch.Tensor | None = None,
    value_basis_of: torch.Tensor | None = None,
    softcap: float | None = None,
    backend: Backend = "auto",
    check: bool = True,
) -> Part:
    """Attention of one query token a row over tokens that are kept as coefficients.

    Invalid tokens take no part. Their value coefficients must be finite numbers for the torch back-end, which multiplies them by zero;
    their key coefficients may hold anything.

    Args:
        query: (batch, heads, 1, dim), in the frame of the keys; with `rotation`, as the model rotated it. Consecutive heads share a
            key head.
        keys: Coefficients of keys, (batch, kv_heads, tokens, rank), and their bases.
        values: Likewise of values; rank and dim may be others.
        scaling: Of the scores.
        valid: True for tokens that take part, (batch or 1, kv_heads or 1, tokens); None for all.
        rotation: For coefficients of unrotated keys: where they stand.
        key_basis_of: Which basis of the bank each tile of TILE tokens is in, (batch, kv_heads, tiles), int16, int32 or int64; None where
            there is one.
        value_basis_of: Likewise for values.
        softcap: If given, scores are softcap * tanh(scores * scaling / softcap).
        backend: See the module.
        check: Whether to look at the arguments first. Not for tensors that fit by construction.

    Returns:
        The output, (batch, 1, heads, value_dim), in the query's dtype; and log sum exp of the scores, (batch, heads), in float64: a large
        score leaves float32 no digits for what `merge_attention` needs. A row without valid tokens gives zeros, and minus infinity.
    """
    options = Options(valid, rotation, key_basis_of, value_basis_of, softcap)
    if check:
        check_coefficient_attention(query, keys, values, options)
    wanted, backend = backend, choose(backend, query, keys.data, keys.decode, values.data, values.decode)
    if backend == "reference":
        return coefficient_attention_reference(query, keys, values, scaling, **options._asdict())
    if keys.data.shape[2] == 0:
        return nothing(query, values.decode.shape[-2])
    if backend == "triton":
        from hf_kvcaches.kernels import _coefficients_triton

        if wanted == "triton" or _coefficients_triton.fits(query, keys, values, rotation):
            return _coefficients_triton.attend(query, keys, values, scaling, options)
    return _attention_torch(query, keys, values, scaling, options)


def exact_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    valid: torch.Tensor | None = None,
    softcap: float | None = None,
    check: bool = True,
) -> Part:
    """Attention over the few tokens that are kept as they are, as a part for `merge_attention`. All in PyTorch.

    Args:
        query: (batch, heads, 1, dim); consecutive heads share a key head.
        keys: (batch, kv_heads, tokens, dim), in the frame of the query.
        values: (batch, kv_heads, tokens, value_dim). Those of invalid tokens must be finite numbers.
        scaling: Of the scores.
        valid: As for `coefficient_attention`.
        softcap: Likewise.
        check: Likewise.

    Returns:
        As `coefficient_attention`.
    """
    if check:
        check_exact(query, keys, values, valid)
    if keys.shape[2] == 0:
        return nothing(query, values.shape[-1])
    batch, kv_heads, tokens, dim = keys.shape
    asking = query.reshape(batch * kv_heads, -1, dim)
    asking = asking.to(computing(query))
    logits = _products(asking, keys.to(asking.dtype).flatten(0, 1), scaling).view(batch, kv_heads, -1, tokens)
    shares, total, highest = _softmax(logits, valid, softcap)
    output = torch.bmm(shares.flatten(0, 1), values.to(asking.dtype).flatten(0, 1)).view(batch, kv_heads, -1, values.shape[-1])
    return _finished(query, output, total, highest)


def merge_attention(parts: Iterable[Part]) -> Part:
    """Attention over all tokens from attention over parts of them: exact, in one pass, in float32 (float64 if the outputs are).

    Args:
        parts: At least one pair of an output, (batch, 1, heads, value_dim), and log sum exp of its scores, (batch, heads).

    Returns:
        The same for all parts together.
    """
    merged: Part | None = None
    dtype = None
    for output, lse in parts:
        if merged is None:
            merged, dtype = (output.to(computing(output)), lse), output.dtype
            continue
        total = torch.logaddexp(merged[1], lse)
        # What was merged before and this part share the sum of exponentials, so one weight says all.
        share = (lse - total.masked_fill(total == -torch.inf, 0)).exp()
        share = share.to(merged[0].dtype)[:, None, :, None]
        merged = torch.lerp(merged[0], output.to(merged[0].dtype), share), total
    if merged is None:
        raise ConfigError.of("parts", "at least one", "none")
    return (merged[0] if dtype is None else merged[0].to(dtype)), merged[1]


def quantize_tiles(coefficients: torch.Tensor, scale_dtype: torch.dtype = torch.float32) -> Part:
    """Coefficients in 8 bits, with one scale for a tile of TILE tokens: coefficients ≈ data * scale, to half a scale.

    Args:
        coefficients: (batch, kv_heads, tokens, rank), whole tiles. Directions should be of one size, or the small ones lose digits.
        scale_dtype: Of the scales. Float16 costs another 6% of half a scale at the largest elements.

    Returns:
        data, int8 of the same shape, and scale, (batch, kv_heads, tiles).
    """
    tokens = coefficients.shape[2]
    if tokens % TILE:
        raise ConfigError.of("coefficients", f"whole tiles of {TILE} tokens", tokens)
    tiles = coefficients.to(computing(coefficients)).unflatten(2, (-1, TILE))
    scale = (tiles.abs().amax((-1, -2)) / 127).to(scale_dtype)
    # A tile of zeros has none, and one of numbers that are next to nothing may have lost it: both are zeros.
    step = scale.to(tiles.dtype).masked_fill(scale == 0, torch.inf)
    data = (tiles / step[..., None, None]).round_().clamp_(-127, 127).to(torch.int8)
    return data.flatten(2, 3), scale


def _attention_torch(query: torch.Tensor, keys: Coefficients, values: Coefficients, scaling: float, options: Options) -> Part:
    valid, rotation, key_basis_of, value_basis_of, softcap = options
    batch, kv_heads, tokens, _ = keys.data.shape
    asking = query.reshape(batch, kv_heads, -1, query.shape[3]).to(computing(query))
    if rotation is not None:
        logits = turned_logits(asking, keys, scaling, rotation, valid, key_basis_of)
    else:
        logits = _plain_logits(asking, keys, scaling, key_basis_of, valid is None)
    if keys.scale is not None:
        logits = logits * _spread(keys.scale, tokens)
    shares, total, highest = _softmax(logits, valid, softcap)
    if values.scale is not None:
        shares = shares * _spread(values.scale, tokens)
    decode = values.decode.to(asking.dtype).transpose(-1, -2)
    if value_basis_of is None:
        output = torch.matmul(_sums(shares, values.data), decode if decode.ndim == 3 else decode.squeeze(2))
    else:
        output = _decoded_sums(shares, values.data, decode, value_basis_of)
    return _finished(query, output, total, highest)


def _spread(scale: torch.Tensor, tokens: int) -> torch.Tensor:
    """The scale of each token, (batch, kv_heads, 1, tokens)."""
    return scale.unsqueeze(-1).expand(*scale.shape, TILE).flatten(2)[..., :tokens].unsqueeze(2)


def _products(asking: torch.Tensor, data: torch.Tensor, scaling: float, finite: bool = False) -> torch.Tensor:
    """scaling * asking @ data transposed, scaled within the product: one operation, and nothing is rounded twice.

    Args:
        asking: (rows, group, rank).
        data: (rows, tokens, rank).
        scaling: Of the products.
        finite: Whether data are known to be numbers, so that some may be multiplied by zero.
    """
    rows, tokens, rank = data.shape
    if not finite or asking.shape[1] > 1 or tokens < 1024 or tokens % 2 or rank < 24 or data.stride()[1:] != (rank, 1):
        return torch.baddbmm(asking.narrow(2, 0, 1), asking, data.transpose(1, 2), beta=0, alpha=scaling)
    # A product with a single row is slow. Two tokens side by side, with the query before and behind zeros, take half to three quarters
    # of the time.
    pair = asking.new_zeros(rows, 2, 2 * rank)
    pair[:, :1, :rank], pair[:, 1:, rank:] = asking, asking
    both = torch.baddbmm(pair.narrow(2, 0, 1), pair, data.reshape(rows, tokens // 2, 2 * rank).transpose(1, 2), beta=0, alpha=scaling)
    return both.transpose(1, 2).reshape(rows, 1, tokens)


def _plain_logits(asking: torch.Tensor, keys: Coefficients, scaling: float, basis_of: torch.Tensor | None, finite: bool) -> torch.Tensor:
    """Scores without the scales of tiles, (batch, kv_heads, group, tokens)."""
    data, decode = keys.data, keys.decode.to(asking.dtype)
    batch, kv_heads, tokens, _ = data.shape
    parts = []
    if basis_of is None:
        asked = torch.matmul(asking, decode if decode.ndim == 3 else decode.squeeze(2)).flatten(0, 1)
        for here in _runs(data, asking.dtype):
            parts.append(_products(asked, data[:, :, here].to(asking.dtype).flatten(0, 1), scaling, finite))
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).view(batch, kv_heads, -1, tokens)
    if (runs := spans(basis_of, tokens)) is not None:
        for here, own in runs:
            asked = torch.matmul(asking, picked(decode, own).squeeze(2)).flatten(0, 1)
            parts.append(_products(asked, data[:, :, here].to(asking.dtype).flatten(0, 1), scaling, finite))
        return torch.cat(parts, 2).view(batch, kv_heads, -1, tokens)
    asked = torch.matmul(asking.unsqueeze(2), decode)  # The query in all bases, (batch, kv_heads, bases, group, rank).
    index, width = units(basis_of, tokens)
    for unit, count, wide in pieces(tokens, width, _most(data, asking.dtype)):
        block = data[:, :, unit * width : unit * width + count * wide].to(asking.dtype).unflatten(2, (count, wide))
        mine = picked(asked, index[:, :, unit : unit + count])
        part = _products(mine.flatten(0, 2), block.flatten(0, 2), scaling).view(batch, kv_heads, count, -1, wide)
        parts.append(part.transpose(2, 3).flatten(3))
    return torch.cat(parts, 3)


def _most(data: torch.Tensor, dtype: torch.dtype) -> int:
    """Tokens to take at a time: all, unless they must be converted first, and then as many as stay in cache until they are used."""
    batch, kv_heads, tokens, rank = data.shape
    return tokens if data.dtype == dtype else max(TILE, 2 * CACHED // (batch * kv_heads * rank))


def _runs(data: torch.Tensor, dtype: torch.dtype) -> list[slice]:
    tokens, most = data.shape[2], _most(data, dtype)
    return [slice(begin, min(begin + most, tokens)) for begin in range(0, tokens, most)]


def _softmax(logits: torch.Tensor, valid: torch.Tensor | None, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exponentials of scores less their maximum, their sum, and the maximum (0 where no token is valid); the last two with 1 token.

    Overwrites the scores.
    """
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if valid is not None:
        logits = logits.masked_fill(~valid.unsqueeze(2), -torch.inf)
    highest = logits.detach().amax(-1, keepdim=True)
    if valid is not None:
        highest = highest.masked_fill(highest == -torch.inf, 0)
    shares = logits.sub_(highest).exp_()  # In place, as unwritten memory takes longer to get than to fill.
    return shares, shares.sum(-1, keepdim=True), highest


def _sums(shares: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Coefficients times shares, (batch, kv_heads, group, rank)."""
    batch, kv_heads, group, _ = shares.shape
    total: torch.Tensor | None = None
    for here in _runs(data, shares.dtype):
        part = torch.bmm(shares[..., here].flatten(0, 1), data[:, :, here].to(shares.dtype).flatten(0, 1))
        total = part if total is None else total + part
    assert total is not None
    return total.view(batch, kv_heads, group, -1)


def _decoded_sums(shares: torch.Tensor, data: torch.Tensor, bank: torch.Tensor, basis_of: torch.Tensor) -> torch.Tensor:
    """Coefficients times shares, each read in its basis, (batch, kv_heads, group, dim)."""
    runs = spans(basis_of, data.shape[2])
    if runs is None:
        return torch.matmul(_sums_of_bases(shares, data, basis_of, bank.shape[2]), bank).sum(2)
    parts = [torch.matmul(_sums(shares[..., here], data[:, :, here]), picked(bank, own).squeeze(2)) for here, own in runs]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _sums_of_bases(shares: torch.Tensor, data: torch.Tensor, basis_of: torch.Tensor, bases: int) -> torch.Tensor:
    """Coefficients times shares, those of each basis by themselves, (batch, kv_heads, bases, group, rank)."""
    batch, kv_heads, tokens, rank = data.shape
    group = shares.shape[2]
    index, width = units(basis_of, tokens)
    heads = torch.arange(batch * kv_heads, device=data.device).view(batch, kv_heads, 1)
    sums = shares.new_zeros(batch * kv_heads * bases, group, rank)
    for unit, count, wide in pieces(tokens, width, _most(data, shares.dtype)):
        here = slice(unit * width, unit * width + count * wide)
        block = data[:, :, here].to(shares.dtype).unflatten(2, (count, wide)).flatten(0, 2)
        share = shares[..., here].unflatten(3, (count, wide)).transpose(2, 3).flatten(0, 2)
        sums = sums.index_add(0, (heads * bases + index[:, :, unit : unit + count]).flatten(), torch.bmm(share, block))
    return sums.view(batch, kv_heads, bases, group, rank)


def _finished(query: torch.Tensor, output: torch.Tensor, total: torch.Tensor, highest: torch.Tensor) -> Part:
    """Normalises outputs, (batch, kv_heads, group, value_dim)."""
    batch, heads = query.shape[:2]
    wide = precise(query.device)
    lse = highest.to(wide) + total.to(wide).log()
    output = output / total.masked_fill(total == 0, 1)
    return output.reshape(batch, 1, heads, -1).to(query.dtype), lse.view(batch, heads)

"""The Triton kernels behind `slots.py`, with their launchers. Import it inside a function: it needs Triton as soon as it is imported.

A program attends for one row and KV head, with all the query heads that share it, so that keys and values are read once. It walks over
its slots in blocks with a running maximum. Where there are too few rows and heads to fill a GPU, several programs share the slots of one.
Options come to the kernels as tuples of a tensor and its strides, or as None, which leaves their code out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_kvcaches.kernels.common_triton import capped, combine, dot, finite, partners, rotated, store_part
from hf_kvcaches.kernels.launch import padded, split_tokens, strided
from hf_kvcaches.kernels.rotation import RotationTables


@triton.jit
def _option(option, s, live, b, h):
    """An optional tensor's numbers for slots."""
    return tl.load(option[0] + b * option[1] + h * option[2] + s * option[3], mask=live, other=0)


@triton.jit
def _pointers(s, end, b, h, buffer, tables, PAGE: tl.constexpr):
    """Pointers to the slots of one row and KV head, in a buffer or in pages."""
    if PAGE == 0:
        at = buffer[0] + b * buffer[1] + h * buffer[2] + s.to(tl.int64) * buffer[3]
    else:
        page = tl.load(tables[0] + b * tables[1] + s // PAGE, mask=s < end, other=0).to(tl.int64)
        at = buffer[0] + page * buffer[1] + h * buffer[2] + (s % PAGE) * buffer[3]
    return at


@triton.jit
def _keys(s, live, at, b, h, dims, rotation, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The keys of a block of slots, (slots, dims). Each dimension's partner is loaded again, when it is in the cache."""
    keys = tl.load(at[:, None] + dims[None, :], mask=live[:, None] & (dims < DIM)[None, :], other=0.0)
    if rotation is not None:
        mask = live[:, None] & (dims < 2 * HALF)[None, :]
        others = tl.load(at[:, None] + partners(dims, HALF, INTERLEAVED)[None, :], mask=mask, other=0.0)
        table_at = _option(rotation[0], s, live, b, h).to(tl.int64) * HALF
        keys = rotated(keys, others, dims, rotation[1], table_at, mask, HALF, INTERLEAVED).to(keys.dtype)
    return keys


@triton.jit
def attend_kernel(
    query, sinks, keys, values, tables, valid, rotation, parts, stats, raw, scaling, softcap, slots, chunk,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention of one row and KV head over one chunk of its slots.

    `keys`, `values`: (pointer, strides of the first three dimensions). `tables`: None or (pointer, stride). `valid`: None or (pointer,
    strides). `rotation`: None or ((positions, strides), (cos, sin)). `sinks`: None or (query heads,).
    `parts`, `stats`: as `combine_kernel` reads them. `raw`: None or the scores to store, (batch * heads, slots), float32.
    """
    row = tl.program_id(0).to(tl.int64)
    b, h = row // KV_HEADS, row % KV_HEADS
    heads, dims, value_dims = tl.arange(0, HEADS), tl.arange(0, DIM_PAD), tl.arange(0, VALUE_PAD)
    query_heads = row * GROUP + heads
    query_at, query_mask = query_heads[:, None] * DIM + dims[None, :], (heads < GROUP)[:, None] & (dims < DIM)[None, :]
    queries = tl.load(query + query_at, mask=query_mask, other=0.0)
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, VALUE_PAD], tl.float32)
    if sinks is not None:
        # Of all programs that share the slots the first one counts the sink.
        sink = tl.load(sinks + h * GROUP + heads, mask=heads < GROUP, other=float("-inf")).to(tl.float32)
        highest = tl.where(tl.program_id(1) == 0, sink, highest)
        total = tl.where((tl.program_id(1) == 0) & (heads < GROUP), 1.0, total)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, slots)
    for start in range(begin, end, BLOCK):
        s = start + tl.arange(0, BLOCK)
        live = s < end
        if valid is not None:
            live = live & (_option(valid, s, live, b, h) != 0)
        block = _keys(s, live, _pointers(s, end, b, h, keys, tables, PAGE), b, h, dims, rotation, DIM, HALF, INTERLEAVED)
        scores = tl.where(live[None, :], capped(dot(queries, tl.trans(block)) * scaling, softcap), float("-inf"))
        if raw is not None:
            tl.store(raw + query_heads[:, None] * slots + s[None, :], scores, mask=(heads < GROUP)[:, None] & (s < end)[None, :])
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp(scores - finite(higher)[:, None])
        shrink = tl.exp(highest - finite(higher))
        at = _pointers(s, end, b, h, values, tables, PAGE)
        value = tl.load(at[:, None] + value_dims[None, :], mask=live[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)
        sums = dot(shares.to(value.dtype), value, sums * shrink[:, None])
        total = total * shrink + tl.sum(shares, 1)
        highest = higher
    store_part(row, heads, sums, value_dims, highest, total, parts, stats, GROUP, VALUE_DIM, VALUE_DIM)


@triton.jit
def write_kernel(
    keys, values, tables, slots, new_keys, new_values, tokens,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a block of new tokens of one row and KV head; tensors as in `attend_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    b, h = row // KV_HEADS, row % KV_HEADS
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = _option(slots, token, token < tokens, b, h)
    live = (token < tokens) & (slot >= 0)
    buffer, within = b, slot
    if PAGE != 0:
        buffer = tl.load(tables[0] + b * tables[1] + slot // PAGE, mask=live, other=-1).to(tl.int64)
        live, within = live & (buffer >= 0), slot % PAGE
    _copy(new_keys, keys, b, h, token, buffer, within, live, DIM, DIM_PAD)
    _copy(new_values, values, b, h, token, buffer, within, live, VALUE_DIM, VALUE_PAD)


@triton.jit
def _copy(new, out, b, h, token, buffer, within, live, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    dims = tl.arange(0, DIM_PAD)[None, :]
    at = new[0] + b * new[1] + h * new[2] + token * new[3]
    to = out[0] + buffer * out[1] + h * out[2] + within * out[3]
    mask = live[:, None] & (dims < DIM)
    tl.store(to[:, None] + dims, tl.load(at[:, None] + dims, mask=mask, other=0.0), mask=mask)


def block_size(dim: int, value_dim: int, rotated: bool) -> int:
    """So many slots at a time that registers hardly spill and shared memory suffices, as compiled for sm_80 and sm_90.

    Float32 keys of 256 dimensions exceed shared memory where many query heads share a KV head: rotated ones from 17 heads on an sm_80 and
    from 33 on an sm_90, others from 33 on an sm_80.
    """
    return min(64, max(16, (2048 if rotated else 4096) // padded(max(dim, value_dim))))


def _sizes(keys: Tensor, values: Tensor, tables: Tensor | None) -> dict[str, int]:
    """The constants of both kernels."""
    dim, value_dim, page = keys.shape[3], values.shape[3], 0 if tables is None else keys.shape[2]
    sizes = {"KV_HEADS": keys.shape[1], "PAGE": page, "DIM": dim, "DIM_PAD": padded(dim)}
    return sizes | {"VALUE_DIM": value_dim, "VALUE_PAD": padded(value_dim)}


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor | None,
    slots: int,
    scaling: float,
    valid: Tensor | None,
    rotation: RotationTables | None,
    softcap: float | None,
    sink_logits: Tensor | None,
    want_weights: bool,
    *,
    splits: int | None = None,
    block: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`slot_attention` in blocks of slots, a power of two from 16 on; `splits` programs share those of a row and KV head."""
    (batch, heads), kv_heads, value_dim = query.shape[:2], keys.shape[1], values.shape[3]
    group, rows, shape = heads // kv_heads, batch * kv_heads, (batch, kv_heads, slots)
    block = block or block_size(query.shape[3], value_dim, rotation is not None)
    chunk, splits = split_tokens(slots, block, rows, splits, query.device)
    raw = query.new_empty(batch * heads, slots, dtype=torch.float32) if want_weights else None
    parts, stats = (query.new_empty(rows * splits * group * n, dtype=torch.float32) for n in (value_dim, 2))
    attend_kernel[(rows, splits)](
        query.contiguous(),
        None if sink_logits is None else sink_logits.contiguous(),
        *(strided(keys), strided(values)),
        None if tables is None else (tables.contiguous(), tables.shape[1]),
        strided(valid, shape),
        None if rotation is None else (strided(rotation.positions, shape), (rotation.cos.contiguous(), rotation.sin.contiguous())),
        *(parts, stats, raw, scaling, softcap, slots, chunk),
        GROUP=group,
        HEADS=padded(group),
        HALF=0 if rotation is None else rotation.cos.shape[-1],
        INTERLEAVED=rotation is not None and rotation.layout == "interleaved",
        BLOCK=block,
        num_stages=2,
        **_sizes(keys, values, tables),
    )
    output = query.new_empty(batch, 1, heads, value_dim)
    lse = combine(parts, stats, output.view(rows, group, value_dim), splits, torch.float64).unsqueeze(2)
    if raw is None:
        return output, None
    weights = (raw.view(rows, group, slots) - lse.masked_fill(lse == -torch.inf, 0)).exp_().mean(1)  # 0 where no slot is valid
    return output, weights.float().view(shape)


def write(keys: Tensor, values: Tensor, tables: Tensor | None, slots: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    """`write_slots`, whose arguments these are."""
    batch, kv_heads, tokens, _ = new_keys.shape
    if tokens == 0:
        return
    block = min(16, triton.next_power_of_2(tokens))
    write_kernel[(batch * kv_heads, triton.cdiv(tokens, block))](
        *(strided(keys), strided(values)),
        None if tables is None else (tables.contiguous(), tables.shape[1]),
        strided(slots, (batch, kv_heads, tokens)),
        *(strided(new if new.stride(3) == 1 else new.contiguous()) for new in (new_keys, new_values)),
        tokens,
        BLOCK=block,
        **_sizes(keys, values, tables),
    )

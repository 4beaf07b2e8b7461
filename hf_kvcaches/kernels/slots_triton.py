"""The Triton kernels behind `slots.py`, with their launchers. Import it inside a function: it needs Triton as soon as it is imported.

A program attends for one row and KV head, with all the query heads that share it, so that keys and values are read once. It walks over
its slots in blocks with a running maximum. Where there are too few rows and heads to fill a GPU, several programs share the slots of one.

Options come to the kernels as tuples of a tensor and its strides, or as None, which leaves their code out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvcaches.kernels.arguments import Attended, SlotOptions
from hf_kvcaches.kernels.common_triton import capped, combine, dot, finite, load_option, rotate_pairs, store_part
from hf_kvcaches.kernels.launch import padded, split_tokens, strided, strided_or_none


@triton.jit
def _load_rotated(at, live, dims, tables, tables_at, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Loads vectors and rotates their first 2 * HALF dimensions. (slots, dims), float32.

    Each dimension's partner is loaded a second time, from where the first load has put it: in the cache.
    """
    one = tl.load(at[:, None] + dims[None, :], mask=live[:, None] & (dims < DIM)[None, :], other=0.0).to(tl.float32)
    if INTERLEAVED:
        partner, pair, is_first = dims ^ 1, dims // 2, dims % 2 == 0
    else:
        partner, pair, is_first = tl.where(dims < HALF, dims + HALF, dims - HALF), dims % HALF, dims < HALF
    mask = live[:, None] & (dims < 2 * HALF)[None, :]
    other = tl.load(at[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(tables[0] + tables_at[:, None] + pair[None, :], mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(tables[1] + tables_at[:, None] + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    rotated, _ = rotate_pairs(one, other, cos, tl.where(is_first[None, :], sin, -sin))
    return rotated


@triton.jit
def _products(query, keys):
    """(heads, dim) by (slots, dim) to (heads, slots), in float32. A single head is not worth a matrix product, which takes 16."""
    if query.shape[0] == 1:
        products = tl.sum(query[:, None, :].to(tl.float32) * keys[None, :, :].to(tl.float32), 2)
    else:
        products = dot(query, tl.trans(keys))
    return products


@triton.jit
def _sums(shares, values):
    """(heads, slots) by (slots, dim) to (heads, dim), in float32."""
    if shares.shape[0] == 1:
        sums = tl.sum(shares[:, :, None] * values[None, :, :].to(tl.float32), 1)
    else:
        sums = dot(shares.to(values.dtype), values)
    return sums


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
def _block_scores(
    s, live, at, b, h, queries, dims, rotation, scaling, softcap,
    DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The scores of a block of slots, minus infinity where one is not live. (heads, slots)."""
    if rotation is None:
        keys = tl.load(at[:, None] + dims[None, :], mask=live[:, None] & (dims < DIM)[None, :], other=0.0)
    else:
        position = load_option(s, live, b, h, rotation[0]).to(tl.int64)
        keys = _load_rotated(at, live, dims, rotation[1], position * HALF, DIM, HALF, INTERLEAVED).to(queries.dtype)
    return tl.where(live[None, :], capped(_products(queries, keys) * scaling, softcap), float("-inf"))


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
    `parts`, `stats`: as `combine_kernel` reads them.
    `raw`: None or the scores to store, (batch * heads, slots), float32.
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
            live = live & (load_option(s, live, b, h, valid) != 0)
        at = _pointers(s, end, b, h, keys, tables, PAGE)
        scores = _block_scores(s, live, at, b, h, queries, dims, rotation, scaling, softcap, DIM, HALF, INTERLEAVED)
        if raw is not None:
            tl.store(raw + query_heads[:, None] * slots + s[None, :], scores, mask=(heads < GROUP)[:, None] & (s < end)[None, :])
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp(scores - finite(higher)[:, None])
        shrink = tl.exp(highest - finite(higher))
        at = _pointers(s, end, b, h, values, tables, PAGE)
        value = tl.load(at[:, None] + value_dims[None, :], mask=live[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)
        sums = sums * shrink[:, None] + _sums(shares, value)
        total = total * shrink + tl.sum(shares, 1)
        highest = higher
    store_part(row, heads, sums, value_dims, highest, total, parts, stats, GROUP, VALUE_DIM, VALUE_DIM)


@triton.jit
def write_kernel(
    keys, values, tables, slots, new_keys, new_values, tokens,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a block of new tokens of one row and KV head.

    Tensors are (pointer, strides of the first three dimensions), `tables` None or (pointer, stride).
    """
    row = tl.program_id(0).to(tl.int64)
    b, h = row // KV_HEADS, row % KV_HEADS
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots[0] + b * slots[1] + h * slots[2] + token * slots[3], mask=token < tokens, other=-1)
    live = slot >= 0
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

    Float32 keys of 256 dimensions do not fit where many query heads share a KV head: rotated ones from 17 heads on an sm_80 (176 KB of
    163 KB) and from 33 on an sm_90 (240 KB of 227 KB), others from 33 on an sm_80 (168 KB).
    """
    return min(64, max(16, (2048 if rotated else 4096) // padded(max(dim, value_dim))))


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    slots: int,
    scaling: float,
    options: SlotOptions,
    *,
    splits: int | None = None,
    block: int | None = None,
) -> Attended:
    """`slot_attention`, whose arguments these are, and two more.

    Args:
        splits: How many programs share the slots of a row and KV head; None: enough to fill the GPU.
        block: Slots that a program takes at a time, a power of two from 16 on; None: what fits into registers.
    """
    valid, rotation, softcap, sink_logits, want_weights = options
    batch, heads, _, dim = query.shape
    kv_heads, value_dim = keys.shape[1], values.shape[3]
    group, rows = heads // kv_heads, batch * kv_heads
    shape = (batch, kv_heads, slots)
    block = block or block_size(dim, value_dim, rotation is not None)
    chunk, splits = split_tokens(slots, block, rows, splits, query.device)
    raw = query.new_empty(batch * heads, slots, dtype=torch.float32) if want_weights else None
    parts, stats = (query.new_empty(rows * splits * group * n, dtype=torch.float32) for n in (value_dim, 2))
    attend_kernel[(rows, splits)](
        query.contiguous(),
        None if sink_logits is None else sink_logits.contiguous(),
        *strided_or_none(keys, values),
        None if tables is None else (tables.contiguous(), tables.shape[1]),
        None if valid is None else strided(valid, shape),
        None if rotation is None else (strided(rotation.positions, shape), (rotation.cos.contiguous(), rotation.sin.contiguous())),
        *(parts, stats, raw, scaling, softcap, slots, chunk),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEADS=1 if group == 1 else padded(group),
        DIM=dim,
        DIM_PAD=padded(dim),
        HALF=0 if rotation is None else rotation.cos.shape[-1],
        INTERLEAVED=rotation is not None and rotation.layout == "interleaved",
        VALUE_DIM=value_dim,
        VALUE_PAD=padded(value_dim),
        PAGE=0 if tables is None else keys.shape[2],
        BLOCK=block,
        num_stages=2,
    )
    output = query.new_empty(batch, 1, heads, value_dim)
    lse = combine(parts, stats, output.view(rows, group, value_dim), splits, torch.float64).unsqueeze(2)
    if raw is None:
        return output, None
    # Where no slot is valid, all scores are minus infinity.
    weights = (raw.view(rows, group, slots) - lse.masked_fill(lse == -torch.inf, 0)).exp_().mean(1)
    return output, weights.float().view(shape)


def write(
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    slots: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
) -> None:
    """`write_slots`, whose arguments these are."""
    batch, kv_heads, tokens, dim = new_keys.shape
    value_dim = new_values.shape[3]
    if tokens == 0:
        return
    block = min(16, triton.next_power_of_2(tokens))
    write_kernel[(batch * kv_heads, triton.cdiv(tokens, block))](
        *strided_or_none(keys, values),
        None if tables is None else (tables.contiguous(), tables.shape[1]),
        strided(slots, (batch, kv_heads, tokens)),
        *(strided(new if new.stride(3) == 1 else new.contiguous()) for new in (new_keys, new_values)),
        tokens,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_PAD=padded(dim),
        VALUE_DIM=value_dim,
        VALUE_PAD=padded(value_dim),
        PAGE=0 if tables is None else keys.shape[2],
        BLOCK=block,
    )

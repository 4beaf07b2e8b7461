"""The Triton kernels behind `slots.py`, with their launchers. Import it inside a function: it needs Triton as soon as it is imported.

A program attends for one row and KV head, with all the query heads that share it, so that keys and values are read once. It walks over
its slots in blocks with a running maximum. Where there are too few rows and heads to fill a GPU, several programs share the slots of one,
and `combine_kernel` puts their parts together.

Options come to the kernels as tuples of a tensor and its strides, or as None, which leaves their code out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvcaches.kernels._common_triton import WIDE, capped, finite, option, together
from hf_kvcaches.kernels._launch import padded, portions, strided
from hf_kvcaches.kernels._slots_checks import Options, WriteTurn


@triton.jit
def _turned(at, live, dims, tables, tables_at, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
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
    return one * cos + other * tl.where(is_first[None, :], -sin, sin)


@triton.jit
def _products(query, keys):
    """(heads, dim) by (slots, dim) to (heads, slots), in float32. A single head is not worth a matrix product, which takes 16."""
    if query.shape[0] == 1:
        products = tl.sum(query[:, None, :].to(tl.float32) * keys[None, :, :].to(tl.float32), 2)
    elif WIDE:
        products = tl.dot(query.to(tl.float32), tl.trans(keys.to(tl.float32)), input_precision="tf32x3")
    else:
        products = tl.dot(query, tl.trans(keys), input_precision="tf32x3")
    return products


@triton.jit
def _sums(shares, values):
    """(heads, slots) by (slots, dim) to (heads, dim), in float32."""
    if shares.shape[0] == 1:
        sums = tl.sum(shares[:, :, None] * values[None, :, :].to(tl.float32), 1)
    elif WIDE:
        sums = tl.dot(shares, values.to(tl.float32), input_precision="tf32x3")
    else:
        sums = tl.dot(shares.to(values.dtype), values, input_precision="tf32x3")
    return sums


@triton.jit
def _inverse(total):
    """1 / total, or 0 where no slot was valid."""
    return tl.where(total > 0, 1 / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def _normalise(raw, weights, row, heads, highest, inverse, slots, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Turns the raw scores of one row and KV head into weights, mean over its heads."""
    for start in range(0, slots, BLOCK):
        s = start + tl.arange(0, BLOCK)
        mask = (heads < GROUP)[:, None] & (s < slots)[None, :]
        scores = tl.load(raw + (row * GROUP + heads)[:, None] * slots + s[None, :], mask=mask, other=float("-inf"))
        shares = tl.exp(scores - finite(highest)[:, None]) * inverse[:, None]
        tl.store(weights + row * slots + s, tl.sum(shares, 0) / GROUP, mask=s < slots)


@triton.jit
def _places(s, end, b, h, buffer, tables, PAGE: tl.constexpr):
    """Pointers to the slots of one row and KV head, in a buffer or in pages."""
    if PAGE == 0:
        at = buffer[0] + b * buffer[1] + h * buffer[2] + s.to(tl.int64) * buffer[3]
    else:
        page = tl.load(tables[0] + b * tables[1] + s // PAGE, mask=s < end, other=0).to(tl.int64)
        at = buffer[0] + page * buffer[1] + h * buffer[2] + (s % PAGE) * buffer[3]
    return at


@triton.jit
def _block_scores(
    s, live, b, h, at, near, away, dims, far, turn, scaling, softcap, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The scores of a block of slots, minus infinity where one is not live. (heads, slots)."""
    if turn is None:
        keys = tl.load(at[:, None] + dims[None, :], mask=live[:, None] & (dims < DIM)[None, :], other=0.0)
    else:
        place = option(s, live, b, h, turn[0]).to(tl.int64)
        keys = _turned(at, live, dims, turn[1], place * HALF, DIM, HALF, INTERLEAVED).to(near.dtype)
    scores = _products(near, keys)
    if far is not None:
        is_far = option(s, live, b, h, far) != 0 if len(far) == 4 else s < far[0]
        scores = tl.where(is_far[None, :], _products(away, keys), scores)
    return tl.where(live[None, :], capped(scores * scaling, softcap), float("-inf"))


@triton.jit
def attend_kernel(
    query, far_query, keys, values, tables, valid, far, turn, output, parts, stats, raw, weights, scaling, softcap, slots, chunk,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention of one row and KV head over one chunk of its slots.

    `keys`, `values`: (pointer, strides of the first three dimensions). `tables`: None or (pointer, stride). `valid`: None or (pointer,
    strides). `far`: None, (number,) or (pointer, strides). `turn`: None or ((positions, strides), (cos, sin)).
    `parts`: (batch * kv_heads, SPLITS, GROUP, VALUE_DIM), `stats`: (..., GROUP, 2), where several programs leave their sums, maximum and
    total. `raw`: None or scratch for the scores, (batch * heads, slots). These and `weights` are float32; all are contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    b, h = row // KV_HEADS, row % KV_HEADS
    heads, dims, value_dims = tl.arange(0, HEADS), tl.arange(0, DIM_PAD), tl.arange(0, VALUE_PAD)
    mine = row * GROUP + heads
    asked, asks = mine[:, None] * DIM + dims[None, :], (heads < GROUP)[:, None] & (dims < DIM)[None, :]
    near = tl.load(query + asked, mask=asks, other=0.0)
    away = near if far is None else tl.load(far_query + asked, mask=asks, other=0.0)
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, VALUE_PAD], tl.float32)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, slots)
    for start in range(begin, end, BLOCK):
        s = start + tl.arange(0, BLOCK)
        live = s < end
        if valid is not None:
            live = live & (option(s, live, b, h, valid) != 0)
        at = _places(s, end, b, h, keys, tables, PAGE)
        scores = _block_scores(s, live, b, h, at, near, away, dims, far, turn, scaling, softcap, DIM, HALF, INTERLEAVED)
        if raw is not None:
            tl.store(raw + mine[:, None] * slots + s[None, :], scores, mask=(heads < GROUP)[:, None] & (s < end)[None, :])
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp(scores - finite(higher)[:, None])
        shrink = tl.exp(highest - finite(higher))
        at = _places(s, end, b, h, values, tables, PAGE)
        value = tl.load(at[:, None] + value_dims[None, :], mask=live[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)
        sums = sums * shrink[:, None] + _sums(shares, value)
        total = total * shrink + tl.sum(shares, 1)
        highest = higher
    told = (heads < GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :]
    if SPLITS == 1:
        inverse = _inverse(total)
        tl.store(output + mine[:, None] * VALUE_DIM + value_dims[None, :], sums * inverse[:, None], mask=told)
        if raw is not None:
            tl.debug_barrier()  # What other threads of this program have written is read now.
            _normalise(raw, weights, row, heads, highest, inverse, slots, GROUP, BLOCK)
    else:
        part = (row * SPLITS + tl.program_id(1)) * GROUP + heads
        tl.store(parts + part[:, None] * VALUE_DIM + value_dims[None, :], sums, mask=told)
        tl.store(stats + part * 2, highest, mask=heads < GROUP)
        tl.store(stats + part * 2 + 1, total, mask=heads < GROUP)


@triton.jit
def combine_kernel(
    parts, stats, raw, output, weights, slots,
    GROUP: tl.constexpr, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Puts the parts of one row and KV head together. The arguments are those of `attend_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    heads, value_dims = tl.arange(0, HEADS), tl.arange(0, VALUE_PAD)
    told = (heads < GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :]
    highest, total, sums = together(parts, stats, row, SPLITS, heads, value_dims, GROUP, HEADS, VALUE_DIM, VALUE_PAD)
    inverse = _inverse(total)
    tl.store(output + (row * GROUP + heads)[:, None] * VALUE_DIM + value_dims[None, :], sums * inverse[:, None], mask=told)
    if raw is not None:
        _normalise(raw, weights, row, heads, highest, inverse, slots, GROUP, BLOCK)


@triton.jit
def write_kernel(
    keys, values, tables, slots, new_keys, new_values, turn, tokens,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a block of new tokens of one row and KV head.

    Tensors are (pointer, strides of the first three dimensions), `tables` None or (pointer, stride), `turn` None or
    (strides of both tables, (cos, sin)).
    """
    row = tl.program_id(0).to(tl.int64)
    b, h = row // KV_HEADS, row % KV_HEADS
    dims, value_dims = tl.arange(0, DIM_PAD), tl.arange(0, VALUE_PAD)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots[0] + b * slots[1] + h * slots[2] + token * slots[3], mask=token < tokens, other=-1)
    live = slot >= 0
    if PAGE == 0:
        to_key = keys[0] + b * keys[1] + h * keys[2] + slot * keys[3]
        to_value = values[0] + b * values[1] + h * values[2] + slot * values[3]
    else:
        page = tl.load(tables[0] + b * tables[1] + slot // PAGE, mask=live, other=-1).to(tl.int64)
        live = live & (page >= 0)
        to_key = keys[0] + page * keys[1] + h * keys[2] + slot % PAGE * keys[3]
        to_value = values[0] + page * values[1] + h * values[2] + slot % PAGE * values[3]
    at = new_keys[0] + b * new_keys[1] + h * new_keys[2] + token * new_keys[3]
    mask = live[:, None] & (dims < DIM)[None, :]
    if turn is None:
        key = tl.load(at[:, None] + dims[None, :], mask=mask, other=0.0)
    else:
        table_at = b * turn[0][0] + h * turn[0][1] + token * turn[0][2]
        key = _turned(at, live, dims, turn[1], table_at, DIM, HALF, INTERLEAVED)
    tl.store(to_key[:, None] + dims[None, :], key, mask=mask)
    at = new_values[0] + b * new_values[1] + h * new_values[2] + token * new_values[3]
    mask = live[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(to_value[:, None] + value_dims[None, :], tl.load(at[:, None] + value_dims[None, :], mask=mask, other=0.0), mask=mask)


def block_size(dim: int, value_dim: int, turned: bool) -> int:
    """So many slots at a time that registers hardly spill and shared memory suffices, as compiled for sm_80 and sm_90.

    One case does not fit an sm_80: float32 keys of 256 dimensions that are turned and scored with two queries (176 KB of 163 KB).

    Args:
        dim: Of keys.
        value_dim: Of values.
        turned: Whether keys are turned on the way.
    """
    return min(64, max(16, (2048 if turned else 4096) // padded(max(dim, value_dim))))


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    slots: int,
    scaling: float,
    options: Options,
    *,
    splits: int | None = None,
    block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`slot_attention`, or with `tables` `paged_attention`. Arguments are theirs, checked.

    Args:
        query: Query.
        keys: Keys or their pages.
        values: Values or their pages.
        tables: The pages of each row, or None.
        slots: How many a row has.
        scaling: Of the scores.
        options: As given by name.
        splits: How many programs share the slots of a row and KV head; None: enough to fill the GPU.
        block: Slots that a program takes at a time, a power of two from 16 on; None: what fits into registers.
    """
    valid, far, far_query, turn, softcap, want_weights = options
    batch, heads, _, dim = query.shape
    kv_heads, value_dim = keys.shape[1], values.shape[3]
    group, rows = heads // kv_heads, batch * kv_heads
    shape = (batch, kv_heads, slots)
    block = block or block_size(dim, value_dim, turn is not None)
    chunk, splits = portions(slots, block, rows, splits, query.device)
    output = query.new_empty(batch, 1, heads, value_dim)
    weights, raw = (query.new_empty(size, dtype=torch.float32) if want_weights else None for size in (shape, (batch * heads, slots)))
    parts, stats = (query.new_empty(rows * splits * group * n, dtype=torch.float32) if splits > 1 else None for n in (value_dim, 2))
    sizes = {"GROUP": group, "HEADS": 1 if group == 1 else padded(group), "VALUE_DIM": value_dim, "VALUE_PAD": padded(value_dim)}
    sizes |= {"SPLITS": splits, "BLOCK": block}
    attend_kernel[(rows, splits)](
        query.contiguous(),
        None if far_query is None else far_query.contiguous(),
        strided(keys),
        strided(values),
        None if tables is None else (tables.contiguous(), tables.shape[1]),
        None if valid is None else strided(valid, shape),
        strided(far, shape) if isinstance(far, torch.Tensor) else None if far is None else (far,),
        None if turn is None else (strided(turn.positions, shape), (turn.cos.contiguous(), turn.sin.contiguous())),
        *(output, parts, stats, raw, weights),
        *(scaling, softcap, slots, chunk),
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_PAD=padded(dim),
        HALF=0 if turn is None else turn.cos.shape[-1],
        INTERLEAVED=turn is not None and turn.layout == "interleaved",
        PAGE=0 if tables is None else keys.shape[2],
        num_stages=2,
        **sizes,
    )
    if splits > 1:
        combine_kernel[(rows,)](parts, stats, raw, output, weights, slots, **sizes)
    return output, weights


def write(
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    slots: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    turn: WriteTurn | None,
) -> None:
    """`write_slots`, or with `tables` `write_pages`. Arguments are theirs, checked."""
    batch, kv_heads, tokens, dim = new_keys.shape
    value_dim = new_values.shape[3]
    if tokens == 0:
        return
    rotation = None
    if turn is not None:
        cos, sin = (table.contiguous().expand(batch, kv_heads, tokens, -1) for table in turn[:2])
        rotation = (cos.stride()[:3], (cos, sin))
    new_keys, new_values = (new if new.stride(3) == 1 else new.contiguous() for new in (new_keys, new_values))
    block = min(16, triton.next_power_of_2(tokens))
    write_kernel[(batch * kv_heads, triton.cdiv(tokens, block))](
        strided(keys),
        strided(values),
        None if tables is None else (tables.contiguous(), tables.shape[1]),
        strided(slots, (batch, kv_heads, tokens)),
        strided(new_keys),
        strided(new_values),
        rotation,
        tokens,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_PAD=padded(dim),
        VALUE_DIM=value_dim,
        VALUE_PAD=padded(value_dim),
        HALF=0 if turn is None else turn[0].shape[-1],
        INTERLEAVED=turn is not None and turn[2] == "interleaved",
        PAGE=0 if tables is None else keys.shape[2],
        BLOCK=block,
    )

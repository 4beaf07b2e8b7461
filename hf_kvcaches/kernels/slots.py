"""Attention over slots that hold their tokens in any order, and writing tokens into them, in one buffer a row or in shared pages.

Softmax does not care for order, so a cache that drops tokens can put a new one wherever one left, and nothing has to move.

Each function has a `backend`: `"torch"` (fast on CPUs, has gradients, can be compiled), `"triton"` (one pass over keys and values; CUDA,
no gradients), `"reference"` (loops in float64 that are easy to read), or `"auto"`: Triton for CUDA tensors where it can, else torch.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from hf_kvcaches.kernels._shared import Backend, choose, turned
from hf_kvcaches.kernels._slots_checks import Options, Turn, WriteTurn, check_attention, check_write

__all__ = [
    "Turn",
    "paged_attention",
    "paged_attention_reference",
    "slot_attention",
    "slot_attention_reference",
    "write_pages",
    "write_pages_reference",
    "write_slots",
    "write_slots_reference",
]

Attended = tuple[torch.Tensor, torch.Tensor | None]


def slot_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    *,
    valid: torch.Tensor | None = None,
    far: int | torch.Tensor | None = None,
    far_query: torch.Tensor | None = None,
    turn: Turn | None = None,
    softcap: float | None = None,
    want_weights: bool = False,
    backend: Backend = "auto",
    check: bool = True,
) -> Attended:
    """Attention of one query token a row over slots in any order.

    Invalid slots take no part. Their values must be finite numbers (buffers begin as zeros) for the torch back-end, which multiplies
    them by zero; their keys may hold anything.

    Args:
        query: (batch, heads, 1, head_dim); consecutive heads share a key head.
        keys: (batch, kv_heads, slots, head_dim), the last dimension contiguous.
        values: (batch, kv_heads, slots, value_dim), likewise.
        scaling: Of the scores.
        valid: True for slots that take part, (batch or 1, kv_heads or 1, slots); None for all. A row without any gives zeros.
        far: Slots whose keys live in another frame: the first so many, or a mask shaped like `valid`.
        far_query: The same query turned into the frame of the far slots; comes with `far`.
        turn: For keys that are stored unrotated: the rotation to apply on the way.
        softcap: If given, scores are softcap * tanh(scores * scaling / softcap).
        want_weights: Whether the weights are wanted as well.
        backend: See the module.
        check: Whether to look at the arguments first, which takes as long as a small product. Not for tensors that fit by construction.

    Returns:
        The output, (batch, 1, heads, value_dim), and None or float32 weights, (batch, kv_heads, slots): mean over the heads of a group.
    """
    options = Options(valid, far, far_query, turn, softcap, want_weights)
    if check:
        check_attention(query, keys, values, None, options)
    backend = choose(backend, query, keys, values)
    if backend == "torch":
        return _attention_torch(query, keys, values, scaling, options)
    if backend == "reference":
        return slot_attention_reference(query, keys, values, scaling, **options._asdict())
    from hf_kvcaches.kernels import _slots_triton

    return _slots_triton.attend(query, keys, values, None, keys.shape[2], scaling, options)


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tables: torch.Tensor,
    scaling: float,
    *,
    valid: torch.Tensor,
    far: int | torch.Tensor | None = None,
    far_query: torch.Tensor | None = None,
    turn: Turn | None = None,
    softcap: float | None = None,
    want_weights: bool = False,
    backend: Backend = "auto",
) -> Attended:
    """`slot_attention` where slot s of row b lies in `key_pages[tables[b, s // page], :, s % page]`.

    Invalid slots may hold anything, also what is not a number.

    Args:
        query: (batch, heads, 1, head_dim); consecutive heads share a key head.
        key_pages: (pages, kv_heads, page, head_dim), the last dimension contiguous.
        value_pages: (pages, kv_heads, page, value_dim), likewise.
        tables: The pages of each row, (batch, blocks), int32 or int64; -1 where a row has none, whose slots must be invalid.
        scaling: Of the scores.
        valid: As for `slot_attention`. It also says how many slots there are: at most blocks * page.
        far: As for `slot_attention`.
        far_query: Likewise.
        turn: Likewise.
        softcap: Likewise.
        want_weights: Likewise.
        backend: See the module.

    Returns:
        As `slot_attention`.
    """
    options = Options(valid, far, far_query, turn, softcap, want_weights)
    slots = check_attention(query, key_pages, value_pages, tables, options)
    backend = choose(backend, query, key_pages, value_pages)
    if backend == "reference":
        return paged_attention_reference(query, key_pages, value_pages, tables, scaling, **options._asdict())
    if backend == "torch":
        keys, values = (_unpaged(pages, tables)[:, :, :slots] for pages in (key_pages, value_pages))
        values = values.masked_fill_(~valid.unsqueeze(-1), 0)  # our own copy
        return _attention_torch(query, keys, values, scaling, options)
    from hf_kvcaches.kernels import _slots_triton

    return _slots_triton.attend(query, key_pages, value_pages, tables, slots, scaling, options)


def write_slots(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    *,
    turn: WriteTurn | None = None,
    backend: Backend = "auto",
) -> None:
    """Puts new tokens into slots, in place: `keys[b, h, slots[b, h, j]] = new_keys[b, h, j]`, and values likewise.

    Args:
        keys: (batch, kv_heads, slots, head_dim), the last dimension contiguous.
        values: (batch, kv_heads, slots, value_dim), likewise.
        slots: (batch or 1, kv_heads or 1, tokens), int64, from 0 on, no slot of a row and head twice.
        new_keys: (batch, kv_heads, tokens, head_dim).
        new_values: (batch, kv_heads, tokens, value_dim).
        turn: Rotates the new keys while they are written: cos and sin, (batch or 1, kv_heads or 1, tokens, rotary_dim / 2), and the layout.
        backend: See the module.
    """
    check_write(keys, values, None, slots, new_keys, new_values, turn)
    backend = choose(backend, keys, values, new_keys)
    if backend == "triton":
        from hf_kvcaches.kernels import _slots_triton

        return _slots_triton.write(keys, values, None, slots, new_keys, new_values, turn)
    if backend == "reference":
        return write_slots_reference(keys, values, slots, new_keys, new_values, turn=turn)
    if turn is not None:
        new_keys = turned(new_keys, *turn)
    batch, heads, tokens = new_keys.shape[:3]
    if slots.shape[:2] == (1, 1):  # Half the time of the general way.
        keys.index_copy_(2, slots.view(tokens), new_keys)
        values.index_copy_(2, slots.view(tokens), new_values)
        return None
    # Not scatter_, which takes a thousand times as long in bfloat16.
    at = (_count(batch, slots).view(-1, 1, 1), _count(heads, slots).view(-1, 1), slots)
    keys.index_put_(at, new_keys)
    values.index_put_(at, new_values)
    return None


def write_pages(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    *,
    turn: WriteTurn | None = None,
    backend: Backend = "auto",
) -> None:
    """`write_slots` through block tables, as in `paged_attention`. A slot of -1 takes no token, nor does one whose page is -1.

    Args:
        key_pages: (pages, kv_heads, page, head_dim), the last dimension contiguous.
        value_pages: (pages, kv_heads, page, value_dim), likewise.
        tables: (batch, blocks), int32 or int64. No page that is written to may belong to two rows.
        slots: (batch or 1, kv_heads or 1, tokens), int64, or -1.
        new_keys: (batch, kv_heads, tokens, head_dim).
        new_values: (batch, kv_heads, tokens, value_dim).
        turn: As for `write_slots`.
        backend: See the module.
    """
    check_write(key_pages, value_pages, tables, slots, new_keys, new_values, turn)
    backend = choose(backend, key_pages, value_pages, new_keys)
    if backend == "triton":
        from hf_kvcaches.kernels import _slots_triton

        return _slots_triton.write(key_pages, value_pages, tables, slots, new_keys, new_values, turn)
    if backend == "reference":
        return write_pages_reference(key_pages, value_pages, tables, slots, new_keys, new_values, turn=turn)
    if turn is not None:
        new_keys = turned(new_keys, *turn)
    slots = slots.expand(new_keys.shape[:3])
    size = key_pages.shape[2]
    blocks = slots.clamp(min=0) // size
    page = tables[_count(len(tables), slots).view(-1, 1, 1), blocks].long()
    head = _count(slots.shape[1], slots).view(1, -1, 1).expand_as(slots)
    live = ((slots >= 0) & (page >= 0)).flatten()
    # A token without a place is written where the first with one goes, as that one; if there is none, all are written as what stands
    # there already. So every shape is known beforehand, and nothing waits for a number.
    places = torch.arange(live.numel(), device=live.device)
    chosen = torch.where(live, places, live.long().argmax())
    at = tuple(index.reshape(-1)[chosen] for index in (page.clamp(min=0), head, slots.clamp(min=0) % size))
    for pages, new in ((key_pages, new_keys), (value_pages, new_values)):
        pages.index_put_(at, torch.where(live.any(), new.reshape(-1, new.shape[-1])[chosen], pages[at]))
    return None


def _attention_torch(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, options: Options) -> Attended:
    valid, far, far_query, turn, softcap, want_weights = options
    batch, kv_heads, slots, dim = keys.shape
    heads = query.shape[1]
    shared = heads // kv_heads
    if turn is not None:
        keys = turned(keys, turn.cos[turn.positions], turn.sin[turn.positions], turn.layout)
    # A step of a small model is made of operations that do next to nothing: what is not needed for sure is asked for first.
    across = keys.flatten(0, 1).transpose(1, 2)
    near = query.reshape(batch * kv_heads, shared, dim)
    away = None if far_query is None else far_query.reshape(batch * kv_heads, shared, dim)
    if isinstance(far, torch.Tensor):
        assert away is not None
        # Both queries read the keys at once.
        both = _scores(torch.cat([near, away], 1), across, scaling).view(batch, kv_heads, 2 * shared, slots)
        scores = torch.where(far.unsqueeze(2), both[:, :, shared:], both[:, :, :shared]).flatten(0, 1)
    elif far is not None and 8 * far > slots:
        assert away is not None
        parts = _scores(away, across.narrow(2, 0, far), scaling), _scores(near, across.narrow(2, far, slots - far), scaling)
        scores = torch.cat(parts, 2)
    else:
        scores = _scores(near, across, scaling)
        if far:  # so few that scoring them twice is cheaper than putting two parts together
            assert away is not None
            scores.narrow(2, 0, far).copy_(_scores(away, across.narrow(2, 0, far), scaling))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    exact = torch.float32 if want_weights and scores.dtype.itemsize < 4 else None
    if valid is None:
        weights = scores.softmax(-1, dtype=exact)
    else:
        # A finite number, and zeros afterwards: a row without any valid slot gives zeros, and its gradient too.
        hidden = ~valid.unsqueeze(2)
        seen = scores.view(batch, kv_heads, shared, slots).masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = seen.softmax(-1, dtype=exact).masked_fill(hidden, 0).flatten(0, 1)
    output = torch.bmm(weights if exact is None else weights.to(values.dtype), values.flatten(0, 1))
    output = output.view(batch, 1, heads, values.shape[-1])
    if not want_weights:
        return output, None
    weights = (weights if shared == 1 else weights.mean(1)).view(batch, kv_heads, slots)
    return output, weights.float()


def _scores(query: torch.Tensor, across: torch.Tensor, scaling: float) -> torch.Tensor:
    """scaling * query @ across, scaled within the product: one operation, and nothing is rounded twice."""
    return torch.baddbmm(query.narrow(2, 0, 1), query, across, beta=0, alpha=scaling)


def _count(size: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(size, device=like.device)


def _unpaged(pages: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """The pages of each row one behind the other in a new tensor, (batch, kv_heads, blocks * page, dim)."""
    count, kv_heads, size, dim = pages.shape
    rows, blocks = tables.shape
    picked = tables.long().clamp(min=0).unsqueeze(1)
    heads = _count(kv_heads, tables).view(-1, 1)
    if pages.is_contiguous():  # Two to three times as fast as the general way.
        gathered = pages.view(count * kv_heads, size * dim).index_select(0, (picked * kv_heads + heads).flatten())
    else:
        gathered = pages[picked, heads]
    return gathered.view(rows, kv_heads, blocks * size, dim)


def slot_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    **options: Any,
) -> Attended:
    """What `slot_attention` computes, written down plainly. Arguments and result are the same."""
    valid, far, far_query, turn, softcap, want_weights = Options(**options)
    batch, kv_heads, slots, _ = keys.shape
    heads = query.shape[1]
    shape = (batch, kv_heads, slots)
    shown = torch.ones(shape, dtype=torch.bool) if valid is None else valid.expand(shape)
    away = far.expand(shape) if isinstance(far, torch.Tensor) else (torch.arange(slots) < (far or 0)).expand(shape)
    output = torch.zeros(batch, 1, heads, values.shape[-1], dtype=torch.float64, device=query.device)
    weights = torch.zeros(shape, dtype=torch.float64, device=query.device)
    for b, head in product(range(batch), range(heads)):
        h = head // (heads // kv_heads)
        slot_list = [s for s in range(slots) if shown[b, h, s]]
        scores = []
        for s in slot_list:
            key = keys[b, h, s].double()
            if turn is not None:
                position = turn.positions.expand(shape)[b, h, s]
                key = turned(key, turn.cos[position].double(), turn.sin[position].double(), turn.layout)
            asking = far_query if far_query is not None and away[b, h, s] else query
            score = asking[b, head, 0].double() @ key * scaling
            scores.append(score if softcap is None else softcap * torch.tanh(score / softcap))
        if slot_list:
            share = torch.stack(scores).softmax(0)
            output[b, 0, head] = share @ values[b, h, slot_list].double()
            weights[b, h, slot_list] += share / (heads // kv_heads)
    return output.to(query.dtype), weights.float() if want_weights else None


def paged_attention_reference(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tables: torch.Tensor,
    scaling: float,
    *,
    valid: torch.Tensor,
    **options: Any,
) -> Attended:
    """What `paged_attention` computes, written down plainly. Arguments and result are the same."""
    size, (batch, _), slots = key_pages.shape[2], tables.shape, valid.shape[-1]
    flat = []
    for pages in (key_pages, value_pages):
        rows = pages.new_zeros(batch, pages.shape[1], slots, pages.shape[3])
        for b, s in product(range(batch), range(slots)):
            if tables[b, s // size] >= 0:
                rows[b, :, s] = pages[tables[b, s // size], :, s % size]
        flat.append(rows)
    return slot_attention_reference(query, flat[0], flat[1], scaling, valid=valid, **options)


def write_slots_reference(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    *,
    turn: WriteTurn | None = None,
) -> None:
    """What `write_slots` does, written down plainly. Arguments are the same."""
    pages = torch.arange(len(keys)).unsqueeze(1)  # One page a row, as large as the row.
    write_pages_reference(keys, values, pages, slots, new_keys, new_values, turn=turn)


def write_pages_reference(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    *,
    turn: WriteTurn | None = None,
) -> None:
    """What `write_pages` does, written down plainly. Arguments are the same."""
    if turn is not None:
        new_keys = turned(new_keys.double(), turn[0].double(), turn[1].double(), turn[2]).to(new_keys.dtype)
    size = key_pages.shape[2]
    shape = new_keys.shape[:3]
    for b, h, j in product(*map(range, shape)):
        slot = int(slots.expand(shape)[b, h, j])
        if slot >= 0 and tables[b, slot // size] >= 0:
            key_pages[tables[b, slot // size], h, slot % size] = new_keys[b, h, j]
            value_pages[tables[b, slot // size], h, slot % size] = new_values[b, h, j]

"""Scores of a rotated query against coefficients of unrotated keys, for the torch back-end of `coefficients.py`.

**Without rebuilding keys** (bases that change now and then, positions that count up). A score is a sum over pairs i of
cos(w_i p) a_i + sin(w_i p) b_i, where p is the token's position and a, b are rows of a matrix of the query and the basis, times the
token's coefficients. Cosines and sines of most frequencies hardly change within a block of 128 positions: all of them together are sums
of about twenty functions, found by a singular value decomposition, exact to rounding. So what each block needs is a small matrix for
these functions, and the few fast pairs one by one: a third to a half of the operations of rebuilding keys, and nothing wider than the
coefficients is ever written.

**Rebuilding keys** (any positions, any bases) a piece at a time, which stays in cache.

Angles of blocks are taken in float64, and turned further within a block by the sum formulas, so they are as exact at a million as at 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from hf_kvcaches.kernels._coefficients_checks import TILE, Coefficients, Rotation
from hf_kvcaches.kernels._shared import turned

BLOCK = 128
CACHED = 1 << 17  # Numbers worked on at a time: 512 KB, so that a product is still in cache when its sum is taken.
_FINE = 512
_SHORTEST = 64  # Tokens from one change of bases to the next, on average, below which it is faster to rebuild keys.


def units(basis_of: torch.Tensor, tokens: int) -> tuple[torch.Tensor, int]:
    """The widest equal units of tokens within which no basis changes, in any row and head: fewer and larger products.

    Args:
        basis_of: Which basis each tile is in, (batch, kv_heads, tiles).
        tokens: How many there are.

    Returns:
        The basis of each unit, (batch, kv_heads, units), int64, and the width of a unit, TILE times a power of two.
    """
    basis_of, width = basis_of.long(), TILE
    while basis_of.shape[2] > 1:
        even = basis_of.shape[2] // 2 * 2
        if not torch.equal(basis_of[..., 0:even:2], basis_of[..., 1:even:2]):
            break
        basis_of, width = basis_of[..., ::2], 2 * width
    assert (basis_of.shape[2] - 1) * width < tokens
    return basis_of, width


def pieces(tokens: int, width: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Cuts tokens into runs of whole units, and what is left at the end: (first unit, number of units, their width).

    Args:
        tokens: How many there are.
        width: Of a unit.
        most: Tokens in a run, if a unit is not longer.
    """
    whole, at_once = tokens // width, max(1, most // width)
    for first in range(0, whole, at_once):
        yield first, min(at_once, whole - first), width
    if tokens % width:
        yield whole, 1, tokens % width


def turned_logits(
    asking: torch.Tensor,
    keys: Coefficients,
    scaling: float,
    rotation: Rotation,
    valid: torch.Tensor | None,
    basis_of: torch.Tensor | None,
) -> torch.Tensor:
    """Scores without the scales of tiles, (batch, kv_heads, group, tokens), in the dtype of `asking`.

    Args:
        asking: The rotated query, (batch, kv_heads, group, dim).
        keys: Coefficients of unrotated keys.
        scaling: Of the scores.
        rotation: Where keys stand.
        valid: Tokens that take part; the positions of others are not looked at.
        basis_of: As `key_basis_of` of `coefficient_attention`.
    """
    batch, tokens = asking.shape[0], keys.data.shape[2]
    starts = _starts(rotation, batch, tokens, valid)
    if starts is None:
        return _rebuilt(asking, keys, scaling, rotation, basis_of)
    if basis_of is not None:
        runs = spans(basis_of, tokens)
        if runs is None or len(set(starts)) > 1:
            return _rebuilt(asking, keys, scaling, rotation, basis_of)
        parts = [
            _swept(asking, Coefficients(keys.data[:, :, here], picked(keys.decode, own)), scaling, rotation, starts[0] + here.start)
            for here, own in runs
        ]
        return torch.cat(parts, 3)
    if len(set(starts)) == 1:
        return _swept(asking, keys, scaling, rotation, starts[0])
    parts = []
    for row, start in enumerate(starts):
        one = slice(row, row + 1)
        decode = keys.decode[one] if keys.decode.ndim == 5 else keys.decode
        parts.append(_swept(asking[one], Coefficients(keys.data[one], decode), scaling, rotation, start))
    return torch.cat(parts)


def _starts(rotation: Rotation, batch: int, tokens: int, valid: torch.Tensor | None) -> list[int] | None:
    """The position of each row's first token if the others follow one by one, else None."""
    positions, start = rotation.positions, rotation.start
    if positions is None:
        return [start] * batch if isinstance(start, int) else start.tolist()
    ahead = positions - torch.arange(tokens, device=positions.device)
    same = ahead == ahead[:, -1:]  # Padding stands on the left.
    if valid is not None:
        same = same | ~valid.any(1)
    if not same.all():
        return None
    starts: list[int] = ahead[:, -1].tolist()
    return starts * (batch // len(starts))


def spans(basis_of: torch.Tensor, tokens: int) -> list[tuple[slice, torch.Tensor]] | None:
    """Where no basis changes in any row and head: tokens, and which basis each head has there, (batch, kv_heads, 1).

    None where there are so many that other ways are faster.

    Args:
        basis_of: Which basis each tile is in, (batch, kv_heads, tiles).
        tokens: How many there are.
    """
    changes = ((basis_of[:, :, 1:] != basis_of[:, :, :-1]).flatten(0, 1).any(0).nonzero()[:, 0] + 1).tolist()
    if (len(changes) + 1) * _SHORTEST > tokens:
        return None
    begins, ends = [0, *changes], [*(TILE * each for each in changes), tokens]
    return [(slice(TILE * begin, end), basis_of[:, :, begin : begin + 1].long()) for begin, end in zip(begins, ends, strict=True)]


class _Plan(NamedTuple):
    """How the frequencies of a model are treated within a block.

    Args:
        fast: Indices of the pairs that are taken one by one.
        slow: Indices of the pairs that share functions. Index `pairs` is what does not turn at all.
        cos: cos(w j) of the fast pairs, (BLOCK, fast).
        sin: Likewise.
        functions: (BLOCK, functions): cosines and sines of slow pairs around the middle of a block are sums of these.
        mixes: Of which: (functions, 2, slow).
    """

    fast: torch.Tensor
    slow: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    functions: torch.Tensor
    mixes: torch.Tensor


@lru_cache(maxsize=64)
@torch.inference_mode(False)
@torch.no_grad()
def _plan(frequencies: tuple[float, ...], rest: bool) -> _Plan:
    """Chooses how many pairs are fast: as many as make the fewest operations. All in float64."""
    turning = torch.tensor([*frequencies, *([0.0] if rest else [])], dtype=torch.float64)
    order = turning.abs().argsort(descending=True)
    offsets = torch.arange(BLOCK, dtype=torch.float64)
    best: tuple[float, _Plan] | None = None
    for limit in (float("inf"), 0.5, 0.3, 0.1, 0.03):
        fast = order[: int((turning.abs() > limit).sum())]
        slow = order[len(fast) :]
        if not len(slow):
            continue
        angles = (offsets - BLOCK // 2).unsqueeze(1) * turning[slow]
        functions, sizes, mixes = torch.linalg.svd(torch.cat([angles.cos(), angles.sin()], 1), full_matrices=False)
        # No element of what is left out is larger than the root of its squares' sum.
        left_out = sizes.square().flip(0).cumsum(0).flip(0).sqrt()
        count = int((left_out > 1e-7).sum())
        operations = 2 * len(fast) + count + 2 * len(slow) * count / BLOCK
        if best is None or operations < best[0]:
            turns = offsets.unsqueeze(1) * turning[fast]
            mixed = (sizes[:count, None] * mixes[:count]).view(count, 2, -1) / BLOCK**0.5
            best = operations, _Plan(fast, slow, turns.cos(), turns.sin(), functions[:, :count] * BLOCK**0.5, mixed)
    assert best is not None
    return best[1]


@lru_cache(maxsize=128)
@torch.inference_mode(False)
@torch.no_grad()
def _tables(
    frequencies: tuple[float, ...], rest: bool, start: int, blocks: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What depends on positions only, and so is the same in all layers and for the next 128 tokens.

    Returns:
        Cosines and sines of fast pairs, (blocks * BLOCK, 2 * fast); the mixes turned to each block, (blocks * functions, 2 * slow); and
        the functions, (BLOCK, functions).
    """
    plan = _plan(frequencies, rest)
    turning = torch.tensor([*frequencies, *([0.0] if rest else [])], dtype=torch.float64)
    first = start + BLOCK * torch.arange(blocks, dtype=torch.float64).unsqueeze(1)
    base = first * turning[plan.fast]
    cos, sin = base.cos().unsqueeze(1), base.sin().unsqueeze(1)
    fast = torch.cat([cos * plan.cos - sin * plan.sin, sin * plan.cos + cos * plan.sin], -1).flatten(0, 1)
    middle = (first + BLOCK // 2) * turning[plan.slow]
    cos, sin = middle.cos().unsqueeze(1), middle.sin().unsqueeze(1)
    of_cos, of_sin = plan.mixes.unbind(1)
    slow = torch.cat([of_cos * cos - of_sin * sin, of_cos * sin + of_sin * cos], -1).flatten(0, 1)
    return fast.to(device, dtype), slow.to(device, dtype), plan.functions.to(device, dtype)


def _halves(x: torch.Tensor, pairs: int, layout: str, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second dimensions of all pairs along `dim`, which is counted from the end: -1 or -2."""
    part = x.narrow(dim, 0, 2 * pairs)
    if layout == "half":
        return part.narrow(dim, 0, pairs), part.narrow(dim, pairs, pairs)
    both = part.unflatten(dim, (pairs, 2))
    return both.select(dim, 0), both.select(dim, 1)


def _swept(asking: torch.Tensor, keys: Coefficients, scaling: float, rotation: Rotation, start: int) -> torch.Tensor:
    """`turned_logits` for tokens at start, start + 1, ..., with one basis a head, without rebuilding keys."""
    batch, kv_heads, group, dim = asking.shape
    tokens, rank = keys.data.shape[2:]
    data = keys.data.flatten(0, 1)
    blocks = -(-tokens // BLOCK)
    frequencies = tuple(rotation.inv_freq.tolist())
    rest = 2 * len(frequencies) < dim
    fast_at, slow_at, functions = _tables(frequencies, rest, start, blocks, asking.dtype, asking.device)
    fast, slow = _asked(asking, keys.decode, scaling, rotation)
    count, ones = functions.shape[1], asking.new_ones(rank)
    logits = asking.new_empty(batch * kv_heads, group, tokens)
    run = max(1, min(blocks, CACHED // (rank * group * BLOCK)))
    heads = max(1, CACHED // (rank * group * BLOCK * run))
    for head in range(0, batch * kv_heads, heads):
        mine = slice(head, head + heads)
        of_fast, of_slow = fast[mine].flatten(0, 1), slow[mine].flatten(0, 1)
        asked = len(of_fast)
        for block in range(0, blocks, run):
            now = min(run, blocks - block)
            at = fast_at[block * BLOCK : (block + now) * BLOCK]
            rows = torch.bmm(at.expand(asked, *at.shape), of_fast)
            at = slow_at[block * count : (block + now) * count]
            mixed = torch.bmm(at.expand(asked, *at.shape), of_slow).view(asked * now, count, rank)
            rows.view(asked * now, BLOCK, rank).baddbmm_(functions.expand(asked * now, *functions.shape), mixed)
            here = slice(block * BLOCK, min(tokens, (block + now) * BLOCK))
            part = data[mine, here].to(asking.dtype)
            # rows are the query in coefficients, turned to each token.
            rows = rows.view(-1, group, now * BLOCK, rank)[:, :, : part.shape[1]].mul_(part.unsqueeze(1))
            logits[mine, :, here] = torch.matmul(rows, ones)  # Much faster than a sum over so few numbers.
    return logits.view(batch, kv_heads, group, tokens)


def _asked(asking: torch.Tensor, decode: torch.Tensor, scaling: float, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """What cosines and sines are multiplied with, a row for each: of fast and of slow pairs, (batch * kv_heads, group, 2 * pairs, rank)."""
    frequencies, layout = tuple(rotation.inv_freq.tolist()), rotation.layout
    pairs, rest = len(frequencies), 2 * len(frequencies) < asking.shape[-1]
    plan = _plan(frequencies, rest)
    basis = (decode.squeeze(2) if decode.ndim == 5 else decode).to(asking.dtype)
    asking = asking * scaling
    one, two = (half.unsqueeze(-1) for half in _halves(asking * rotation.attention_scaling, pairs, layout, -1))
    # (kv_heads, 1, pairs, rank), before it a batch in a bank
    first, second = (half.unsqueeze(-3) for half in _halves(basis, pairs, layout, -2))
    of_cos, of_sin = one * first + two * second, two * first - one * second
    if rest:
        still = torch.matmul(asking[..., 2 * pairs :], basis[..., 2 * pairs :, :]).unsqueeze(-2)
        of_cos, of_sin = torch.cat([of_cos, still], -2), torch.cat([of_sin, torch.zeros_like(still)], -2)
    parts = []
    for chosen in (plan.fast.to(asking.device), plan.slow.to(asking.device)):
        parts.append(torch.cat([of_cos.index_select(3, chosen), of_sin.index_select(3, chosen)], 3).flatten(0, 1))
    return parts[0], parts[1]


def _rebuilt(asking: torch.Tensor, keys: Coefficients, scaling: float, rotation: Rotation, basis_of: torch.Tensor | None) -> torch.Tensor:
    """`turned_logits` for any positions and any bases."""
    batch, kv_heads, _, dim = asking.shape
    tokens = keys.data.shape[2]
    decode = keys.decode.to(asking.dtype).transpose(-1, -2)
    index, width = (None, TILE) if basis_of is None else units(basis_of, tokens)
    turn = Angles(rotation, tokens, asking.dtype, asking.device)
    flat = asking.flatten(0, 1)
    parts = []
    for unit, count, wide in pieces(tokens, width, max(TILE, 2 * CACHED // (batch * kv_heads * dim))):
        here = slice(unit * width, unit * width + count * wide)
        block = keys.data[:, :, here].to(asking.dtype)
        if index is None:
            rebuilt = torch.matmul(block, decode if decode.ndim == 3 else decode.squeeze(2))
        else:
            rebuilt = torch.matmul(block.unflatten(2, (count, wide)), picked(decode, index[:, :, unit : unit + count])).flatten(2, 3)
        rebuilt = turned(rebuilt, *turn(here), rotation.layout)
        across = rebuilt.flatten(0, 1).transpose(1, 2)
        parts.append(torch.baddbmm(flat.narrow(2, 0, 1), flat, across, beta=0, alpha=scaling))
    return torch.cat(parts, 2).view(batch, kv_heads, -1, tokens)


def picked(bank: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """bank[b, h, index[b, h, u]] for each unit u: (batch, kv_heads, units, ...) from (batch, kv_heads, bases, ...)."""
    batch, kv_heads = index.shape[:2]
    rows = torch.arange(batch, device=index.device).view(-1, 1, 1)
    return bank[rows, torch.arange(kv_heads, device=index.device).view(-1, 1), index]


class Angles:
    """Cosines and sines of any positions: those of multiples of 512 are turned further by the rest.

    Args:
        rotation: The positions. What is none, at invalid tokens, counts as 0.
        tokens: How many there are.
        dtype: Of the results.
        device: Likewise.
    """

    def __init__(self, rotation: Rotation, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        if rotation.positions is not None:
            self.positions = rotation.positions.long().clamp(min=0)
        else:
            start = rotation.start if isinstance(rotation.start, int) else rotation.start.long().view(-1, 1)
            self.positions = (start + torch.arange(tokens, device=device)).view(-1, tokens)
        turning, scaling = rotation.inv_freq.to(device), rotation.attention_scaling
        highest = int(self.positions.max()) // _FINE if tokens else 0
        coarse = torch.arange(highest + 1, dtype=torch.float64, device=device).unsqueeze(1) * (turning * _FINE)
        fine = torch.arange(_FINE, dtype=torch.float64, device=device).unsqueeze(1) * turning
        self.coarse = [(table * scaling).to(dtype) for table in (coarse.cos(), coarse.sin())]
        self.fine = [table.to(dtype) for table in (fine.cos(), fine.sin())]

    def __call__(self, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Of some tokens: (batch or 1, 1, tokens, pairs) each."""
        positions = self.positions[:, None, here]
        base, offset = positions // _FINE, positions % _FINE
        cos, sin, further_cos, further_sin = (table[at] for at, tables in ((base, self.coarse), (offset, self.fine)) for table in tables)
        return cos * further_cos - sin * further_sin, sin * further_cos + cos * further_sin

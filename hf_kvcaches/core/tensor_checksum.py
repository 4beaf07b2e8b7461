"""Exact checksums of tensors, computed where the tensors are.

A tensor's bytes are read as 64-bit integers and added up modulo 2^64 in two ways: those 2,048 apart, some 256 of them to a sum, and those
2,039 apart, some 225 to a sum. From the sums of each way, mixed and weighted by position, follows one number of 64 bits. Additions are the
same on every device and in every order, and as fast as memory. A tensor that differs in one integer never has the same checksum, because
one sum of each way differs. Two integers that differ are never together in a sum of both ways, so a sum differs there too, and in general
wherever differences don't cancel in every sum of both ways. Where sums differ, the checksum is the same with a probability below 2^-32,
which is enough against accidents and nothing against intent.
"""

from __future__ import annotations

import collections
import functools
import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The two ways to add up a tensor's integers: how far apart are those of a sum, and how many are added in each of two steps. The distances
# have no common factor, so that no two integers share a sum of both ways; sums of the second way have an odd number of terms, so that sign
# bits that change everywhere don't cancel. Torch adds up to 16 rows at a time twice as fast as more.
_STRIDES = ((2048, 16), (2039, 15))
# What is added up at a time: on a GPU, blocks of integers; on a CPU, groups of rows, a megabyte of them.
_BLOCKS, _GROUPS = 256, 4
_Words = np.ndarray[Any, np.dtype[np.uint64]]


def checksum(value: Tensor) -> Tensor:
    """A number for each way to add up a dense tensor's bytes, (2,) int64, on its device."""
    words = _words(value.detach())
    return checksum_on_cpu(words) if words.device.type == "cpu" else checksum_anywhere(words)


def checksum_anywhere(words: Tensor) -> Tensor:
    """The checksum of 64-bit integers, (2,) int64, in few calls of PyTorch with much work each."""
    return torch.stack([_digest(_sums(words, stride, rows)) for stride, rows in _STRIDES])


def checksum_on_cpu(words: Tensor) -> Tensor:
    """The same in one pass through memory, and with NumPy for what is small, whose calls take a fifth of the time."""
    tables: tuple[list[_Words], ...] = tuple([] for _ in _STRIDES)
    ways = (_add_up(words, stride, rows, sums) for (stride, rows), sums in zip(_STRIDES, tables, strict=True))
    # The way that has come less far goes on, so that one finds in the processor's cache what the other has just read.
    collections.deque(heapq.merge(*ways), maxlen=0)
    digests = []
    for (stride, _), sums in zip(_STRIDES, tables, strict=True):
        columns, by_row = _weights_on_cpu(0, stride), _weights_on_cpu(stride, 1 << max(8, len(sums).bit_length()))
        rows = np.array([np.dot(_mixed_on_cpu(row), columns[: len(row)]) for row in sums], np.uint64)
        digests.append(np.dot(rows, by_row[: len(rows)]))
    return torch.from_numpy(np.array(digests, np.uint64).view(np.int64))


def _add_up(words: Tensor, stride: int, rows: int, sums: list[_Words]) -> Iterator[int]:
    """Appends rows of sums as `_sums` makes them, the last one perhaps shorter, and tells how far it has come."""
    in_numpy = words.numpy().view(np.uint64)
    length = len(in_numpy) // stride
    whole = length * stride
    table, made = words[:whole].view(length, stride), np.empty((min(rows, length // rows), stride), np.uint64)
    buffer = torch.from_numpy(made.view(np.int64))
    for first in range(0, length, rows * rows):
        count, left = divmod(min(rows * rows, length - first), rows)
        groups = table[first : first + count * rows].view(count, rows, stride)
        for start in range(0, count, _GROUPS):
            stop = min(start + _GROUPS, count)
            torch.sum(groups[start:stop], 1, out=buffer[start:stop])
            yield (first + start * rows) * stride
        sums.append(np.add.reduce(made[:count], 0))
        if left:
            sums[-1] += np.add.reduce(in_numpy[whole - left * stride : whole].reshape(left, stride), 0)
    if whole < len(in_numpy):
        sums.append(in_numpy[whole:])


def _mixed_on_cpu(sums: _Words) -> _Words:
    """`_mixed` of integers without a sign."""
    mixed = sums >> np.uint64(32)
    mixed ^= sums
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return mixed


@functools.cache
def _weights_on_cpu(start: int, count: int) -> _Words:
    made: _Words = weights(torch.device("cpu"), start, count).numpy().view(np.uint64)
    return made


def _sums(words: Tensor, stride: int, rows: int) -> Tensor:
    """Sums of integers that are `stride` apart, up to `rows` squared of them in each: (sums / stride, stride)."""
    whole = len(words) // stride * stride
    table, square = words[:whole].view(-1, stride), rows * rows
    full = len(table) // square * square
    blocks = table[:full].split(square * _BLOCKS)
    sums = [block.view(-1, rows, rows, stride).sum(2).sum(1) for block in blocks if len(block)]
    if full < len(table):
        rest = table[full:]
        count = len(rest) // rows * rows
        sums.append((rest[:count].view(-1, rows, stride).sum(1).sum(0) + rest[count:].sum(0))[None])
    if whole < len(words) or not sums:  # an empty tensor has a sum, too
        sums.append(torch.nn.functional.pad(words[whole:], (0, stride - len(words) + whole))[None])
    return torch.cat(sums)


def _digest(sums: Tensor) -> Tensor:
    """One integer, which a change of one sum always changes."""
    rows, columns = sums.shape
    # The count of weights is rounded up, so that few of them are kept.
    by_row = weights(sums.device, columns, 1 << max(8, rows.bit_length()))[:rows]
    return ((_mixed(sums) * weights(sums.device, 0, columns)).sum(1) * by_row).sum()


def _mixed(sums: Tensor) -> Tensor:
    """Other integers for other sums. High bits are brought down: modulo 2^64, a product knows little of them."""
    mixed = (sums ^ ((sums >> 32) & 0xFFFFFFFF)) * -7046029254386353131
    return mixed ^ ((mixed >> 29) & ((1 << 35) - 1))


def _words(value: Tensor) -> Tensor:
    """A tensor's bytes as integers, filled up with zeros; a copy only where they can't be read in place."""
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    flat = value.resolve_neg().contiguous().view(-1)
    size = flat.element_size()
    if len(flat) * size % 8:
        flat = torch.nn.functional.pad(flat.view(torch.uint8), (0, -len(flat) * size % 8))
    elif flat.storage_offset() * size % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


@functools.cache
def weights(device: torch.device, start: int, count: int) -> Tensor:
    """An odd integer for each number, as good as random, by the finalizer of splitmix64. Products wrap alike on every device."""
    mixed = torch.arange(start, start + count, device=device) * -7046029254386353131  # 0x9E3779B97F4A7C15
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        # The shift is to bring in zeros from the left.
        mixed = (mixed ^ (mixed >> shift) & ((1 << (64 - shift)) - 1)) * factor
    return mixed | 1

"""The arguments that kernels and their wrappers share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hf_kvcaches.kernels.rotation import Layout

# The output, and the weights if they were asked for.
Attended = tuple[Tensor, Tensor | None]


class RotationTables(NamedTuple):
    """Rotary positions for keys that are stored without any.

    Args:
        positions: Row of the tables for each slot, (batch or 1, kv_heads or 1, slots), integers; an invalid slot may have -1.
        cos: (rows, rotary_dim / 2), with the model's `attention_scaling`, if it has one; and `sin`. Further dimensions pass unchanged.
        layout: Which dimensions form a pair, as in `rotate_`.
        full: The same tables for each dimension, cosines before signed sines, (rows, 2 * rotary_dim): fewer operations for the torch
            back-end. None: made of `cos` and `sin`.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor
    layout: Layout = "half"
    full: Tensor | None = None


class Packed(NamedTuple):
    """Tokens of several layers as `kernels.quantization` has them or plainly, the last dimension of each tensor contiguous.

    Args:
        data: (layers, heads, tokens, width): int8, uint8 with two levels to a byte, or floating point: the numbers themselves.
        scale: (layers, heads, tokens, groups); None for plain data. And `zero`.
        group: Consecutive channels that share a scale; the last group may be shorter. None: all.
    """

    data: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    group: int | None = None


class Decoder(NamedTuple):
    """The linear map to C numbers a token: [keys of head 0, keys of head 1, ..., values of head 0, ...].

    Args:
        side: (d, C), floating point; None where nothing but codes is given.
        codes: (rank, C), floating point; None where there are no codes.
        bias: (C,), floating point, or None.
    """

    side: Tensor | None = None
    codes: Tensor | None = None
    bias: Tensor | None = None


class RowSpan(NamedTuple):
    """Consecutive tokens and the consecutive slots of a row that they go to."""

    row: int
    first: int
    tokens: int

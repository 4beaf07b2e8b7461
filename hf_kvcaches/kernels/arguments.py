"""The arguments that kernels and their wrappers share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_kvcaches.kernels.rotation import Layout

# The output, and the weights if they were asked for.
Attended = tuple[torch.Tensor, torch.Tensor | None]


class RotationTables(NamedTuple):
    """Rotary positions for keys that are stored without any.

    Args:
        positions: Row of the tables for each slot, (batch or 1, kv_heads or 1, slots), integers; an invalid slot may have -1.
        cos: (rows, rotary_dim / 2), with the model's `attention_scaling`, if it has one. Dimensions from rotary_dim on pass unchanged.
        sin: Like `cos`.
        layout: Which dimensions form a pair: `"half"`: i and i + rotary_dim / 2; `"interleaved"`: 2i and 2i + 1.
        full: The same tables for each dimension, cosines before signed sines, (rows, 2 * rotary_dim): fewer operations for the torch
            back-end. None: made of `cos` and `sin`.
    """

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    layout: Layout = "half"
    full: torch.Tensor | None = None


class SlotOptions(NamedTuple):
    """What `slot_attention` may be given by name, which is described there."""

    valid: torch.Tensor | None = None
    rotation: RotationTables | None = None
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None
    want_weights: bool = False


class Packed(NamedTuple):
    """Tokens of several layers as they are stored, the last dimension of each tensor contiguous.

    The number of level n is `n * scale + zero`, as in `kernels.quantization`.

    Args:
        data: (layers, heads, tokens, width). int8: level - 127, width = dim. uint8: levels of 4 bits, two to a byte, the first in the low
            half, width = ceil(dim / 2). Floating point: the numbers themselves, width = dim.
        scale: (layers, heads, tokens, groups), floating point; None for plain data.
        zero: Like `scale`.
        group: Consecutive channels that share a scale; the last group may be shorter. None: all.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    group: int | None = None


class Decoder(NamedTuple):
    """The linear map to C numbers a token: [keys of head 0, keys of head 1, ..., values of head 0, ...].

    Args:
        side: (d, C), floating point; None where nothing but codes is given.
        codes: (rank, C), floating point; None where there are no codes.
        bias: (C,), floating point, or None.
    """

    side: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class RowSpan(NamedTuple):
    """Consecutive tokens and the consecutive slots of a row that they go to."""

    row: int
    first: int
    tokens: int

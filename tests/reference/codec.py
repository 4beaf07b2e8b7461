"""What a `KVCodec` does to vectors, written down plainly: in float64, one head and one direction at a time."""

from __future__ import annotations

import torch

from hf_kvcaches.codec.sides import CalibratedLayer, CalibratedSide


def codes_of(side: CalibratedSide, vectors: torch.Tensor) -> torch.Tensor:
    """The code of each direction, (batch, kv_heads, tokens, d), int64; 0 where a direction has no bits.

    Args:
        vectors: (batch, kv_heads, tokens, d).
    """
    codes = torch.zeros(vectors.shape, dtype=torch.int64)
    for head, direction in torch.cartesian_prod(*map(torch.arange, side.shape)).tolist():
        width, step = int(side.widths[head, direction]), float(side.chosen_steps[head, direction])
        if width:
            coefficients = (vectors[:, head].double() - side.mean[head].double()) @ side.encode[head, direction].double()
            levels = (coefficients / step).floor() + 2 ** (width - 1)
            codes[:, head, :, direction] = levels.clamp(0, 2**width - 1).long()
    return codes


def vectors_of(side: CalibratedSide, codes: torch.Tensor) -> torch.Tensor:
    """What the codes stand for: the middle of each step, and the mean where there are no bits."""
    coefficients = torch.zeros(codes.shape, dtype=torch.float64)
    for head, direction in torch.cartesian_prod(*map(torch.arange, side.shape)).tolist():
        width, step = int(side.widths[head, direction]), float(side.chosen_steps[head, direction])
        if width:
            coefficients[:, head, :, direction] = (codes[:, head, :, direction] + 0.5 - 2 ** (width - 1)) * step
    decode = torch.linalg.inv(side.encode.double())
    return torch.einsum("hij,bhtj->bhti", decode, coefficients) + side.mean.double()[:, None]


def decoded(layer: CalibratedLayer, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values after their codes; gamma is left out."""
    return vectors_of(layer.keys, codes_of(layer.keys, keys)), vectors_of(layer.values, codes_of(layer.values, values))

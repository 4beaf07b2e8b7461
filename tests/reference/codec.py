"""What forms of a `KVCodec` with fixed widths do to vectors, written down plainly: in float64, one group and one direction at a time."""

import torch

from hf_kvcaches.codec.fixed import FixedLayer
from hf_kvcaches.codec.moments import Shape
from hf_kvcaches.kernels.code_format import WIDTHS


def joined(shape: Shape, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Vectors of the groups, (batch, groups, tokens, size): the keys of a group's heads, then the values."""
    vectors = []
    for start in range(0, shape.heads, shape.group):
        heads = range(start, start + shape.group)
        vectors.append(torch.cat([side[:, head] for side in (keys, values) for head in heads], -1))
    return torch.stack(vectors, 1)


def integers_of(layer: FixedLayer, vectors: torch.Tensor) -> torch.Tensor:
    """The integer of each direction, (batch, groups, tokens, size), int64; 0 where a direction has no bits."""
    found, transform = torch.zeros(vectors.shape, dtype=torch.int64), layer.transform
    for group, direction in torch.cartesian_prod(*map(torch.arange, layer.mean.shape)).tolist():
        if width := int(layer.widths[direction]):
            step = float(layer.steps[group, direction, WIDTHS.index(width)])
            coefficients = (vectors[:, group].double() - layer.mean[group].double()) @ transform[group, direction]
            found[:, group, :, direction] = ((coefficients / step).floor() + 2 ** (width - 1)).clamp(0, 2**width - 1).long()
    return found


def vectors_of(layer: FixedLayer, integers: torch.Tensor) -> torch.Tensor:
    """What the integers stand for: the middle of each step, and the mean where there are no bits."""
    coefficients = torch.zeros(integers.shape, dtype=torch.float64)
    for group, direction in torch.cartesian_prod(*map(torch.arange, layer.mean.shape)).tolist():
        if width := int(layer.widths[direction]):
            step = float(layer.steps[group, direction, WIDTHS.index(width)])
            coefficients[:, group, :, direction] = (integers[:, group, :, direction].double() + 0.5 - 2 ** (width - 1)) * step
    decode = torch.linalg.inv(layer.transform)
    return torch.einsum("gij,bgtj->bgti", decode, coefficients) + layer.mean.double()[:, None]


def decoded(layer: FixedLayer, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values after their codes, (batch, kv_heads, tokens, dim) each."""
    vectors, shape = vectors_of(layer, integers_of(layer, joined(layer.shape, keys, values))), layer.shape
    sizes = [shape.key_dim] * shape.group + [shape.value_dim] * shape.group
    heads = [vectors[:, group].split(sizes, -1) for group in range(shape.groups)]
    return tuple(  # type: ignore[return-value]
        torch.stack([head for own in heads for head in own[first : first + shape.group]], 1) for first in (0, shape.group)
    )

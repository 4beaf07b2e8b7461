"""What the packed form of a codec does to keys and values, written down plainly, in float64."""

import torch

from hf_kvcaches import KVCodec
from tests.reference.codec import joined


def coefficients(codec: KVCodec, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """In steps, (directions, tokens)."""
    basis = codec.packed.bases[layer]
    apart = joined(basis.shape, keys[None], values[None])[0].double() - basis.mean.double()[:, None]
    return torch.cat([transform @ own.T for transform, own in zip(basis.transform, apart, strict=True)]) / codec.packed.quantizer.step


def integers(codec: KVCodec, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of all directions, 0 for those that are left out, (directions, tokens)."""
    plan = dict(zip(codec.packed.bases, codec.packed.quantizer.plans, strict=True))[layer]
    found = coefficients(codec, layer, keys, values)
    split, kept = (torch.zeros(len(found), 1, dtype=torch.bool) for _ in range(2))
    split[plan.order[: plan.split]], kept[plan.order] = True, True
    return torch.where(split, found.round(), found.sign() * (found.abs() + 0.4).floor()) * kept

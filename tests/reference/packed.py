"""What the packed form of a codec does to keys and values, written down plainly, in float64."""

from __future__ import annotations

import torch

from hf_kvcaches import KVCodec


def joined(keys: torch.Tensor, values: torch.Tensor, group: int) -> torch.Tensor:
    """(groups, tokens, size): the keys of a group's heads, then their values."""
    rows = []
    for first in range(0, len(keys), group):
        heads = range(first, first + group)
        rows.append(torch.cat([states[head] for states in (keys, values) for head in heads], -1))
    return torch.stack(rows).double()


def coefficients(codec: KVCodec, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """In steps, (directions, tokens)."""
    basis = codec.packed.bases[layer]
    apart = joined(keys, values, basis.shape.group) - basis.mean.double()[:, None]
    return torch.cat([encode.double() @ own.T for encode, own in zip(basis.encode, apart, strict=True)]) / codec.packed.quantizer.step


def integers(codec: KVCodec, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of all directions, 0 for those that are left out, (directions, tokens)."""
    program = dict(zip(codec.packed.bases, codec.packed.quantizer.programs, strict=True))[layer]
    found = coefficients(codec, layer, keys, values)
    whole = found.sign() * (found.abs() + 0.4).floor()
    kept = torch.zeros(len(whole), 1, dtype=torch.bool)
    kept[program.order] = True
    return whole * kept


def states_of(codec: KVCodec, layer: int, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, (kv_heads, tokens, dim), if each integer stood for just so many steps."""
    basis = codec.packed.bases[layer]
    heads, key_dim, value_dim = basis.shape
    group, size = basis.shape.group, basis.shape.size
    keys, values = torch.empty(heads, whole.shape[1], key_dim), torch.empty(heads, whole.shape[1], value_dim)
    for place, own in enumerate(whole.split(size)):
        vectors = (torch.linalg.inv(basis.encode[place].double()) @ (own * codec.packed.quantizer.step)).T + basis.mean[place].double()
        for head in range(group):
            start = group * key_dim + head * value_dim
            keys[place * group + head] = vectors[:, head * key_dim : (head + 1) * key_dim]
            values[place * group + head] = vectors[:, start : start + value_dim]
    return keys, values

"""All keys and values of a layer as codes, for files and messages: the first tokens of each row stay exact."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_kvcaches.codec.coder import LayerCoder
from hf_kvcaches.codec.sides import EXACT
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError


def encode(coder: LayerCoder, geometry: RotaryGeometry | None, keys: Tensor, values: Tensor, padding: list[int]) -> dict[str, Tensor]:
    """Return what is stored of a layer.

    Args:
        geometry: How the model rotates keys, which the codec takes before that; None where it takes them as they are.
        keys: (batch, kv_heads, tokens, head_dim), and `values`.
        padding: For each row, how many slots at its start hold no token.
    """
    unrotated = keys if geometry is None else geometry.unrotate(keys.float(), _positions(keys, padding))
    first = _first(keys, padding)
    exact = {name: states.gather(2, _expanded(first, states)) for name, states in (("first_keys", keys), ("first_values", values))}
    return {"codes": coder.encode(unrotated, values), **exact}


def decode(coder: LayerCoder, geometry: RotaryGeometry | None, stored: dict[str, Tensor], padding: list[int]) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a layer from what `encode` gave."""
    codes = stored["codes"]
    if codes.ndim != 3 or codes.dtype != torch.uint8 or len(codes) != len(padding):
        raise ArtifactError(f"codes of {tuple(codes.shape)} in a layer, and there are {len(padding)} rows")
    keys, values = coder.decode(codes)
    if geometry is not None:
        keys = geometry.rotate(keys, _positions(keys, padding))
    first = _first(keys, padding)
    for states, exact in ((keys, stored["first_keys"]), (values, stored["first_values"])):
        states.scatter_(2, _expanded(first, states), exact)
    return keys, values


def _positions(keys: Tensor, padding: list[int]) -> Tensor:
    """Return the position of each slot's token, (batch, tokens)."""
    return (torch.arange(keys.shape[2], device=keys.device) - _column(keys, padding)).clamp(min=0)


def _first(keys: Tensor, padding: list[int]) -> Tensor:
    """Return the slots of each row's first tokens, (batch, 1, tokens, 1)."""
    tokens = keys.shape[2]
    first = _column(keys, padding) + torch.arange(min(EXACT, tokens), device=keys.device)
    return first.clamp(max=tokens - 1)[:, None, :, None]


def _column(keys: Tensor, padding: list[int]) -> Tensor:
    return torch.tensor(padding, dtype=torch.int64, device=keys.device)[:, None]


def _expanded(first: Tensor, states: Tensor) -> Tensor:
    return first.expand(-1, states.shape[1], -1, states.shape[3])

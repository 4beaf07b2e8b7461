"""The keys of slots in the rotation that a query, a policy or a new content of the slots needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hf_kvcaches.equip.layer import EquipLayer


def offset(layer: EquipLayer) -> int | torch.Tensor:
    """What tokens behind the sinks are rotated to beyond their rank under `"frames"`: a number, or (batch, 1 or kv_heads, 1)."""
    return layer.state.row_tokens() - layer.state.kept() if layer.evicts_in_order else 0


def target_of(layer: EquipLayer, ranks: torch.Tensor, beyond: int | torch.Tensor) -> torch.Tensor:
    """To which position keys are rotated under `"frames"`: sinks to their rank, others to their rank plus the offset.

    Args:
        beyond: The offset.
    """
    return torch.where(ranks < layer.settings.sinks, ranks, ranks + beyond)


def rotated_to(layer: EquipLayer) -> torch.Tensor | None:
    """To which position the key of each slot is rotated, (batch, 1 or kv_heads, slots in use); None where that is not this package's."""
    if not layer.rotation.kept_rotated:
        return None
    return target_of(layer, layer.state.find_ranks(), offset(layer))


def keys_for_queries(layer: EquipLayer) -> torch.Tensor:
    """The keys in use, rotated as the newest token's query: (batch, kv_heads, slots in use, head_dim)."""
    keys, _ = layer.store.read(layer.state.used())
    if layer.rotation.unrotated:
        assert layer.state.ranks is not None
        ranks = layer.state.ranks[..., : keys.shape[2]]
        return layer.rotation.table(layer.store.capacity, keys.device)[ranks](keys)
    beyond, sinks = offset(layer), layer.settings.sinks
    if not layer.rotation.kept_rotated or not sinks or (isinstance(beyond, int) and beyond == 0):
        return keys
    by = layer.rotation.by(torch.as_tensor(beyond, device=keys.device).view(-1, 1, 1) if isinstance(beyond, int) else beyond)
    return torch.cat([by(keys[:, :, :sinks]), keys[:, :, sinks:]], 2)


def keys_by_rank(layer: EquipLayer) -> torch.Tensor:
    """The keys in use, each rotated to its rank where positions are compact: (batch, kv_heads, slots in use, head_dim)."""
    now = rotated_to(layer)
    if now is None:
        return keys_for_queries(layer)
    keys, _ = layer.store.read(layer.state.used())
    return layer.rotation.by(torch.where(layer.positions < 0, 0, layer.state.find_ranks() - now))(keys)


def as_model_rotated(layer: EquipLayer, keys: torch.Tensor, positions: torch.Tensor, now: torch.Tensor | None) -> torch.Tensor:
    """Keys as the model rotated them when their tokens came.

    Args:
        keys: (batch, kv_heads, tokens, head_dim), as they are kept.
        positions: (batch, 1 or kv_heads, tokens).
        now: To which position they are rotated; None for keys without rotation.
    """
    if not layer.rotation.compact:
        return keys
    index = positions - layer.state.row_start()
    delta = torch.where(positions < 0, 0, index if now is None else index - now)
    return layer.rotation.by(delta)(keys) if bool(delta.any()) else keys

"""Kept and new tokens side by side, before some of them are pruned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_kvcaches.equip.frames import TurningPass
from hf_kvcaches.equip.tokens import order_of

if TYPE_CHECKING:
    from hf_kvcaches.equip.layer import EquipLayer


@dataclass
class Candidates:
    """Kept and new tokens side by side, in order of position; what is empty or padding comes last.

    Args:
        keys: (batch, kv_heads, tokens, head_dim), as they are kept.
        positions: (batch, 1 or kv_heads, tokens), -1 where there is none.
        stands: At which place a key stands that was rotated, likewise; None where keys have no rotation of ours.
        attention: (batch, kv_heads, tokens), float32, or None.
        scores: (batch, 1 or kv_heads, tokens), float32, NaN for new tokens; None where nothing was scored yet.
        queries: Of the new tokens, (batch, heads, tokens, head_dim), or None where the policy is shown none.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    stands: torch.Tensor | None
    attention: torch.Tensor | None
    gathering: torch.Tensor | None
    scores: torch.Tensor | None
    queries: torch.Tensor | None = None

    def pick(self, index: torch.Tensor) -> Candidates:
        """Some of the tokens.

        Args:
            index: (batch, 1 or kv_heads, tokens to pick).
        """
        heads = max(index.shape[1], self.positions.shape[1])

        def states(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.gather(2, index[..., None].expand(*tensor.shape[:2], -1, tensor.shape[-1]))

        def flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None:
                return None
            wide = max(index.shape[1], tensor.shape[1])
            return tensor.expand(-1, wide, -1).gather(2, index.expand(tensor.shape[0], wide, -1))

        positions = self.positions.expand(-1, heads, -1).gather(2, index.expand(self.positions.shape[0], heads, -1))
        return Candidates(
            states(self.keys),
            states(self.values),
            positions,
            flat(self.stands),
            flat(self.attention),
            flat(self.gathering),
            flat(self.scores),
            self.queries,
        )


def candidates(
    layer: EquipLayer,
    keys: torch.Tensor,
    values: torch.Tensor,
    running: TurningPass,
    observed: torch.Tensor | None = None,
    queries: torch.Tensor | None = None,
    *,
    ordered: bool = True,
) -> Candidates:
    """Kept and new tokens; the layer counts the new ones as fed.

    Args:
        keys: New ones, (batch, kv_heads, tokens, head_dim), as the model rotated them.
        observed: What slots and new tokens got from the observed queries, (batch, kv_heads, slots + tokens), or None.
        ordered: Whether they are to be in order of position, rather than slots first.
    """
    tokens, batch = keys.shape[-2], keys.shape[0]
    keys, stands = arrived(layer, keys, running)
    old = kept_candidates(layer) if layer.used else None
    places = layer.pass_over(running.valid, tokens).expand(batch, 1, tokens)
    found = Candidates(keys, values, places.to(torch.int32), stands, None, None, None, queries)
    if old is not None:
        found = joined(layer, old, found)
    real = keys.new_full((batch, 1, 1), tokens, dtype=torch.long) if running.valid is None else running.valid.sum(-1)[:, None, None]
    remember(layer, found, observed, real)
    layer.fed += tokens
    return found if not ordered or (running.valid is None and old is None) else in_order(found)


def in_order(found: Candidates) -> Candidates:
    """Candidates in order of position, what is empty last."""
    return found.pick(order_of(found.positions))


def kept_candidates(layer: EquipLayer) -> Candidates:
    """What the layer holds, slot by slot."""
    keys, values = layer.held_now()
    used = layer.used
    stands = layer.standing() if layer.frames.two else None
    flat = [None if tensor is None else tensor[..., :used] for tensor in (layer.attention, layer.gathering, layer.scores)]
    # Positions are read again once padding has moved them.
    return Candidates(keys, values, layer.slot_positions(), stands, *flat)


def joined(layer: EquipLayer, old: Candidates, new: Candidates) -> Candidates:
    """Kept tokens, then new ones."""
    count, rows = new.keys.shape[2], new.keys.shape[0]

    def beside(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
        if one is None or other is None:
            return None
        heads = max(one.shape[1], other.shape[1])
        return torch.cat([one.expand(rows, heads, -1), other.expand(rows, heads, -1)], -1)

    def padded(one: torch.Tensor | None, fill: float) -> torch.Tensor | None:
        return None if one is None else torch.nn.functional.pad(one, (0, count), value=fill)

    positions = beside(layer.slot_positions().to(torch.int32), new.positions)
    assert positions is not None
    return Candidates(
        torch.cat([old.keys, new.keys], 2),
        torch.cat([old.values, new.values], 2),
        positions,
        beside(old.stands, new.stands),
        padded(old.attention, 0.0),
        padded(old.gathering, 0.0),
        padded(old.scores, torch.nan),
        new.queries,
    )


def remember(layer: EquipLayer, found: Candidates, observed: torch.Tensor | None, real: torch.Tensor) -> None:
    """Adds a block's attention to what the policy observes.

    Args:
        observed: What they got, (batch, kv_heads, slots + tokens), or None.
        real: How many of the new tokens are, (batch, 1, 1).
    """
    window = layer.policy.observes
    if observed is None:
        return
    if window is None:
        found.attention = observed if found.attention is None else found.attention + observed
        return
    if found.attention is None or found.gathering is None or layer.gathered is None:
        found.attention = observed
        if window > 1:
            found.gathering, layer.gathered = torch.zeros_like(observed), torch.zeros_like(real)
        return
    # Of a long block its last queries are a window, and those of a short one go into the window that is not yet complete.
    whole, gathering, count = real >= window, found.gathering + observed, layer.gathered + real
    complete = whole | (count >= window)
    found.attention = torch.where(whole, observed, torch.where(complete, gathering, found.attention))
    found.gathering = torch.where(complete, 0.0, gathering)
    layer.gathered = torch.where(complete, 0, count)


def first_of(found: Candidates, count: int) -> Candidates:
    """The first candidates."""
    index = torch.arange(count, device=found.positions.device).expand(found.positions.shape[0], 1, -1)
    return found.pick(index)


def arrived(layer: EquipLayer, keys: torch.Tensor, running: TurningPass) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A block's keys in the rotation in which they are kept, and where they stand then, (batch, 1 or kv_heads, tokens).

    Args:
        keys: New ones, (batch, kv_heads, tokens, head_dim), as the model rotated them.
    """
    frames, tokens = layer.frames, keys.shape[-2]
    if frames.geometry is None:
        return keys, None
    target = block_places(layer, running) if frames.two else torch.zeros(1, 1, tokens, device=keys.device)
    turn = running.turn(frames.geometry, target)
    keys = keys if turn is None else turn(keys)
    if not frames.two:
        return keys, None
    stands = target if isinstance(target, torch.Tensor) else (torch.arange(tokens, device=keys.device) + target)[None, None]
    return keys, stands.expand(keys.shape[0], -1, tokens)


def block_places(layer: EquipLayer, running: TurningPass) -> int | torch.Tensor:
    """Where a block's tokens stand in the frame of its queries: the first of them, or each, (batch, 1 or kv_heads, tokens)."""
    start = layer.kept_count + layer.frame_offset if layer.frames.two else layer.kept_count
    if running.valid is None and isinstance(start, int):
        return start
    steps = torch.arange(running.tokens, device=running.device)[None] if running.valid is None else running.valid.cumsum(-1) - 1
    return (steps.clamp(min=0)[:, None] + start).long()

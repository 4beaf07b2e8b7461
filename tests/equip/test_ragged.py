"""Heads with different numbers of slots, behind one another: the same numbers as one padded buffer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_kvcaches.equip.ragged import Ragged
from hf_kvcaches.kernels.arguments import RotationTables
from hf_kvcaches.kernels.slots import slot_attention

ROOMS = torch.tensor([[3, 10, 5], [7, 1, 10]])[..., None]
ROWS, HEADS, SLOTS, DIM = 2, 3, 10, 6


def states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(states: Any, rooms: torch.Tensor = ROOMS) -> Ragged:
    """Heads with so many slots, the first ones from padded heads."""
    ragged = Ragged("auto")
    ragged.lay_out(rooms)
    ragged.hold(states, SLOTS)
    return ragged


@pytest.fixture
def padded() -> tuple[torch.Tensor, torch.Tensor]:
    return states(ROWS, HEADS, SLOTS, DIM), states(ROWS, HEADS, SLOTS, DIM, seed=1)


@pytest.fixture
def ragged(padded: Any) -> Ragged:
    return filled(padded)


EXISTING = torch.arange(SLOTS) < ROOMS


def test_memory_follows_the_sum_and_what_is_read_is_what_came(ragged: Ragged, padded: Any) -> None:
    assert ragged.keys.shape == (int(ROOMS.sum()), DIM)
    assert (ragged.capacity, ragged.shape) == (10, (ROWS, HEADS))
    for tensor, expected in zip(ragged.read(SLOTS), padded, strict=True):
        assert torch.equal(tensor[EXISTING], expected[EXISTING])


def test_fewer_tokens_than_slots_leave_the_rest_empty(padded: Any) -> None:
    few = filled([tensor[:, :, :4] for tensor in padded])
    assert torch.equal(few.raw(4)[0][EXISTING[..., :4]], padded[0][:, :, :4][EXISTING[..., :4]])
    assert not few.raw(SLOTS)[0][..., 4:, :][EXISTING[..., 4:]].any()


@pytest.mark.parametrize(
    "slots", [torch.tensor([[2, 9, 4], [6, 0, 0]])[..., None], torch.zeros(1, 1, 1, dtype=torch.long)], ids=["heads", "all"]
)
def test_writing_changes_these_slots_alone(ragged: Ragged, padded: Any, slots: torch.Tensor) -> None:
    before, index = ragged.gather(slots), slots[..., None].expand(ROWS, HEADS, 1, DIM)
    assert torch.equal(before[0], padded[0].gather(2, index))
    new = states(ROWS, HEADS, 1, DIM, seed=2)
    ragged.write(slots, (new, new))
    assert torch.equal(ragged.raw(SLOTS)[0][EXISTING], padded[0].scatter(2, index, new)[EXISTING])
    ragged.write(slots, before)
    assert torch.equal(ragged.raw(SLOTS)[0][EXISTING], padded[0][EXISTING])


@pytest.mark.parametrize("rotated", [False, True])
def test_attention_is_that_of_the_padded_buffer(ragged: Ragged, padded: Any, rotated: bool) -> None:
    angles = torch.arange(SLOTS)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    options: dict[str, Any] = {"valid": EXISTING, "want_weights": True, "softcap": 5.0, "sink_logits": states(HEADS * 2)}
    options["rotation"] = RotationTables(torch.arange(SLOTS).flip(0)[None, None], angles.cos(), angles.sin()) if rotated else None
    query = states(ROWS, HEADS * 2, 1, DIM, seed=3)
    torch.testing.assert_close(ragged.attend(query, SLOTS, 0.3, **options), slot_attention(query, *padded, 0.3, **options))


def test_a_rebuild_keeps_rooms_and_picks_tokens_for_each_head(ragged: Ragged, padded: Any) -> None:
    new = states(ROWS, HEADS, 2, DIM, seed=4), states(ROWS, HEADS, 2, DIM, seed=5)
    index = torch.tensor([0, 11, 10])[None, None].expand(ROWS, HEADS, 3)
    ragged.rebuild(index, new, SLOTS, 10)
    expected = torch.stack([padded[0][:, :, 0], new[0][:, :, 1], new[0][:, :, 0]], 2)
    assert torch.equal(ragged.raw(3)[0][EXISTING[..., :3]], expected[EXISTING[..., :3]])
    assert torch.equal(ragged.rooms, ROOMS)


def test_rows_are_picked_copied_and_saved(ragged: Ragged, padded: Any) -> None:
    order = torch.tensor([1, 0, 1])
    copied = copy.deepcopy(ragged)
    ragged.map_rows(lambda tensor: tensor.index_select(0, order))
    loaded = Ragged("auto")
    loaded.restore(ragged.export(), None, 10)
    for each in (ragged, loaded):
        assert torch.equal(each.raw(SLOTS)[0][EXISTING[order]], padded[0][order][EXISTING[order]])
    assert torch.equal(copied.raw(SLOTS)[0][EXISTING], padded[0][EXISTING])
    snapshot = copied.snapshot()
    copied.write(torch.zeros(1, 1, 1, dtype=torch.long), (states(ROWS, HEADS, 1, DIM),) * 2)
    copied.restore(snapshot, torch.tensor([]), SLOTS)
    assert torch.equal(copied.raw(SLOTS)[0][EXISTING], padded[0][EXISTING])
    copied.clear()
    assert (copied.capacity, copied.shape) == (0, (0, 0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="reads pages with Triton")
@pytest.mark.parametrize("rotated", [False, True])
def test_triton_reads_heads_where_they_lie(padded: Any, rotated: bool) -> None:
    keys, values = (torch.nn.functional.pad(tensor, (0, 10)).cuda() for tensor in padded)
    ragged = filled((keys, values), ROOMS.cuda())
    angles = torch.arange(SLOTS, device="cuda")[:, None] * torch.ones(8, device="cuda")
    options: dict[str, Any] = {"valid": EXISTING.cuda(), "want_weights": True}
    options["rotation"] = RotationTables(torch.arange(SLOTS, device="cuda")[None, None], angles.cos(), angles.sin()) if rotated else None
    query = states(ROWS, HEADS * 2, 1, 16, seed=3).cuda()
    expected = slot_attention(query, keys, values, 0.3, backend="torch", **options)
    torch.testing.assert_close(ragged.attend(query, SLOTS, 0.3, **options), expected, atol=1e-3, rtol=1e-3)

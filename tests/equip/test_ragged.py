"""Heads with different numbers of slots, behind one another: the same numbers as one padded buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvcaches.equip.storage import Ragged
from hf_kvcaches.kernels.slots import slot_attention
from tests.kernels.cases import rotation_tables

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


@pytest.mark.parametrize("rotated", [False, True])
def test_attention_is_that_of_the_padded_buffer(ragged: Ragged, padded: Any, rotated: bool) -> None:
    angles = torch.arange(SLOTS)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    options: dict[str, Any] = {"valid": EXISTING, "want_weights": True, "softcap": 5.0, "sink_logits": states(HEADS * 2)}
    options["rotation"] = rotation_tables(torch.arange(SLOTS).flip(0)[None, None], angles) if rotated else None
    query = states(ROWS, HEADS * 2, 1, DIM, seed=3)
    torch.testing.assert_close(ragged.attend(query, SLOTS, 0.3, **options), slot_attention(query, *padded, 0.3, **options))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="reads pages with Triton")
@pytest.mark.parametrize("rotated", [False, True])
def test_triton_reads_heads_where_they_lie(padded: Any, rotated: bool) -> None:
    keys, values = (torch.nn.functional.pad(tensor, (0, 10)).cuda() for tensor in padded)
    ragged = filled((keys, values), ROOMS.cuda())
    angles = torch.arange(SLOTS, device="cuda")[:, None] * torch.ones(8, device="cuda")
    options: dict[str, Any] = {"valid": EXISTING.cuda(), "want_weights": True}
    options["rotation"] = rotation_tables(torch.arange(SLOTS, device="cuda")[None, None], angles) if rotated else None
    query = states(ROWS, HEADS * 2, 1, 16, seed=3).cuda()
    expected = slot_attention(query, keys, values, 0.3, backend="torch", **options)
    torch.testing.assert_close(ragged.attend(query, SLOTS, 0.3, **options), expected, atol=1e-3, rtol=1e-3)

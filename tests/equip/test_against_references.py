"""`EquipCache` keeps the same tokens and gives the same logits as the slow references, with compact and original positions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.driving import feed, left_padded
from tests.equip.cases import BUDGET, POLICIES, both_positions, build, build_reference, held, steps, text

pytestmark = pytest.mark.full

TOLERANCE = 1e-4


def padded(spans: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows of which two are padded, (3, sum of spans), and their mask."""
    more = sum(spans) - 40
    whole = [text(length + more, offset) for length, offset in ((40, 0), (23, 7), (31, 50))]
    return left_padded(whole)


def case(name: str) -> tuple[torch.Tensor, torch.Tensor | None, list[int], int]:
    """A text, its mask, its cut into forward passes, and a budget."""
    if name == "prompt longer than the budget":
        return text(78), None, steps(30, 78), BUDGET
    if name == "prompt shorter than the budget":
        return text(45), None, steps(5, 45), BUDGET
    if name == "blocks and steps in turn":
        return torch.cat([text(74), text(74, 33)]), None, [20, 1, 1, 7, 1, 20, *[1] * 8, 7, 1, 8], BUDGET
    if name == "short blocks":
        return torch.cat([text(50), text(50, 33)]), None, [20, 3, 1, 2, *[1] * 10, 3, 5, 2, *[1] * 4], BUDGET
    if name == "padded batch":
        spans = steps(40, 64)
        return *padded(spans), spans, BUDGET
    if name == "padded batch of which some rows fill up later":
        spans = steps(40, 60)
        return *padded(spans), spans, 36
    if name == "steps without a token for some rows":
        ids, mask = padded(spans := [40, *[1] * 20, 7, *[1] * 4])
        mask[1, [44, 45, 50]], mask[2, [45, 53]] = 0, 0
        return ids, mask, spans, BUDGET
    assert name == "padded batch read in chunks"
    spans = [9, 9, 9, 9, 9, 9, 1, 1, 9, 1, 9]
    return *padded(spans), spans, BUDGET


def run(made: Any, name: str, model: Any) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Logits of all real tokens, and what was kept after each forward pass that shows in the text's last third."""
    ids, mask, spans, _ = case(name)
    ends = torch.tensor(spans).cumsum(0).tolist()
    logits, kept = [], []
    for start, stop in pairwise([0, *ends]):
        logits.append(feed(model, made, ids[:, start:stop], [stop - start], None if mask is None else mask[:, :stop], keep=0))
        kept.append(held(made))
    whole = torch.cat(logits, dim=1)
    return (whole if mask is None else whole[mask.bool()]), kept


CASES = [
    "prompt longer than the budget",
    "prompt shorter than the budget",
    "blocks and steps in turn",
    "short blocks",
    "padded batch",
    "padded batch of which some rows fill up later",
    "steps without a token for some rows",
    "padded batch read in chunks",
]


@pytest.mark.parametrize("policy", POLICIES)
@both_positions
@pytest.mark.parametrize(("name", "family"), [(CASES[0], "llama_mha"), *((name, "llama") for name in CASES)])
def test_kept_tokens_and_logits_equal_the_reference(policy: str, positions: str, name: str, family: str) -> None:
    model = models.tiny(family)
    logits, kept = run(build(model, policy, case(name)[3], positions=positions), name, model)
    expected, expected_kept = run(build_reference(model, policy, case(name)[3], positions=positions), name, model)
    for index, (now, then) in enumerate(zip(kept, expected_kept, strict=True)):
        for layer, (one, other) in enumerate(zip(now, then, strict=True)):
            assert torch.equal(one, other), f"layer {layer} keeps other tokens after pass {index}"
    assert float((logits - expected).abs().max()) <= 1e-4

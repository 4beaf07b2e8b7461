"""`EquipCache` keeps the same tokens and gives the same logits as the slow references, with compact and original positions."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.driving import feed, left_padded
from tests.equip.cases import BUDGET, POLICIES, both_positions, build, build_reference, held, steps, text

pytestmark = pytest.mark.full

TOLERANCE = 1e-4

every_policy = pytest.mark.parametrize("policy", POLICIES)


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


@cache
def reference_run(policy: str, positions: str, name: str, family: str) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    model = models.tiny(family)
    return run(build_reference(model, policy, case(name)[3], positions=positions), name, model)


def compare(policy: str, positions: str, name: str, family: str) -> None:
    model = models.tiny(family)
    logits, kept = run(build(model, policy, case(name)[3], positions=positions), name, model)
    expected, expected_kept = reference_run(policy, positions, name, family)
    for index, (now, then) in enumerate(zip(kept, expected_kept, strict=True)):
        for layer, (one, other) in enumerate(zip(now, then, strict=True)):
            assert torch.equal(one, other), f"layer {layer} keeps other tokens after pass {index}"
    assert float((logits - expected).abs().max()) <= TOLERANCE


@every_policy
@both_positions
def test_decoding_far_beyond_the_budget_equals_the_reference(policy: str, positions: str) -> None:
    compare(policy, positions, "prompt longer than the budget", "llama")


@every_policy
@both_positions
def test_a_model_without_grouped_heads_equals_the_reference(policy: str, positions: str) -> None:
    compare(policy, positions, "prompt longer than the budget", "llama_mha")


@every_policy
@both_positions
def test_a_cache_that_fills_up_while_decoding_equals_the_reference(policy: str, positions: str) -> None:
    compare(policy, positions, "prompt shorter than the budget", "llama")


@every_policy
@both_positions
def test_blocks_between_steps_equal_the_reference(policy: str, positions: str) -> None:
    compare(policy, positions, "blocks and steps in turn", "llama")


@every_policy
@both_positions
def test_short_blocks_between_steps_equal_the_reference(policy: str, positions: str) -> None:
    compare(policy, positions, "short blocks", "llama")


@every_policy
@both_positions
def test_left_padded_rows_equal_the_reference(policy: str, positions: str) -> None:
    compare(policy, positions, "padded batch", "llama")


@every_policy
@both_positions
def test_rows_that_fill_up_at_different_times_equal_the_reference(policy: str, positions: str) -> None:
    compare(policy, positions, "padded batch of which some rows fill up later", "llama")


@every_policy
@both_positions
def test_a_padded_prompt_read_in_chunks_equals_the_reference(policy: str, positions: str) -> None:
    compare(policy, positions, "padded batch read in chunks", "llama")


@every_policy
@both_positions
def test_a_row_without_a_token_in_a_step_stays_as_it_was(policy: str, positions: str) -> None:
    compare(policy, positions, "steps without a token for some rows", "llama")

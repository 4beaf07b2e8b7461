"""The tokens that a cache was fed, against plain lists of lists."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.refusal import Refusal
from hf_kvcaches.core.token_log import TokenLog
from tests import tiny


def observe(log: TokenLog, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None, seen: int) -> None:
    """Add the tokens of a pass, as the hook of a source does."""
    log.append(ids, seen, mask, positions)


@dataclass
class Plain:
    """What is to be remembered, slot by slot.

    Args:
        rows: Tokens, or None where a pass went by untold.
    """

    rows: list[list[int | None]] = field(default_factory=list)

    @property
    def seen(self) -> int:
        return len(self.rows[0]) if self.rows else 0

    def feed(self, new: list[list[int]], told: bool) -> None:
        told = told and not any(None in row for row in self.rows)
        old = self.rows if self.seen else [[] for _ in new]
        self.rows = [row + [token if told else None for token in line] for row, line in zip(old, new, strict=True)]

    def known(self) -> bool:
        return bool(self.seen) and not any(None in row for row in self.rows)


def numbered(mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """The positions of the last tokens, as `generate` passes them."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens:]


def check(log: TokenLog, plain: Plain, padding: list[int]) -> None:
    if plain.known():
        assert [row.tolist() for row in log.rows()] == plain.rows
        assert log.padding(plain.seen) == padding
        assert isinstance(log.padding(plain.seen + 1), Refusal)
    else:
        assert isinstance(log.padding(plain.seen), Refusal)


@given(data=st.data(), padded=st.booleans())
def test_it_follows_whatever_is_done_to_the_cache(data: st.DataObject, padded: bool) -> None:
    log, plain, padding = TokenLog(), Plain(), []
    for number in range(data.draw(st.integers(1, 9))):
        kinds = ["observe", "observe", "untold", "crop", "reorder", "select", "repeat", "reset"] if plain.seen else ["observe", "untold"]
        kind = data.draw(st.sampled_from(kinds))
        rows = len(plain.rows)
        if kind in ("observe", "untold"):
            batch, tokens = (rows, data.draw(st.integers(1, 3))) if plain.seen else (data.draw(st.integers(1, 3)), 4)
            new = tiny.ids(batch, tokens, seed=number)
            if not plain.seen:
                padding = [data.draw(st.integers(0, 3)) * padded for _ in range(batch)]
            mask = torch.ones(batch, plain.seen + tokens, dtype=torch.long)
            for line, pad in zip(mask, padding, strict=True):
                line[:pad] = 0
            if kind == "observe":
                positions = numbered(mask, tokens) if any(padding) or data.draw(st.booleans()) else None
                observe(log, new, mask if any(padding) or data.draw(st.booleans()) else None, positions, plain.seen)
            plain.feed(new.tolist(), told=kind == "observe")
        elif kind == "crop":
            length = data.draw(st.integers(max([*padding, 0]) + 1, max([plain.seen, *(pad + 1 for pad in padding)])))
            plain.rows = [row[:length] for row in plain.rows]
            log.crop(length)
        elif kind in ("reorder", "select"):
            count = rows if kind == "reorder" else data.draw(st.integers(1, rows))
            order = [data.draw(st.integers(0, rows - 1)) for _ in range(count)]
            plain.rows, padding = [plain.rows[index] for index in order], [padding[index] for index in order]
            log.map_rows(lambda tensor, order=order: tensor.index_select(0, torch.tensor(order)))
        elif kind == "repeat":
            plain.rows, padding = ([item for item in items for _ in range(2)] for items in (plain.rows, padding))
            log.map_rows(lambda tensor: tensor.repeat_interleave(2, dim=0))
        else:
            log.reset()
            plain, padding = Plain(), []
        check(log, plain, padding)


def test_after_an_untold_pass_it_does_not_describe_the_prompt_until_that_is_cropped_away_or_the_cache_is_empty() -> None:
    log, ids = TokenLog(), tiny.ids(1, 6)
    observe(log, ids, None, None, 0)
    assert log.padding(6) == [0]
    assert isinstance(log.padding(9), Refusal)  # three untold
    log.crop(6)
    assert log.padding(6) == [0]
    observe(log, ids[:, :2], None, None, 9)
    assert isinstance(log.padding(11), Refusal)
    log.crop(6)
    assert log.padding(6) == [0]
    observe(log, ids, None, None, 0)
    assert log.padding(6) == [0]


def test_a_pass_that_failed_is_forgotten_when_the_next_begins_with_an_empty_cache() -> None:
    log = TokenLog()
    observe(log, tiny.ids(2, 6), None, None, 0)
    observe(log, tiny.ids(1, 4), None, None, 0)
    assert log.padding(4) == [0]
    assert [row.tolist() for row in log.rows()] == tiny.ids(1, 4).tolist()


def test_tokens_written_into_the_callers_tensors_later_change_nothing() -> None:
    log, buffer, mask = TokenLog(), torch.tensor([[5]]), torch.ones(1, 8, dtype=torch.bool)
    for step in range(3):
        buffer.fill_(5 + step)
        observe(log, buffer, mask[:, : step + 1].clone() if step == 2 else mask[:, : step + 1], None, step)
    buffer.fill_(0)
    assert log.rows()[0].tolist() == [5, 6, 7]
    mask.fill_(False)
    assert log.padding(3) == [0]


MASKS = {
    "a hole": [[1, 1, 0, 1]],
    "padding on the right": [[1, 1, 1, 0]],
    "a row without tokens": [[1, 1, 1, 1], [0, 0, 0, 0]],
    "too narrow": [[1, 1, 1]],
    "too wide": [[1, 1, 1, 1, 1]],
    "for another batch": [[1, 1, 1, 1]] * 3,
}


@pytest.mark.parametrize("name", MASKS)
def test_only_padding_on_the_left_is_understood(name: str) -> None:
    log = TokenLog()
    mask = torch.tensor(MASKS[name])
    observe(log, tiny.ids(2 if name in ("a row without tokens", "for another batch") else 1, 4), mask, None, 0)
    assert isinstance(log.padding(4), Refusal)


def test_masks_that_are_no_plain_ones_are_not_understood() -> None:
    for mask in (torch.ones(1, 1, 4, 4), {"full_attention": None}):
        log = TokenLog()
        observe(log, tiny.ids(1, 4), mask, None, 0)
        assert isinstance(log.padding(4), Refusal)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_masks_may_be_of_any_type(dtype: torch.dtype) -> None:
    log = TokenLog()
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    observe(log, tiny.ids(2, 3), mask.to(dtype), numbered(mask, 3), 0)
    assert log.padding(3) == [2, 0]


LATER = {
    "padding among later tokens": torch.tensor([[0, 1, 1, 0, 1]]),
    "an earlier token left out": torch.tensor([[0, 0, 1, 1, 1]]),
    "padding looked at after all": torch.tensor([[1, 1, 1, 1, 1]]),
    "no mask any more": None,
}


@pytest.mark.parametrize("name", LATER)
def test_a_later_mask_that_says_something_else_of_the_tokens_is_noticed(name: str) -> None:
    for later, expected in ((torch.tensor([[0, 1, 1, 1, 1]]), [1]), (LATER[name], None)):
        log = TokenLog()
        observe(log, tiny.ids(1, 3), torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, 1]]), 0)
        observe(log, tiny.ids(1, 2), later, torch.tensor([[2, 3]]), 3)
        assert log.padding(5) == expected or (expected is None and isinstance(log.padding(5), Refusal))


@pytest.mark.parametrize("padding", [0, 2])
def test_tokens_that_the_model_numbers_itself_are_known_where_nothing_is_padded(padding: int) -> None:
    mask = torch.tensor([[0] * padding + [1] * (5 - padding)])
    for first, second in ((None, None), (numbered(mask[:, :4], 4), None), (None, numbered(mask, 1))):
        log = TokenLog()
        observe(log, tiny.ids(1, 4), mask[:, :4], first, 0)
        observe(log, tiny.ids(1, 1), mask, second, 4)
        assert log.padding(5) == [0] or (padding and isinstance(log.padding(5), Refusal))


def test_where_keys_have_no_positions_padding_may_be_counted() -> None:
    log = TokenLog(positions_matter=False)
    observe(log, tiny.ids(1, 4), torch.tensor([[0, 0, 1, 1]]), None, 0)
    assert log.padding(4) == [2]


def test_a_pass_that_did_not_run_to_its_end_is_forgotten_by_the_next() -> None:
    log = TokenLog()
    observe(log, tiny.ids(1, 4), None, None, 0)
    observe(log, tiny.ids(1, 3, seed=1), None, None, 4)
    observe(log, tiny.ids(1, 2, seed=2), None, None, 4)
    assert log.padding(6) == [0]
    assert log.rows()[0].tolist() == torch.cat([tiny.ids(1, 4), tiny.ids(1, 2, seed=2)], 1)[0].tolist()


def test_a_pass_without_a_mask_behind_padding_is_not_forgotten_by_the_next() -> None:
    log, mask = TokenLog(), torch.tensor([[0, 1, 1, 1, 1]])
    observe(log, tiny.ids(1, 3), mask[:, :3], None, 0)
    observe(log, tiny.ids(1, 1), None, None, 3)
    observe(log, tiny.ids(1, 1), mask, None, 4)
    assert isinstance(log.padding(5), Refusal)


def test_positions_of_three_axes_are_those_of_text_where_the_axes_agree() -> None:
    for changed, expected in ((0, [0]), (1, None)):
        log, positions = TokenLog(), torch.arange(4).expand(3, 1, 4).clone()
        positions[1, 0, 2] += changed
        observe(log, tiny.ids(1, 4), None, positions, 0)
        assert log.padding(4) == expected or (expected is None and isinstance(log.padding(4), Refusal))


def test_the_six_thousandth_token_costs_as_much_as_the_hundredth() -> None:
    log, token = TokenLog(), torch.zeros(1, 1, dtype=torch.long)

    def seconds(tokens: range) -> float:
        began = time.process_time()
        for seen in tokens:
            observe(log, token, None, None, seen)
        return time.process_time() - began

    seconds(range(100))
    early = seconds(range(100, 600))
    seconds(range(600, 6000))
    assert seconds(range(6000, 6500)) < 5 * early
    assert log.rows()[0].tolist() == [0] * 6500

"""The tokens that a cache was fed, against plain lists of lists."""

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.token_log import TokenLog
from hf_kvcaches.errors import Refusal
from tests import tiny


@dataclass
class Plain:
    """What is to be remembered, slot by slot; None where a pass went by untold."""

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
                log.append(new, plain.seen, mask if any(padding) or data.draw(st.booleans()) else None, positions)
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


def test_a_pass_that_failed_is_forgotten_by_the_next() -> None:
    log = TokenLog()
    log.append(tiny.ids(2, 6), 0)
    log.append(tiny.ids(1, 4), 0)
    log.append(tiny.ids(1, 3, seed=1), 4)
    log.append(tiny.ids(1, 2, seed=2), 4)
    assert log.padding(6) == [0]
    assert log.rows()[0].tolist() == torch.cat([tiny.ids(1, 4), tiny.ids(1, 2, seed=2)], 1)[0].tolist()


def test_tokens_written_into_the_callers_tensors_later_change_nothing() -> None:
    log, buffer, mask = TokenLog(), torch.tensor([[5]]), torch.ones(1, 8, dtype=torch.bool)
    for step in range(3):
        buffer.fill_(5 + step)
        log.append(buffer, step, mask[:, : step + 1].clone() if step == 2 else mask[:, : step + 1])
    buffer.fill_(0)
    assert log.rows()[0].tolist() == [5, 6, 7]
    mask.fill_(False)
    assert log.padding(3) == [0]


AXES = torch.arange(4).expand(3, 1, 4)
APART = AXES + torch.tensor([0, 1, 0])[:, None, None]
# Passes of so many tokens, with a mask and positions, and the padding that is known then.
PASSES: dict[str, tuple[list[tuple[int, Any, Any]], list[int] | None]] = {
    "a hole": ([(4, [[1, 1, 0, 1]], None)], None),
    "padding on the right": ([(4, [[1, 1, 1, 0]], None)], None),
    "a row without tokens": ([(4, [[1, 1, 1, 1], [0, 0, 0, 0]], None)], None),
    "too narrow": ([(4, [[1, 1, 1]], None)], None),
    "too wide": ([(4, [[1, 1, 1, 1, 1]], None)], None),
    "four dimensions": ([(4, torch.ones(1, 1, 4, 4), None)], None),
    "one mask for each kind of layer": ([(4, {"full_attention": None}, None)], None),
    "integers": ([(3, [[0, 0, 1], [1, 1, 1]], [[0, 0, 0], [0, 1, 2]])], [2, 0]),
    "booleans": ([(3, torch.tensor([[False, False, True]]), [[0, 0, 0]])], [2]),
    "numbers": ([(3, torch.tensor([[0.0, 0.0, 1.0]]), [[0, 0, 0]])], [2]),
    "the same later": ([(3, [[0, 1, 1]], [[0, 0, 1]]), (2, [[0, 1, 1, 1, 1]], [[2, 3]])], [1]),
    "padding among later tokens": ([(3, [[0, 1, 1]], [[0, 0, 1]]), (2, [[0, 1, 1, 0, 1]], [[2, 3]])], None),
    "an earlier token left out": ([(3, [[0, 1, 1]], [[0, 0, 1]]), (2, [[0, 0, 1, 1, 1]], [[2, 3]])], None),
    "padding looked at after all": ([(3, [[0, 1, 1]], [[0, 0, 1]]), (2, [[1, 1, 1, 1, 1]], [[2, 3]])], None),
    "no mask any more": ([(3, [[0, 1, 1]], [[0, 0, 1]]), (2, None, [[2, 3]])], None),
    "a pass without a mask behind padding": ([(3, [[0, 1, 1]], None), (1, None, None), (1, [[0, 1, 1, 1, 1]], None)], None),
    "the model numbers tokens itself": ([(4, [[1, 1, 1, 1]], None), (1, [[1, 1, 1, 1, 1]], None)], [0]),
    "it numbers the later ones": ([(4, [[1, 1, 1, 1]], [[0, 1, 2, 3]]), (1, [[1, 1, 1, 1, 1]], None)], [0]),
    "it numbers the first ones": ([(4, [[1, 1, 1, 1]], None), (1, [[1, 1, 1, 1, 1]], [[4]])], [0]),
    "it numbers padding": ([(4, [[0, 1, 1, 1]], None), (1, [[0, 1, 1, 1, 1]], None)], None),
    "it numbers tokens behind padding": ([(4, [[0, 1, 1, 1]], [[0, 0, 1, 2]]), (1, [[0, 1, 1, 1, 1]], None)], None),
    "it numbers padding at first": ([(4, [[0, 1, 1, 1]], None), (1, [[0, 1, 1, 1, 1]], [[3]])], None),
    "three axes of text": ([(4, None, AXES)], [0]),
    "three axes of a picture": ([(4, None, APART)], None),
}


def padding_after(log: TokenLog, passes: list[tuple[int, Any, Any]]) -> list[int] | None:
    """The padding of rows after passes, where it is known."""
    seen = 0
    for tokens, mask, positions in passes:
        mask, positions = (torch.tensor(given) if isinstance(given, list) else given for given in (mask, positions))
        rows = len(mask) if isinstance(mask, torch.Tensor) else 1
        log.append(tiny.ids(rows, tokens), seen, mask, positions)
        seen += tokens
    found = log.padding(seen)
    return None if isinstance(found, Refusal) else found


@pytest.mark.parametrize(("passes", "padding"), PASSES.values(), ids=PASSES)
def test_only_padding_on_the_left_that_no_later_pass_denies_is_understood(passes: Any, padding: list[int] | None) -> None:
    assert padding_after(TokenLog(), passes) == padding


def test_a_mask_for_another_batch_is_not_understood() -> None:
    log = TokenLog()
    log.append(tiny.ids(2, 4), 0, torch.ones(3, 4))
    assert isinstance(log.padding(4), Refusal)


def test_where_keys_have_no_positions_padding_may_be_counted() -> None:
    assert padding_after(TokenLog(positions_matter=False), [(4, [[0, 0, 1, 1]], None)]) == [2]


def test_the_six_thousandth_token_costs_as_much_as_the_hundredth() -> None:
    log, token = TokenLog(), torch.zeros(1, 1, dtype=torch.long)

    def seconds(tokens: range) -> float:
        began = time.process_time()
        for seen in tokens:
            log.append(token, seen)
        return time.process_time() - began

    seconds(range(100))
    early = seconds(range(100, 600))
    seconds(range(600, 6000))
    assert seconds(range(6000, 6500)) < 5 * early
    assert log.rows()[0].tolist() == [0] * 6500


class Interrupted(list):
    """A list of passes in which an interrupt comes right behind what is appended."""

    def append(self, item: torch.Tensor) -> None:
        super().append(item)
        raise KeyboardInterrupt


def test_an_interrupt_while_tokens_are_added_leaves_no_tokens_twice() -> None:
    log = TokenLog()
    log.append(torch.tensor([[1, 2, 3]]), 0)
    log._passes = Interrupted(log._passes)
    with pytest.raises(KeyboardInterrupt):
        log.append(torch.tensor([[4]]), 3)
    log._passes = [*log._passes]
    log.append(torch.tensor([[5]]), 3)
    assert (log.ids.tolist(), len(log), log.padding(4)) == ([[1, 2, 3, 5]], 4, [0])

"""What the head of semantic codes says: which tokens a row has, and of which texts it is a beginning."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.translate.codes import Prompt, SemanticCodes, message_of
from tests.costs import seconds
from tests.translate.code_helpers import codes_of, head_of, json_of, message, refused

# Rows and parts


def test_a_row_is_known_by_its_tokens_whatever_holds_them():
    ids = [5, 0, 4_000_000_000, 17]
    digest = hashlib.blake2b(struct.pack("<4I", *ids), digest_size=16).hexdigest()
    containers = [ids, tuple(ids), np.array(ids), np.array(ids, np.uint32), torch.tensor(ids), np.array(ids, ">i8")]
    assert {Prompt.of(row) for row in containers} == {Prompt(4, digest)}
    assert Prompt.of([]) == Prompt.of(torch.zeros(0, dtype=torch.int64)) == Prompt(0, hashlib.blake2b(digest_size=16).hexdigest())
    assert Prompt.of(range(3)) != Prompt.of([0, 2, 1])


def test_a_head_longer_than_readers_take_is_not_sent():
    with pytest.raises(ConfigError, match="Encode fewer rows"):
        next(message_of(replace(head_of(names=()), prompts=(Prompt.of([1]),) * 70_000), []))


def test_a_batch_of_60_000_rows_can_be_sent():
    head = replace(head_of(names=()), prompts=(Prompt.of([1]),) * 60_000)
    assert SemanticCodes.from_bytes(next(message_of(head, []))).head == head


# The last two are as large as they may be, and only the bytes of the parts are missing.
COSTLY = {
    "prompts": lambda: {"prompts": [[1, "0" * 32]] * 300_000},
    "empty prompts": lambda: {"prompts": [[]] * 4_000_000},
    "a translator of lists": lambda: {"translator": [[]] * 4_000_000},
    "parts": lambda: {"names": [str(name) for name in range(200_000)]},
    "parts with few commas": lambda: {"names": [str(name) for name in range(26_000)]},
    "most parts": lambda: {"names": [str(name) for name in range(1024)]},
    "most prompts": lambda: {"prompts": [[1, "0" * 32]] * 60_000, "names": ["all"]},
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_head_made_to_cost_time_is_refused_within_a_second(name):
    """Few bytes can have many values, and many shapes to be worked out."""
    made = json.loads(json_of(head_of(names=()))) | COSTLY[name]()
    data = message(json.dumps(made, separators=(",", ":")).encode(), [])
    problem = "end in part" if name.startswith("most") else "commas allowed|makes no sense"
    assert seconds(lambda: refused(data, problem)) < 1
    assert len(refused(data, problem)) < 1000


# Beginnings


def begins(row: list[int], text: list[int]) -> bool:
    return Prompt.of(row).begins(np.array(text, np.int64))


@given(data=st.data())
def test_a_text_begins_with_a_row_where_a_comparison_of_both_says_so(data):
    token = st.integers(0, 2) | st.integers(0, (1 << 32) - 1)
    row = data.draw(st.lists(token, max_size=30))
    text = row[: data.draw(st.integers(0, 30))] + data.draw(st.lists(token, max_size=20))
    if text and data.draw(st.booleans()):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(token)
    assert begins(row, text) == (text[: len(row)] == row)
    assert Prompt.of(row).begins(np.array(text, np.uint32)) == begins(row, text)


def test_a_row_that_was_sent_still_knows_its_text():
    head = SemanticCodes.from_bytes(codes_of(head_of(lengths=(20, 9))).to_bytes()).head
    assert [row.begins(np.arange(20)) for row in head.prompts] == [True, False]
    assert [row.begins(np.arange(7, 30)) for row in head.prompts] == [False, True]

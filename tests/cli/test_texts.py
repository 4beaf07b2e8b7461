"""Texts, prompts and pairs come from files as people have them."""

import pytest

from hf_kvcaches.cli import texts
from hf_kvcaches.errors import ConfigError
from tests import testbed


@pytest.fixture(scope="module")
def tokenizer():
    return testbed.load()[1]


def test_lines_of_a_file_are_texts_or_ids_and_a_wrong_one_is_named(tokenizer, tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text('"a b"\n\n[1, 2]\n{"text": "c", "more": 1}\n')
    assert texts.read_texts(file, tokenizer, 8) == ["a b", [1, 2], "c"]
    for line in ("{", "3", '{"prompt": "a"}', '["a"]', "[true]"):
        file.write_text(f'"a"\n{line}\n')
        with pytest.raises(ConfigError, match=r"some\.jsonl, line 2"):
            texts.read_texts(file, tokenizer, 8)


def test_a_text_file_is_cut_into_pieces_and_a_short_rest_is_left_out(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(testbed.held_out("prose")[:2000])
    ids = tokenizer((tmp_path / "a.txt").read_text(), verbose=False)["input_ids"]
    found = texts.read_texts(tmp_path / "a.txt", tokenizer, 50)
    assert [len(piece) for piece in found[:-1]] == [50] * (len(found) - 1)
    assert 25 <= len(found[-1]) <= 50
    assert [token for piece in found for token in piece] == ids[: sum(map(len, found))]
    assert texts.pieces("short", tokenizer, 500) == [tokenizer("short")["input_ids"]]


def test_texts_are_taken_from_all_over():
    assert texts.spaced([[number] for number in range(10)], 3) == [[0], [3], [6]]
    assert texts.spaced([[1], [2]], 3) == [[1], [2]]


def test_pairs_are_read_as_text_and_as_ids(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"source": "The day", "target": [5, 6]}\n\n{"target": "x", "source": [7], "note": 1}\n')
    assert texts.read_pairs(file) == [("The day", [5, 6]), ([7], "x")]
    for line in ('{"source": "a", "target": 3}', '["a", "b"]', "{", '{"source": ["a"], "target": "b"}'):
        file.write_text(f'{{"source": "a", "target": "b"}}\n{line}\n')
        with pytest.raises(ConfigError, match="line 2"):
            texts.read_pairs(file)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        texts.read_text(tmp_path / "a.txt")

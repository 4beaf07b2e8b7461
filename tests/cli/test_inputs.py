"""Texts, prompts and pairs come from files as people have them."""

import pytest

from hf_kvcaches.cli import inputs
from hf_kvcaches.errors import ConfigError
from tests import testbed


@pytest.fixture(scope="module")
def tokenizer():
    return testbed.load()[1]


PAIRS = '{"source": "The day", "target": [5, 6]}\n\n{"target": "x", "source": [7], "note": 1}'
NO_PAIRS = ('{"source": "a", "target": 3}', '["a", "b"]', "{", '{"source": ["a"], "target": "b"}', '{"source": "a"}')
TEXTS, NO_TEXTS = '"a b"\n\n[1, 2]\n{"text": "c", "more": 1}', ("{", "3", '{"prompt": "a"}', '["a"]', "[true]")


@pytest.mark.parametrize(
    ("names", "lines", "expected", "wrong"),
    [
        (["text"], TEXTS, [["a b"], [[1, 2]], ["c"]], NO_TEXTS),
        (["source", "target"], PAIRS, [["The day", [5, 6]], [[7], "x"]], NO_PAIRS),
    ],
)
def test_lines_of_a_file_are_texts_or_ids_and_a_wrong_one_is_named(names, lines, expected, wrong, tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text(f"{lines}\n")
    assert inputs.read_lines(file, *names) == expected
    for line in wrong:
        file.write_text(f"{lines}\n{line}\n")
        with pytest.raises(ConfigError, match=rf"some\.jsonl, line {lines.count(chr(10)) + 2}"):
            inputs.read_lines(file, *names)


def test_a_text_file_is_cut_into_pieces_and_a_short_rest_is_left_out(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(testbed.held_out("prose")[:2000])
    (tmp_path / "b.txt").write_text("short")
    (tmp_path / "c.jsonl").write_text('"as it is"\n')
    ids = tokenizer((tmp_path / "a.txt").read_text(), verbose=False)["input_ids"]
    *found, short, text = inputs.read_texts([tmp_path / name for name in ("a.txt", "b.txt", "c.jsonl")], tokenizer, 50)
    assert [len(piece) for piece in found[:-1]] == [50] * (len(found) - 1)
    assert 25 <= len(found[-1]) <= 50
    assert [token for piece in found for token in piece] == ids[: sum(map(len, found))]
    assert (short, text) == (tokenizer("short")["input_ids"], "as it is")


def test_texts_are_taken_from_all_over():
    assert inputs.spaced([[number] for number in range(10)], 3) == [[0], [3], [6]]
    assert inputs.spaced([[1], [2]], 3) == [[1], [2]]


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        inputs.read_text(tmp_path / "a.txt")

"""What the index compares: masks by example, shingles against runs of words cut by hand."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError, MissingDependencyError
from hf_kvcaches.segments.canonical import PLACEHOLDER, Signer, canonical
from tests.costs import seconds

MASKED = [
    "2024-01-02",
    "2024-01-02T10:20:30Z",
    "2024-01-02 10:20:30.123+02:00",
    "2024-01-02 10:20 UTC",
    "2024/1/2",
    "2024.01.02",
    "1/2/2024",
    "01.02.2024",
    "31/12/24",
    "26 Jul 2024",
    "26-Jul-2024",
    "3rd March",
    "December 2023",
    "Sept. 5, 2024",
    "Monday, January 12, 2024",
    "Mon, 12 Jan 2024",
    "10:20",
    "10:20:30,123",
    "9:05 p.m.",
    "9:05pm",
    "123e4567-e89b-12d3-a456-426614174000",
    "0xDEADBEEF",
    "0x1f",
    "deadbeef42",
    "0123abcd",
    "12345",
    "20240102102030",
]
KEPT = [*"1234 deadbeef facade abc123 1.2.3 3.14 a12345b x_12345 24-7 10:2 2024 sunday 0x abcd-1234".split(), "may be"]


@pytest.mark.parametrize("text", MASKED)
def test_what_changes_from_day_to_day_is_masked_whole(text: str) -> None:
    assert canonical(f"at {text}, then ({text})\n{text}") == f"at {PLACEHOLDER}, then ({PLACEHOLDER}) {PLACEHOLDER}"


@pytest.mark.parametrize("text", KEPT)
def test_what_only_looks_like_it_is_kept(text: str) -> None:
    assert canonical(f"at {text} then") == f"at {text} then"


def test_case_and_white_space_do_not_count() -> None:
    assert canonical("  The\r\n\tQuick\u00a0\u2003 fox ") == "the quick fox"


PIECES = [*MASKED, *KEPT, *"0159aefzTZ:-+./,_ \n\0¤é中İΣ\u0661\ud800", "10:", " pm", "12", "jan", "\U000f0007", "¹", "  "]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join) | st.text(max_size=30)


@given(text=TEXTS)
@example("10:30:99999 1/2/2024-10:20 p.m.12345")
def test_canonical_twice_is_as_once(text: str) -> None:
    assert canonical(canonical(text)) == canonical(text)


def words_of(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+|\d+|\S", canonical(text))


def runs_of(words: list, length: int) -> list[tuple]:
    """The shingles of a span as runs of words."""
    if len(words) < length:
        return [tuple(words)] if words else []
    return [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]


def assert_same_up_to_names(hashes: list[np.ndarray], runs: list[list[tuple]]) -> None:
    """Each run of words has one hash and each hash one run."""
    assert [len(some) for some in hashes] == [len(some) for some in runs]
    pairs = {(int(value), run) for some, others in zip(hashes, runs, strict=True) for value, run in zip(some, others, strict=True)}
    assert len(pairs) == len({value for value, _ in pairs}) == len({run for _, run in pairs})


def prompt(texts: list[str]) -> tuple[list[int], list[tuple[int, int]]]:
    """The texts behind each other with a token for each character, and where each is."""
    edges = np.cumsum([0, *map(len, texts)]).tolist()
    return [ord(char) for char in "".join(texts)], list(itertools.pairwise(edges))


def characters(ids: list[int]) -> list[str]:
    """What such tokens are pieces of."""
    return [chr(token) for token in ids]


@given(texts=st.lists(TEXTS, max_size=5), length=st.sampled_from([1, 2, 8]))
@example(texts=["on Monday, January  12,\n2024 at 9:05 p.m. utc in 1 2 3 4 5 6 fri, 2024-01-02", "x 12:30"], length=2)
def test_shingles_are_runs_of_words_of_the_canonical_text(texts: list[str], length: int) -> None:
    texts = [text.replace("\0", " ") for text in texts]
    hashes = Signer(characters, shingle=length).shingles(*prompt(texts))
    assert all(some.dtype == np.uint32 for some in hashes)
    assert_same_up_to_names(hashes, [runs_of(words_of(text), length) for text in texts])


@given(ids=st.lists(st.integers(0, 4) | st.integers(-(2**40), 2**40), max_size=30), length=st.sampled_from([1, 3]), data=st.data())
def test_without_a_tokenizer_shingles_are_runs_of_tokens(ids: list[int], length: int, data: st.DataObject) -> None:
    places = st.integers(0, len(ids))
    spans = data.draw(st.lists(st.tuples(places, places).map(lambda pair: (min(pair), max(pair))), max_size=4))
    hashes = Signer(shingle=length).shingles(np.array(ids, dtype=np.int64), spans)
    assert_same_up_to_names(hashes, [runs_of(ids[start:stop], length) for start, stop in spans])
    assert [some.tolist() for some in Signer(shingle=length).shingles(ids, spans)] == [some.tolist() for some in hashes]


@given(texts=st.lists(TEXTS, min_size=1, max_size=5))
def test_a_span_has_the_same_signature_alone_and_in_any_prompt(texts: list[str]) -> None:
    signer = Signer(characters, shingle=2, permutations=8)
    for text, signature in zip(texts, signer.of(*prompt(texts)), strict=True):
        assert (signer.of(*prompt([text])) == signature).all()


def test_token_0_is_a_word_like_others() -> None:
    hashes = Signer().shingles([5, 0, 0], [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)])
    assert len({int(value) for [value] in hashes}) == 5


def test_the_left_context_is_what_stands_before_a_place_and_no_more_than_asked() -> None:
    ids = [ord(char) for char in "one two three four five six"]
    signer = Signer(characters, left=10, shingle=2)
    assert (signer.left_of(ids, [0, 5, 20, 27]) == signer.of(ids, [(0, 0), (0, 5), (10, 20), (17, 27)])).all()
    assert signer.left_of(ids, []).shape == (0, 64)


def test_spans_may_be_empty_and_none_at_all() -> None:
    for signer in (Signer(), Signer(characters)):
        assert signer.of([], []).shape == (0, 64)
        assert (signer.of([], [(0, 0)]) == 2**32 - 1).all()
        assert (signer.of([65, 66], [(1, 1), (0, 2), (2, 2)])[[0, 2]] == 2**32 - 1).all()


def test_near_duplicates_are_similar_and_strangers_are_not() -> None:
    words = "the keeper of these records gives short answers and never invents any when asked about lions ships or castles by night".split()
    text = " ".join(words * 2)
    changed = " ".join([*words, *words[:-1], "day"])
    other = " ".join(sorted(words * 2))
    dated = [f"{text} on 2024-01-0{day} at 1{day}:00, job 12{day}45{day}7" for day in (1, 2)]
    made = Signer(characters, permutations=256).of(*prompt([text, changed, other, *dated]))
    assert (made[0] == made[1]).mean() > 0.6
    assert (made[0] == made[2]).mean() < 0.05
    assert (made[3] == made[4]).all()


def test_signatures_are_the_same_in_every_version() -> None:
    # They are stored, and compared with those of other processes.
    (made,) = Signer(shingle=1, permutations=4).of([1, 2, 3], [(0, 3)]).tolist()
    assert made == [2195742327, 1920257091, 706814468, 467807341]


def test_without_datasketch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(MissingDependencyError, match=r"hf-kvcaches\[retrieval\]"):
        Signer()


def test_hashes_are_the_same_in_every_process_and_version() -> None:
    script = (
        "from hf_kvcaches.segments.canonical import Signer\n"
        "text = 'Zoë paid 12 €, 2024-01-01. Naïve 中文!'\n"
        "signer = Signer(lambda ids: [chr(i) for i in ids], shingle=3)\n"
        "print(signer.shingles([ord(c) for c in text], [(0, len(text))])[0][:3].tolist())\n"
        "print(Signer(shingle=3).shingles([1, 2, 3, 4], [(0, 4)])[0].tolist())\n"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("0", "1")
    }
    assert outputs == {"[2297772746, 1780390330, 1084605556]\n[547016549, 3333414149]\n"}


NASTY = ["a", "1", "12:30 ", "12:30" + " " * 50, "jan ", "abcdef0", "0x", "-", "mon, ", "1 ", "\n", "deadbeef-", "12345678-1234-"]


@pytest.mark.parametrize("part", NASTY)
def test_the_time_grows_with_the_length_and_no_faster(part: str) -> None:
    text = part * (100_000 // len(part))
    ids = [ord(char) for char in text]
    signer = Signer(characters)
    assert seconds(lambda: (canonical(text), signer.of(ids, [(0, len(ids))])), times=1) < 3


@pytest.mark.parametrize("changes", [{"shingle": 0}, {"shingle": 2.5}, {"left": 0}, {"left": True}, {"permutations": 0}])
def test_a_signer_refuses_what_makes_no_sense(changes: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Signer(**changes)

"""Where rows are cut: the rule against a slow reading of it, locality by shuffling blocks, and structure by example."""

from __future__ import annotations

import copy
import itertools
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.segments.discovery import Discovery
from tests import testbed
from tests.costs import seconds

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)


@cache
def tokenizer_of_testbed() -> Any:
    return AutoTokenizer.from_pretrained(testbed.FOLDER / "base")


def with_template(template: str, *special: str) -> Any:
    tokenizer = copy.deepcopy(tokenizer_of_testbed())
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


@cache
def sentencepiece_like() -> Any:
    """Spaces as ▁, one put in front of every text; what it doesn't know, line ends among it, as bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    prose = testbed.held_out()[:20_000].replace("\n", " ")
    tokenizer.train_from_iterator([prose], trainers.BpeTrainer(vocab_size=900, special_tokens=tokens, show_progress=False))
    # As in the models' own files: bytes are tokens like others.
    fresh = Tokenizer.from_str(tokenizer.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=fresh, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def bytes_only() -> Any:
    """A token for each byte."""
    vocabulary = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def encoded(text: str, tokenizer: Any = None) -> list[int]:
    return list((tokenizer or tokenizer_of_testbed()).encode(text, add_special_tokens=False))


def texts_of(discovery: Discovery, text: str, tokenizer: Any = None) -> list[str]:
    """The texts of the spans."""
    ids = encoded(text, tokenizer)
    pieces = discovery.pieces(ids)
    return ["".join(pieces[start:stop]) for start, stop in discovery.spans(ids)]


def assert_partition(spans: list[tuple[int, int]], length: int) -> None:
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans)][: len(spans)]
    assert (spans[-1][1] if spans else 0) == length
    assert all(start < stop for start, stop in spans)


# --- the rule ------------------------------------------------------------------------------------------------------------------------


def slow_spans(sections: list[list[int]], shortest: int, longest: int) -> list[int]:
    """The sizes of the spans that the rule gives, from the sizes of blocks in sections between walls."""

    def windows(size: int) -> list[int]:
        whole, rest = divmod(size, longest)
        return [longest] * whole + [rest] * (rest > 0)

    out: list[int] = []
    for section in sections:
        for is_long, near in itertools.groupby(section, lambda size: size >= shortest):
            joined = 0
            for size in near:
                joined += size
                if joined >= shortest:
                    out += windows(joined)
                    joined = 0
            out += windows(joined)
            assert not (is_long and joined)
    return out


BLOCK = st.integers(2, 5) | st.integers(2, 12) | st.integers(2, 60)
SECTIONS = st.lists(st.lists(BLOCK, min_size=1, max_size=7), min_size=1, max_size=3)


@given(sections=SECTIONS, sizes=st.sampled_from([(16, 128), (8, 8), (6, 9), (5, 30), (1, 3), (20, 21)]))
def test_spans_follow_from_blocks_and_walls_as_the_docstring_says(sections: list[list[int]], sizes: tuple[int, int]) -> None:
    # A token for each character. A block ends in a blank line, a section begins with a separator.
    blocks = [["x" * size + "\n\n" for size in section] for section in sections]
    for section in blocks:
        section[0] = "@" + section[0]
    text = "".join(block for section in blocks for block in section)
    shortest, longest = sizes
    spans = Discovery(bytes_only(), separators=["@"], shortest=shortest, longest=longest).spans(encoded(text, bytes_only()))
    expected = slow_spans([[len(block) for block in section] for section in blocks], shortest, longest)
    assert [stop - start for start, stop in spans] == expected


# Their first and last blocks, between blank lines, are long enough to stand for themselves.
LONG = [
    '{\n  "name": "find_person",\n  "about": "it has { in it",\n  "arguments": {\n    "name": "string"\n  }\n}\n\n',
    "<doc id='1'>\nThe keeper of these records gives short answers.\nHe never invents any.\n\n"
    "Ask him by day, and never by night or at dawn.\n<p>And be polite.\n</doc>\n\n",
    "```python\ndef find(name):\n    # not a heading\n    return archive.get(name, None)\n\n"
    "# nor this one\nfor name in names:\n    print(find(name))\n```\n\n",
    "- The sign of Emma is red, and her mark is the lion\n- The token of Ruth is green, and so is her badge\n- Ivan has none\n\n",
    " ".join(testbed.held_out()[:1500].split()) + "\n\n",
]
SHORT = ["Notes:\n\n", "## Tools\n\n", "{}\n\n", "Q: who?\nA: me.\n\n", 'Say "no\n\n']


@cache
def discovery_of(shortest: int, longest: int) -> Discovery:
    return Discovery(tokenizer_of_testbed(), shortest=shortest, longest=longest)


@given(chosen=st.lists(st.sampled_from([*LONG, *SHORT]), min_size=1, max_size=9), longest=st.sampled_from([128, 40]))
def test_a_block_is_cut_in_the_same_way_wherever_it_stands(chosen: list[str], longest: int) -> None:
    discovery = discovery_of(16, longest)
    row: list[int] = []
    alone: list[tuple[int, int]] = []
    for text in chosen:
        ids = encoded(text)
        if text in LONG:
            alone += [(start + len(row), stop + len(row)) for start, stop in discovery.spans(ids)]
        row += ids
    spans = discovery.spans(row)
    assert_partition(spans, len(row))
    assert not [span for span in alone if span not in spans]


@given(
    texts=st.lists(st.sampled_from([*LONG, *SHORT]), max_size=4),
    odd=st.lists(st.integers(0, 2047) | st.sampled_from([0, 1, 2, 5000, 10**9, 2**40, -1]), max_size=30),
    edges=st.lists(st.integers(0, 300), max_size=8),
    with_tokenizer=st.booleans(),
)
def test_any_row_falls_into_spans_and_given_ones_are_kept(texts: list[str], odd: list[int], edges: list[int], with_tokenizer: bool) -> None:
    ids = [*odd, *encoded("".join(texts)), *odd]
    discovery = Discovery(tokenizer_of_testbed() if with_tokenizer else None, shortest=16, longest=40)
    edges = sorted(min(edge, len(ids)) for edge in edges)
    given_spans = list(zip(edges[::2], edges[1::2], strict=False))
    spans = discovery.spans(ids, given_spans[::-1])
    assert_partition(spans, len(ids))
    walls = [pair for pair in given_spans if pair[0] < pair[1]]
    assert [span for span in spans if span in walls] == walls
    assert all(stop - start <= 40 for start, stop in spans if (start, stop) not in walls)
    # What stands between two given spans is cut as if there were nothing else, up to the structure that goes across.
    if not with_tokenizer:
        for before, after in itertools.pairwise([(0, 0), *walls, (len(ids), len(ids))]):
            gap = [stop - start for start, stop in spans if before[1] <= start < after[0]]
            assert gap == [stop - start for start, stop in discovery.spans(ids[before[1] : after[0]])]


# --- structure -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "special", "cut"),
    [
        (
            CHATML,
            ["<|im_start|>", "<|im_end|>"],
            [
                "<|im_start|>system\nYou are a careful assistant who reads.\n\n",
                "All of the tools are listed below, in order.\n\n",
                '{"name": "find", "place": "here"}\n<|im_end|>\n',
                "<|im_start|>user\nThe lion is red and the bear is green. What is x?<|im_end|>\n",
                "<|im_start|>assistant\n",
            ],
        ),
        (
            LLAMA3,
            ["<|start|>", "<|end|>", "<|eot|>"],
            [
                "<s><|start|>system<|end|>\n\n",
                "You are a careful assistant who reads.\n\n",
                "All of the tools are listed below, in order.\n\n",
                '{"name": "find", "place": "here"}<|eot|>',
                "<|start|>user<|end|>\n\n",
                "The lion is red and the bear is green. What is x?<|eot|>",
                "<|start|>assistant<|end|>\n\n",
            ],
        ),
    ],
)
def test_a_prompt_is_cut_at_messages_and_blank_lines(template: str, special: list[str], cut: list[str]) -> None:
    tokenizer = with_template(template, *special)
    discovery = Discovery(tokenizer, shortest=8)
    told = "You are a careful assistant who reads.\n\nAll of the tools are listed below, in order.\n\n"
    told += '{"name": "find", "place": "here"}\n'
    messages = [{"role": "system", "content": told}, {"role": "user", "content": "The lion is red and the bear is green. What is x?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert texts_of(discovery, text, tokenizer) == cut


@pytest.mark.parametrize(
    ("template", "special"),
    [
        (CHATML, ["<|im_start|>", "<|im_end|>"]),
        (LLAMA3, ["<|start|>", "<|end|>", "<|eot|>"]),
        (GEMMA, ["<turn>", "</turn>"]),
    ],
)
def test_no_segment_has_parts_of_two_chat_messages_however_short_they_are(template: str, special: list[str]) -> None:
    tokenizer = with_template(template, *special)
    contents = [f"This message has number {place}." for place in range(4)]
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    spans = texts_of(Discovery(tokenizer), tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), tokenizer)
    assert [next(content for content in contents if content in span) for span in spans[:-1]] == contents
    assert spans[-1].startswith(special[0]), "the beginning of the answer"


def test_added_tokens_that_are_not_special_separate_no_messages() -> None:
    tokenizer = copy.deepcopy(tokenizer_of_testbed())
    tokenizer.add_tokens(["<td>", "</td>"])
    cells = "".join(f"<td>The cell {place}.</td>" for place in range(30))
    spans = Discovery(tokenizer).spans(encoded(cells, tokenizer))
    assert all(stop - start >= 64 for start, stop in spans[:-1])


def test_a_place_inside_of_a_token_counts_as_before_it() -> None:
    discovery = Discovery(tokenizer_of_testbed(), shortest=1)
    [token] = encoded(" the")
    assert discovery.pieces([token]) == [" the"]
    assert texts_of(discovery, "one two\n\n the\n\n the") == ["one two\n\n", " the\n\n", " the"]


def test_separators_stay_with_what_follows_them_and_nothing_is_put_together_across() -> None:
    discovery = Discovery(bytes_only(), separators=["##", "###", "\n@"], shortest=10)
    found = texts_of(discovery, "one two three four###a#b##c\n@ five six seven", bytes_only())
    assert found == ["one two three four", "###a#b", "##c", "\n@ five six seven"]


def test_without_a_tokenizer_there_are_windows_and_given_spans() -> None:
    spans = Discovery(longest=100, shortest=10).spans(list(range(350)), [(120, 125), (125, 340)])
    assert spans == [
        (0, 100),
        (100, 120),
        (120, 125),
        (125, 340),
        (340, 350),
    ]


# --- text ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tokenizer_of_testbed, sentencepiece_like, bytes_only])
@pytest.mark.parametrize("text", [testbed.held_out()[:3000], " leading  and  double spaces\n\n\ttabs {}[]<> end ", "a\nb", ""])
def test_the_text_of_a_row_is_what_was_encoded(make: Any, text: str) -> None:
    ids = encoded(text, make())
    discovery = Discovery(make())
    found, pieces = discovery.text(ids), discovery.pieces(ids)
    # A tokenizer of that kind may put one space in front of all.
    assert found in (text, f" {text}")
    assert "".join(pieces) == found
    assert len(pieces) == len(ids)


def test_unknown_ids_and_no_ids_have_no_text() -> None:
    discovery = discovery_of(16, 128)
    assert discovery.text([10**7, -5, 2**63]) == discovery.text([]) == ""
    assert discovery.spans([]) == []


def test_blank_lines_are_found_where_line_ends_are_bytes() -> None:
    tokenizer = sentencepiece_like()
    found = texts_of(Discovery(tokenizer, shortest=4), "one of the things\n\nTitle of it all\n\nis here and there", tokenizer)
    assert [text.strip() for text in found] == ["one of the things", "Title of it all", "is here and there"]


@pytest.mark.parametrize(
    ("given_spans", "words"),
    [
        ([(0, 5), (4, 8)], "don't overlap"),
        ([(-1, 3)], "within the 10 tokens"),
        ([(3, 11)], "within"),
        ([(5, 4)], "within"),
        ([(2, 4)] * 2, "overlap"),
    ],
)
def test_given_spans_that_overlap_or_lie_outside_are_refused(given_spans: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Discovery().spans(list(range(10)), given_spans)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"separators": "##"}, "separators"),
        ({"separators": [""]}, "separators"),
        ({"separators": ["##"]}, "Pass the tokenizer"),
    ],
)
def test_a_discovery_refuses_what_makes_no_sense(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Discovery(**changes)


@pytest.mark.parametrize("part", ["{\n", "<a>\n</b>", "\n```", "\n", " \n", "\n ", "x"])
def test_the_time_grows_with_the_length_and_no_faster(part: str) -> None:
    discovery = Discovery(bytes_only(), separators=["##"])
    ids = encoded(part, bytes_only()) * (60_000 // len(part))
    assert seconds(lambda: discovery.spans(ids), times=1) < 3

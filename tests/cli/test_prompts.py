"""Prompts are the same for the same seed, hold what they promise, and begin as the tokenizer begins a text."""

import pytest

from hf_kvcaches.cli import prompts
from hf_kvcaches.errors import ConfigError
from tests import testbed

TOKENIZER = testbed.load("base")[1]


@pytest.mark.parametrize("kind", prompts.NEEDLE_KINDS)
@pytest.mark.parametrize("needles", [1, 4])
def test_a_needle_is_in_its_context_and_its_question_does_not_tell_it(kind: str, needles: int) -> None:
    for prompt in prompts.needle_prompts(TOKENIZER, 3, kind, needles, tokens=300, prose=testbed.held_out()):
        *asked, (first, follows) = prompt.asked
        context, question, answer = (TOKENIZER.decode(ids) for ids in (prompt.context, *asked[0]))
        assert answer.strip() in context
        assert answer.strip() not in question
        assert context.count("works as a" if kind == "words" else "secret key number") == needles
        assert 250 < len(prompt.context) < 350
        assert len(asked) == needles
        prose = " ".join(testbed.held_out().split())
        assert TOKENIZER.decode(prompt.context[-8:] + first + follows).strip() in prose


def test_needles_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    first, again, other = (prompts.needle_prompts(TOKENIZER, 2, "digits", seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert first[0] != first[1]


def test_requests_of_an_agent_share_their_system_text_and_have_pages_in_other_orders() -> None:
    first, second, *_ = texts = [TOKENIZER.decode(ids) for ids in prompts.agent_prompts(TOKENIZER, 4, pages=3, pool=4, page_tokens=40)]
    assert len({text.split("# Page")[0] for text in texts}) == 1
    assert first != second
    pages = [page for text in texts for page in text.split("\n\n")[1:4]]
    assert len(set(pages)) == 4


@pytest.mark.parametrize(("kind", "others"), [("words", (1, 4)), ("paragraph", (1, 1)), ("pages", (3, 3))])
def test_pairs_differ_in_what_their_kind_says(kind: str, others: tuple[int, int]) -> None:
    for pair in prompts.prompt_pairs(TOKENIZER, 3, kind, pages=6, page_tokens=40):
        earlier, later = (TOKENIZER.decode(ids).split("\n\n") for ids in pair)
        changed = sum(before != after for before, after in zip(earlier, later, strict=True))
        assert others[0] <= changed <= others[1]
        assert earlier[-1] == later[-1] or kind == "words"


class Beginning:
    """A tokenizer that begins a text with one token, and ends it with another."""

    bos_token_id, eos_token_id = 2, 1

    def decode(self, ids: list[int]) -> str:
        return " ".join("x" * (token - 10) for token in ids)

    def __call__(self, text: str, add_special_tokens: bool, **_: object) -> dict[str, list[int]]:
        ids = [10 + len(word) for word in text.split()]
        return {"input_ids": [2, *ids, 1] if add_special_tokens else ids}


def test_a_prompt_begins_as_the_tokenizer_begins_a_text_and_a_question_does_not() -> None:
    [prompt] = prompts.needle_prompts(Beginning(), 1, "words", tokens=60)
    assert prompt.context[0] == 2
    assert prompt.context[-1] != 1
    assert prompt.asked[0][0][0] != 2


def test_prose_without_sentences_is_refused() -> None:
    with pytest.raises(ConfigError, match="prose"):
        prompts.needle_prompts(TOKENIZER, 1, "digits", prose="")

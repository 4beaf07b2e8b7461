"""The digest under which segments and warm starts of a tokenizer are stored."""

import copy
import time

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_kvcaches.core.tokenizer_digest import digest_of_tokenizer
from tests.core.fingerprint_helpers import tokenizer


def of_words(vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="a")), unk_token="a")


def test_a_tokenizer_that_is_loaded_again_has_the_same_digest_and_one_that_is_used_too(tmp_path):
    words = tokenizer()
    before = digest_of_tokenizer(words)
    words("some text", padding="max_length" if words.pad_token else False, truncation=True, max_length=4)
    words.save_pretrained(tmp_path)
    assert digest_of_tokenizer(words) == before
    assert digest_of_tokenizer(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == before


@pytest.mark.parametrize(
    "vocabulary",
    [{"a": 1, "b": 0}, {"a": 0, "c": 1}, {"ab": 0, "": 1}, {"a": 0, "b": 2}, {"a": 0, "b": 1, "c": 2}],
    ids=["other order", "another word", "another cut", "gap", "one more"],
)
def test_each_word_and_its_id_count(vocabulary):
    assert digest_of_tokenizer(of_words(vocabulary)) != digest_of_tokenizer(of_words({"a": 0, "b": 1}))


def test_a_vocabulary_of_200_000_words_is_read_once():
    words = of_words({"a": 0} | {f"word{number}": number for number in range(1, 200_000)})

    def seconds(call) -> float:
        began = time.process_time()
        call()
        return time.process_time() - began

    first = seconds(lambda: digest_of_tokenizer(words))
    assert first < 3
    assert seconds(lambda: digest_of_tokenizer(words)) < first / 5


def test_a_tokenizer_without_a_serialisation_has_a_digest_too():
    class Slow:
        chat_template, special_tokens_map, added_tokens_decoder = None, {}, {}

        def __init__(self, vocabulary):
            self.vocabulary = vocabulary

        def get_vocab(self):
            return self.vocabulary

        def __call__(self, text):
            return {"input_ids": [0]}

    one, same, other = Slow({"a": 0}), Slow({"a": 0}), Slow({"b": 0})
    assert digest_of_tokenizer(one) == digest_of_tokenizer(copy.copy(same)) != digest_of_tokenizer(other)

"""In settings that lose nothing every cache gives the logits and the greedy text of `DynamicCache` on real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvcaches import CacheTranslator, SegmentReuseCache, SegmentStore, TranslatedCache, TranslatorConfig, compat, per_call
from tests import testbed
from tests.real.exactness import CACHES, TOLERANCE, Written, assert_same, encode, full_cache, write

PROSE = testbed.held_out()
TEXTS = ("The harbour lay quiet, and", PROSE[3000:3400], PROSE[9000:9800])
QUESTIONS = ("Name three things that are red.", "Which of them can be eaten?", "Write one sentence about it.")


@pytest.fixture(params=CACHES)
def make(request, real):
    return CACHES[request.param](real)


def chat(real: Any, cache: Any) -> list[Written]:
    """What the model writes in each of three turns.

    The chat template renders the whole talk anew in each turn. A model without one gets its own tokens again: it was not trained to
    write what reads back as the same tokens.
    """
    template, talk, turns, ids = real.tokenizer.chat_template, [], [], list[int]()
    for question in QUESTIONS:
        talk.append({"role": "user", "content": question})
        if template is None:
            ids += real.tokenizer(f"\nUser: {question}\nAssistant:", add_special_tokens=not ids)["input_ids"]
        else:
            text = real.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
            ids = real.tokenizer(text, add_special_tokens=False)["input_ids"]
        turns.append(write(real, {"input_ids": torch.tensor([ids])}, cache))
        ids = ids + turns[-1].tokens[0].tolist()
        talk.append({"role": "assistant", "content": real.tokenizer.decode(turns[-1].tokens[0], skip_special_tokens=True)})
    return turns


@pytest.fixture(scope="session")
def expected(real) -> dict[str, Any]:
    """What `DynamicCache` gives."""
    rows, long = encode(real, TEXTS), encode(real, TEXTS[2:])
    return {
        "batch": write(real, rows, full_cache(real)),
        "long": write(real, long, full_cache(real)),
        "chat": chat(real, full_cache(real)),
    }


def test_a_left_padded_batch(real, make, expected):
    assert_same(write(real, encode(real, TEXTS), make()), expected["batch"])


def test_a_chat_of_three_turns(real, make, expected):
    for actual, turn in zip(chat(real, make()), expected["chat"], strict=True):
        assert_same(actual, turn)


def test_a_prompt_in_chunks(real, make, expected):
    assert_same(write(real, encode(real, TEXTS[2:]), make(), prefill_chunk_size=64), expected["long"])


def test_a_second_request(real, make, expected):
    for _ in range(2):
        assert_same(write(real, encode(real, TEXTS[2:]), make()), expected["long"])


@pytest.mark.parametrize("name", ["growing", "segments"])
@pytest.mark.parametrize("argument", ["past_key_values", "cache"])
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
def test_both_names_of_the_argument(real, expected, name, argument):
    if argument == "cache" and compat.GENERATE_CACHE != "cache":
        pytest.skip("this version of transformers has one name")
    inputs, make = encode(real, TEXTS[2:]), CACHES[name](real)
    assert_same(write(real, inputs, **{argument: make()}), expected["long"])
    with torch.no_grad():
        logits = real.model(**inputs, **{argument: make()}, use_cache=True, logits_to_keep=1).logits
    assert float((logits[0, -1] - expected["long"].logits[0, 0]).abs().max()) <= TOLERANCE


def test_a_cache_for_each_call(real, expected):
    store = SegmentStore("memory", quantization=None)
    for _ in range(2):
        assert_same(
            write(real, encode(real, TEXTS[2:]), custom_generate=per_call(SegmentReuseCache, store, real.tokenizer)), expected["long"]
        )
    assert store.report().segments > 0


@pytest.mark.parametrize("name", ["segments", "warmstart"])
def test_a_common_prefix_is_reused_and_exact(real, name):
    make = CACHES[name](real)
    first, second = (encode(real, [f"{PROSE[5000:6500]}\n\n{question}"]) for question in QUESTIONS[:2])
    write(real, first, make())
    cache = make()
    assert_same(write(real, second, cache), write(real, second, full_cache(real)))
    assert cache.report().reused_tokens > 0.8 * second["input_ids"].shape[1]


def test_codes_of_a_consumer_that_runs_all_layers_but_one(real, expected):
    """Keys and values of layers that the consumer runs, and of the next one, are exact, whatever the codes lost."""
    config = TranslatorConfig(metric="plain")
    options = {"recompute_layers": real.model.config.num_hidden_layers - 1, "config": config, "max_length": 128, "progress": False}
    translator = CacheTranslator.fit(real.model, real.model, real.tokenizer, [PROSE[20000:20600], PROSE[30000:30600]], **options)
    for name, texts in (("batch", TEXTS), ("long", TEXTS[2:])):
        inputs = encode(real, texts)
        cache = TranslatedCache(real.model, translator, translator.encode(real.model, **inputs))
        assert_same(write(real, inputs, cache), expected[name])
        assert cache.report().translated > 0

"""A cache that holds one text is given another: what its length tells is refused, and what goes on goes on."""

import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from hf_kvcaches import ConfigError, EquipCache, GrowingCache, UnsupportedError
from tests import tiny
from tests.helpers.caches import small
from tests.helpers.prompts import mask_of

MAKERS = small("growing", "equip", "equip, scores", "subspace", "segments")


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture
def model():
    return tiny.llama()


def answer(model, prompt: torch.Tensor, cache, **options) -> torch.Tensor:
    return model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False, pad_token_id=0, **options)


# After a prompt of 12 tokens the cache has seen 15. `generate` cuts off as many, which leaves nothing of 3, some of 14, all of 15.
@pytest.mark.parametrize("length", [1, 3, 7, 8, 14, 15])
@pytest.mark.parametrize("chunk", [None, 4])
def test_another_prompt_that_is_not_longer_than_what_the_cache_holds_is_refused_before_anything_is_stored(model, make, length, chunk):
    cache = make(model)
    answer(model, tiny.ids(1, 12), cache)
    before = copy.deepcopy(cache)
    with pytest.raises(ConfigError, match=r"reset\(\)"):
        answer(model, tiny.ids(1, length, seed=1), cache, prefill_chunk_size=chunk)
    assert cache.seen == before.seen == 15
    held, copied = cache.owned_tensors(), before.owned_tensors()
    assert held.keys() == copied.keys()
    assert all(torch.equal(held[name], copied[name]) for name in held)


def test_another_padded_batch_that_is_not_longer_is_refused(model, make):
    cache = make(model)
    answer(model, tiny.ids(2, 12), cache, attention_mask=mask_of(12, 5, 0))
    for length in (6, 9, 15):
        with pytest.raises(ConfigError, match=r"reset\(\)"):
            answer(model, tiny.ids(2, length, seed=1), cache, attention_mask=mask_of(length, 5, 0))
    assert cache.seen == 15


@pytest.mark.parametrize("length", [7, 30])
def test_after_a_refusal_reset_makes_room_for_the_other_prompt(model, make, length):
    cache, prompt = make(model), tiny.ids(1, length, seed=5)
    answer(model, tiny.ids(1, 12), cache)
    with pytest.raises(ConfigError, match=rf"reset\(\).*custom_generate=per_call\({type(cache).__name__}, \.\.\.\)"):
        answer(model, prompt, cache)
    cache.reset()
    assert torch.equal(answer(model, prompt, cache), answer(model, prompt, make(model)))


def test_a_chat_that_goes_on_is_not_refused_whole_or_by_its_new_tokens_alone(model, make):
    whole, apart = make(model), make(model)
    text = answer(model, tiny.ids(1, 12), whole)
    answer(model, tiny.ids(1, 12), apart)
    longer = torch.cat([text, tiny.ids(1, 2, seed=2)], dim=1)
    got = answer(model, longer, whole)
    mask = torch.ones(1, longer.shape[1], dtype=torch.long)
    assert torch.equal(got[:, -4:], answer(model, longer[:, 15:], apart, attention_mask=mask)[:, -4:])


def test_a_pass_with_a_mask_that_leaves_out_the_tokens_seen_is_refused_by_a_cache_that_takes_over_prompts(model):
    cache = MAKERS["segments"](model)
    answer(model, tiny.ids(1, 12), cache)
    with pytest.raises(ConfigError, match="attention_mask of 3"):
        model(input_ids=tiny.ids(1, 3), attention_mask=torch.ones(1, 3), past_key_values=cache)
    assert cache.seen == 15


def other_beginnings(text: torch.Tensor) -> dict[str, torch.Tensor]:
    """Longer prompts that begin otherwise than a text of 12 tokens and 4 generated ones."""
    edited_prompt, edited_answer = torch.cat([text, text], dim=1), torch.cat([text, text], dim=1)
    edited_prompt[:, 3] = (text[:, 3] + 1) % 50
    edited_answer[:, 13] = (text[:, 13] + 1) % 50
    return {"another text": tiny.ids(text.shape[0], 30, seed=9), "edited prompt": edited_prompt, "edited answer": edited_answer}


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("kind", ["another text", "edited prompt", "edited answer"])
def test_a_longer_prompt_that_begins_otherwise_is_refused_before_anything_is_stored(model, make, kind, chunk):
    cache = make(model)
    text = answer(model, tiny.ids(1, 12), cache)
    before = {name: tensor.clone() for name, tensor in cache.owned_tensors().items()}
    # With transformers 5.17, chunked prefill begins with the first tokens again, whatever the cache holds.
    with pytest.raises(ConfigError, match=r"(another token at (0|3|13)|attention_mask of 4)\b.*reset\(\)"):
        answer(model, other_beginnings(text)[kind], cache, prefill_chunk_size=chunk)
    held = cache.owned_tensors()
    assert cache.seen == 15
    assert all(torch.equal(held[name], tensor) for name, tensor in before.items())


def test_a_row_that_begins_otherwise_is_refused_and_other_pad_tokens_are_not(model, make):
    cache, mask = make(model), mask_of(19, 5, 0)
    longer = torch.cat([answer(model, tiny.ids(2, 12), cache, attention_mask=mask[:, :12]), tiny.ids(2, 3, seed=2)], dim=1)
    other = longer.clone()
    other[1, 14] = (other[1, 14] + 1) % 50
    with pytest.raises(ConfigError, match="row 1 has another token at 14"):
        answer(model, other, cache, attention_mask=mask)
    padded_otherwise = longer.masked_fill(mask == 0, 7)
    assert answer(model, padded_otherwise, cache, attention_mask=mask).shape[1] == 23


def test_another_number_of_rows_is_refused(model, make):
    cache = make(model)
    text = answer(model, tiny.ids(1, 12), cache)
    with pytest.raises(ConfigError, match="2 rows, where it holds 1"):
        answer(model, torch.cat([text, text]).repeat(1, 2), cache)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"do_sample": True}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 5}, {"num_return_sequences": 2}],
    ids=lambda options: next(iter(options)),
)
def test_what_was_decoded_in_another_way_goes_on_and_another_text_is_refused(model, options):
    """After beams the cache holds those that were alive last, cut back to the prompt that they share."""
    cache, rows = GrowingCache(model), 2 if {"num_beams", "num_return_sequences"} & set(options) else 1
    options = {"max_new_tokens": 4, "pad_token_id": 0, "past_key_values": cache, "do_sample": "num_return_sequences" in options, **options}
    text = model.generate(tiny.ids(1, 12), **options)
    if "num_beams" in options:
        cache.crop(12 - cache.seen)
        cache.batch_select_indices(torch.tensor([0]))
        rows = 1
    longer = torch.cat([text, tiny.ids(rows, 3, seed=2)], dim=1)
    with pytest.raises(ConfigError, match="another token"):
        answer(model, tiny.ids(rows, 19, seed=9), cache)
    assert answer(model, longer, cache).shape[1] == longer.shape[1] + 4


def test_after_a_crop_only_what_is_left_counts(model, make):
    cache = make(model)
    text = answer(model, tiny.ids(1, 12), cache)
    try:
        cache.crop(-5)
    except UnsupportedError:
        pytest.skip("this cache has forgotten what a crop needs")
    other = torch.cat([text[:, :10], tiny.ids(1, 9, seed=8)], dim=1)
    assert answer(model, other, cache).shape[1] == 23


def test_what_an_own_loop_fed_is_not_known_and_the_prompt_is_believed(model, make):
    cache, prompt = make(model), tiny.ids(1, 19)
    with torch.no_grad():
        model(input_ids=prompt[:, :12], past_key_values=cache)
    copied = copy.deepcopy(cache)
    text = answer(model, prompt, copied)
    answer(model, torch.cat([text, prompt], dim=1), copied)
    assert cache.seen == 12


def test_a_copy_knows_its_tokens_and_a_pickled_cache_too(model):
    cache = GrowingCache(model)
    text = answer(model, tiny.ids(1, 12), cache)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        with pytest.raises(ConfigError, match="another token"):
            answer(model, tiny.ids(1, 30, seed=5), copied)
        assert answer(model, torch.cat([text, text], dim=1), copied).shape[1] == 36


def test_an_edited_text_goes_on(model):
    cache = EquipCache(model, "streaming", budget=32, recent=2)
    text = answer(model, tiny.ids(1, 12), cache)
    new = (text[:, 3:5] + 1) % 50
    cache.edit(model, 3, 5, new)
    longer = torch.cat([text, text], dim=1)
    longer[:, 3:5] = new
    assert answer(model, longer, cache).shape[1] == 36


def test_after_a_failed_pass_its_tokens_are_forgotten(model):
    cache, text = GrowingCache(model), tiny.ids(1, 12)
    answer(model, text, cache)
    handle = model.model.register_forward_pre_hook(_fail)
    held = torch.cat([text, tiny.ids(1, 9, seed=3)], dim=1)
    held[:, 12:15] = cache.log.ids[:, 12:15]
    with pytest.raises(RuntimeError, match="on purpose"):
        answer(model, held, cache)
    handle.remove()
    assert answer(model, held[:, :18], cache).shape[1] == 22


def _fail(module, args):
    raise RuntimeError("on purpose")


# Several threads


@pytest.mark.parametrize("kind", [GrowingCache, EquipCache])
def test_two_calls_of_generate_at_once_are_both_refused(kind, monkeypatch):
    model = tiny.llama()
    cache, together = kind(model), Barrier(2, timeout=30)
    begins = type(cache).generate_begins

    def begin_together(self):
        begins(self)
        together.wait()

    monkeypatch.setattr(kind, "generate_begins", begin_together)

    def slowly(ids, scores):  # so that neither call ends before the other one has begun
        time.sleep(0.05)
        return torch.zeros(len(ids), dtype=torch.bool)

    def write(seed):
        return model.generate(tiny.ids(1, 20, seed=seed), past_key_values=cache, max_new_tokens=30, stopping_criteria=[slowly])

    with ThreadPoolExecutor(2) as threads:
        errors = [turn.exception() for turn in [threads.submit(write, 0), threads.submit(write, 1)]]
    assert all(isinstance(error, ConfigError) and "one thread" in str(error) for error in errors), errors


def test_a_prompt_that_does_not_continue_another_threads_text_is_told_of_the_thread():
    model = tiny.llama()
    cache = GrowingCache(model)
    with ThreadPoolExecutor(1) as other:
        other.submit(model.generate, tiny.ids(1, 20, seed=0), past_key_values=cache, max_new_tokens=3).result()
    with pytest.raises(ConfigError, match="Another thread has filled it"):
        model.generate(tiny.ids(1, 40, seed=1), past_key_values=cache, max_new_tokens=3)


def test_threads_may_take_turns():
    model = tiny.llama()
    cache, ids = GrowingCache(model), tiny.ids(1, 20)
    for _ in range(3):
        with ThreadPoolExecutor(1) as other:
            ids = other.submit(model.generate, ids, past_key_values=cache, max_new_tokens=3, min_new_tokens=3).result()
    assert ids.shape[1] == 29

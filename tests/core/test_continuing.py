"""A cache that holds one text is given another: what its length tells is refused, and what goes on goes on."""

import copy
import gc

import pytest
import torch

from hf_kvcaches import AdaptiveSubspace, ConfigError, EquipCache, GrowingCache, SegmentReuseCache, SegmentStore, SubspaceCache
from tests import tiny

MAKERS = {
    "growing": GrowingCache,
    "equip": lambda model: EquipCache(model, "streaming", budget=8, recent=2),
    "equip_h2o": lambda model: EquipCache(model, "h2o", budget=8, recent=2),
    "subspace": lambda model: SubspaceCache(model, adaptive=AdaptiveSubspace(rank=4, warmup=16), sinks=1, recent=2),
    "segments": lambda model: SegmentReuseCache(model, SegmentStore("memory"), mode="exact"),
}


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
    prompts, mask = tiny.ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    answer(model, prompts, cache, attention_mask=mask)
    for length in (6, 9, 15):
        with pytest.raises(ConfigError, match=r"reset\(\)"):
            answer(model, tiny.ids(2, length, seed=1), cache, attention_mask=mask.repeat(1, 2)[:, :length])
    assert cache.seen == 15


def test_after_a_refusal_reset_makes_room_for_the_other_prompt(model, make):
    cache, prompt = make(model), tiny.ids(1, 7, seed=1)
    answer(model, tiny.ids(1, 12), cache)
    with pytest.raises(ConfigError):
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


def test_no_hook_stays_behind(model):
    cache = GrowingCache(model)
    text = answer(model, tiny.ids(1, 12), cache)
    assert not model._forward_pre_hooks
    answer(model, torch.cat([text, text], dim=1), cache)
    assert not model._forward_pre_hooks
    with pytest.raises(ConfigError):
        answer(model, text, cache)
    assert not model._forward_pre_hooks
    cache.generate_begins()
    del cache
    gc.collect()
    assert not model._forward_pre_hooks

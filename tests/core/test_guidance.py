"""`generate` calls its model more than once for each token, some of these times without the cache: that is no dropped cache."""

import sys

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from hf_kvcaches import EquipCache, GrowingCache, SegmentReuseCache, SegmentStore, UnsupportedError
from hf_kvcaches.errors import ConfigError
from tests import tiny
from tests.core.ropes import LIMIT, phi3_config

PROMPT = tiny.ids(1, 12)
# Every one keeps all tokens of these short texts, and gives the text of DynamicCache.
EXACT = {
    "growing": GrowingCache,
    "equip": lambda model: EquipCache(model, "streaming", budget=64),
    "equip, scores": lambda model: EquipCache(model, "h2o", budget=64),
    "segments": lambda model: SegmentReuseCache(model, SegmentStore("memory"), mode="exact"),
    "segments, equip": lambda model: SegmentReuseCache(
        model, SegmentStore("memory"), mode="exact", decode_with=EquipCache(model, "streaming", budget=64)
    ),
}
GUIDANCE = {
    "guidance": {"guidance_scale": 1.5},
    "short negative prompt": {"guidance_scale": 1.5, "negative_prompt_ids": tiny.ids(1, 5, seed=3)},
    "long negative prompt": {"guidance_scale": 1.5, "negative_prompt_ids": tiny.ids(1, 30, seed=3)},
    "negative prompt that goes on": {"guidance_scale": 1.5, "negative_prompt_ids": torch.cat([PROMPT, PROMPT[:, :1]], 1)},
    "sampled": {"guidance_scale": 1.5, "do_sample": True},
    "beams": {"guidance_scale": 1.5, "num_beams": 2, "negative_prompt_ids": tiny.ids(2, 5, seed=3)},
}


@pytest.fixture
def model():
    model = tiny.llama()
    model.generation_config.eos_token_id = None
    return model


def text(model, cache, prompt=PROMPT, **options):
    torch.manual_seed(0)
    return model.generate(prompt, past_key_values=cache, **{"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options})


@pytest.mark.parametrize("options", GUIDANCE.values(), ids=GUIDANCE)
@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_passes_without_a_cache_beside_those_with_it_change_nothing(model, make, options):
    cache = make(model)
    assert torch.equal(text(model, cache, **options), text(model, DynamicCache(), **options))
    assert cache.get_seq_length() > PROMPT.shape[1]


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_a_second_turn_with_guidance_goes_on(model, make):
    cache, plain = make(model), DynamicCache()
    first = text(model, cache, guidance_scale=1.5)
    text(model, plain, guidance_scale=1.5)
    longer = torch.cat([first, tiny.ids(1, 3, seed=2)], 1)
    assert torch.equal(text(model, cache, longer, guidance_scale=1.5), text(model, plain, longer, guidance_scale=1.5))


class TwicePerPass(LlamaForCausalLM):
    """A model that runs itself once more without a cache, in each pass."""

    def forward(self, input_ids=None, use_cache=None, **kwargs):
        cached = kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None
        if cached:
            self(input_ids=input_ids, use_cache=True)
        return super().forward(input_ids=input_ids, use_cache=use_cache, **kwargs)


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_a_model_whose_forward_calls_itself_runs(model, make):
    twice = TwicePerPass(model.config).eval()
    twice.load_state_dict(model.state_dict())
    twice.generation_config = model.generation_config
    assert torch.equal(text(twice, make(twice)), text(model, DynamicCache()))


def test_guidance_does_not_hide_that_a_model_drops_the_cache():
    model = tiny.build(phi3_config())
    ids = tiny.ids(1, LIMIT + 8)
    for prompt, tokens in ((ids, 2), (ids[:, : LIMIT - 3], 8)):
        with pytest.raises(UnsupportedError, match="Phi3ForCausalLM drops the GrowingCache"):
            text(model, GrowingCache(model), prompt, max_new_tokens=tokens, guidance_scale=1.5)
    short = {"prompt": ids[:, :8], "guidance_scale": 1.5}
    assert torch.equal(text(model, GrowingCache(model), **short), text(model, DynamicCache(config=model.config), **short))


def interrupted(model, cache, prompt):
    """The exception of a `generate` that breaks off, with its traceback."""

    def fail(module, args):
        if cache.get_seq_length() >= prompt.shape[1] + 2:
            raise KeyboardInterrupt

    handle = model.get_decoder().layers[0].register_forward_pre_hook(fail)
    try:
        text(model, cache, prompt, max_new_tokens=8)
    except KeyboardInterrupt as error:
        return error
    finally:
        handle.remove()
    raise AssertionError("nothing was interrupted")


@pytest.mark.parametrize("build", [tiny.llama, lambda: tiny.build(phi3_config())], ids=["llama", "longrope"])
def test_after_an_interrupt_whose_traceback_lives_on_the_model_is_as_it_was(build):
    model = build()
    cache = GrowingCache(model)
    prompt = tiny.ids(1, 12)
    expected = model(input_ids=tiny.ids(1, LIMIT + 8), use_cache=True).logits
    sys.last_exc = interrupted(model, cache, prompt)  # as a notebook does
    try:
        with torch.no_grad():
            assert torch.equal(model(input_ids=tiny.ids(1, LIMIT + 8), use_cache=True).logits, expected)
            assert torch.equal(model(input_ids=prompt[:, :3], use_cache=True).logits, model(input_ids=prompt[:, :3]).logits)
            plain = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
            cache.reset()
            assert torch.equal(text(model, cache, prompt, max_new_tokens=4), plain)
            with pytest.raises(ConfigError, match="another token"):
                text(model, cache, tiny.ids(1, 30, seed=5))
    finally:
        del sys.last_exc

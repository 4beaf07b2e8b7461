"""`generate` may call its model more than once for each token, some of these times without the cache; and it may break off."""

import pytest
import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, LlamaForCausalLM, PreTrainedModel

from hf_kvcaches import ConfigError, EquipCache, GrowingCache, SegmentReuseCache, SegmentStore
from tests import tiny
from tests.helpers.caches import SMALL

PROMPT = tiny.ids(1, 12)
# Every one keeps all tokens of these short texts, and gives the text of DynamicCache.
EXACT = {
    "growing": GrowingCache,
    "equip": lambda model: EquipCache(model, "streaming", budget=64),
    "equip, scores": lambda model: EquipCache(model, "h2o", budget=64),
    "segments, equip": lambda model: SegmentReuseCache(
        model, SegmentStore("memory"), mode="exact", decode_with=EquipCache(model, "streaming", budget=64)
    ),
}
GUIDANCE = {
    "short negative prompt": {"guidance_scale": 1.5, "negative_prompt_ids": tiny.ids(1, 5, seed=3)},
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


def test_after_an_interrupt_whose_traceback_lives_on_the_model_is_as_it_was(model):
    cache, expected, logits = GrowingCache(model), text(model, DynamicCache()), model(PROMPT, use_cache=True).logits

    def fail(module, args):
        if cache.get_seq_length() > PROMPT.shape[1] + 1:
            raise KeyboardInterrupt

    handle = model.get_decoder().layers[0].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt) as caught:
        text(model, cache)
    handle.remove()
    assert torch.equal(model(PROMPT, use_cache=True).logits, logits)
    cache.reset()
    assert torch.equal(text(model, cache), expected)
    with pytest.raises(ConfigError, match="another token"):
        text(model, cache, tiny.ids(1, 30, seed=5))
    assert caught.value.__traceback__


# Continuous batching on a model for which caches were made and used: it reads the attention's name and gives the model another one

TEXTS = [tiny.ids(20).tolist(), tiny.ids(13, seed=1).tolist()]


def batch(model: PreTrainedModel) -> list[list[int]]:
    """What continuous batching generates."""
    generation = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    paging = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, use_cuda_graph=False)
    outputs = model.generate_batch(TEXTS, generation_config=generation, continuous_batching_config=paging)
    assert all(output.error is None for output in outputs.values())
    return [output.generated_tokens for _, output in sorted(outputs.items())]


@torch.no_grad()
def test_continuous_batching_works_after_caches_of_every_kind_were_used() -> None:
    untouched, model = tiny.llama(), tiny.llama()
    attributes = set(vars(model))
    for make in SMALL.values():
        model.generate(torch.tensor([TEXTS[0]]), past_key_values=make(model), max_new_tokens=3, pad_token_id=0)
    assert type(model.config._attn_implementation) is str
    assert set(vars(model)) == attributes
    assert batch(model) == batch(untouched)

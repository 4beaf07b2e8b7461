"""`generate` may call its model more than once for a token, ask for more than attention, or break off; and other precisions."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import Cache, ContinuousBatchingConfig, DynamicCache, GenerationConfig, LlamaForCausalLM, PreTrainedModel

from hf_kvcaches import (
    AdaptiveSubspace,
    ConfigError,
    EquipCache,
    GrowingCache,
    KVCodec,
    SegmentReuseCache,
    SegmentStore,
    SubspaceCache,
    UnsupportedError,
)
from tests import tiny
from tests.helpers.caches import SMALL, small

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


HALF, LENGTH = 20, 32


@cache
def codec() -> KVCodec:
    """All directions of the tiny model."""
    texts = [tiny.ids(1, 96, seed=seed)[0].tolist() for seed in range(3)]
    return KVCodec.calibrate(tiny.llama(), None, texts, 1.5, progress=False)


# Each keeps every token, in all directions.
CACHES: dict[str, Callable[[PreTrainedModel], Cache]] = {
    "streaming": lambda model: EquipCache(model, "streaming", 64),
    "h2o": lambda model: EquipCache(model, "h2o", 64),
    "tova": lambda model: EquipCache(model, "tova", 64),
    "snapkv": lambda model: EquipCache(model, "snapkv", 96),
    "pages": lambda model: EquipCache(model, "h2o", 64, page_size=16),
    "subspace": lambda model: SubspaceCache(model, codec(), sinks=1, recent=4),
    "adaptive": lambda model: SubspaceCache(model, adaptive=AdaptiveSubspace(rank=8, warmup=16, chunk=16), sinks=1, recent=4),
}


@torch.no_grad()
def logits(model: PreTrainedModel, held: Cache, autocast: bool) -> torch.Tensor:
    """Of a prompt and the tokens behind it, one at a time."""
    text = tiny.ids(2, LENGTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        chunks = [text[:, :HALF], *text[:, HALF:].split(1, 1)]
        return torch.cat([model(chunk, past_key_values=held).logits for chunk in chunks], 1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CACHES)
def test_under_autocast_a_cache_that_keeps_all_is_as_near_to_the_model_as_autocast_is(name: str, implementation: str) -> None:
    model = tiny.llama()
    model.set_attn_implementation(implementation)
    exact = logits(model, DynamicCache(config=model.config), autocast=False)
    expected = logits(model, DynamicCache(config=model.config), autocast=True)
    got = logits(model, CACHES[name](model), autocast=True)
    assert got.dtype == expected.dtype
    assert (got - expected).abs().mean() < (expected - exact).abs().mean()


PRUNED = small("equip", "equip, scores", "equip, original")


def read(model: PreTrainedModel, held: Cache) -> torch.Tensor:
    """Logits of a prompt and the tokens behind it, one at a time, with gradients."""
    text = tiny.ids(1, LENGTH)
    return torch.cat([model(chunk, past_key_values=held).logits for chunk in [text[:, :HALF], *text[:, HALF:].split(1, 1)]], 1)


@pytest.mark.parametrize("name", PRUNED)
def test_what_inference_mode_made_takes_part_in_a_backward_pass(name: str) -> None:
    model = tiny.llama()
    expected_cache = PRUNED[name](model)
    with torch.no_grad():
        read(model, expected_cache)
    expected = read(model, expected_cache)
    with torch.inference_mode():
        held = PRUNED[name](model)
        read(model, held)
        read(model, PRUNED[name](model))
    for following in (held, PRUNED[name](model)):
        model.zero_grad()
        got = read(model, following)
        got.sum().backward()
        assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters())
        if following is held:
            torch.testing.assert_close(got, expected)


def by_argument(model: PreTrainedModel, held: Cache) -> None:
    model(tiny.ids(1, HALF), past_key_values=held, output_attentions=True)


def by_config(model: PreTrainedModel, held: Cache) -> None:
    model.config.output_attentions = True
    model(tiny.ids(1, HALF), past_key_values=held)


def by_generate(model: PreTrainedModel, held: Cache, **options: Any) -> None:
    options |= {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 6}
    model.generate(tiny.ids(1, HALF), past_key_values=held, **options)


def by_assisted_generation(model: PreTrainedModel, held: Cache) -> None:
    by_generate(model, held, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("ask", [by_argument, by_config, by_generate, by_assisted_generation])
@pytest.mark.parametrize("build", [tiny.llama, tiny.gemma2])
@pytest.mark.parametrize("name", ["streaming", "h2o", "adaptive"])
@torch.no_grad()
def test_attention_weights_are_refused_before_anything_is_stored(
    name: str, build: Callable[[], PreTrainedModel], ask: Callable[[PreTrainedModel, Cache], None]
) -> None:
    model = build()
    model.set_attn_implementation("eager")
    held = CACHES[name](model)
    drafts = name == "adaptive" and ask is by_assisted_generation  # whose bases take no token back
    with pytest.raises(UnsupportedError, match="assistant" if drafts else r"output_attentions.*DynamicCache"):
        ask(model, held)
    assert all(not layer.get_seq_length() for layer in held.layers)
    model.config.output_attentions = False
    torch.testing.assert_close(logits(model, held, autocast=False), logits(model, CACHES[name](model), autocast=False))

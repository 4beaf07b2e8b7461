"""Caches that answer queries, in calls that ask for more than attention: other precisions, attention weights."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_kvcaches import AdaptiveSubspace, EquipCache, KVCodec, SubspaceCache, UnsupportedError
from tests import tiny

PROMPT, LENGTH = 20, 32


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
        chunks = [text[:, :PROMPT], *text[:, PROMPT:].split(1, 1)]
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


SMALL: dict[str, Callable[[PreTrainedModel], Cache]] = {
    "streaming": lambda model: EquipCache(model, "streaming", 16, sinks=2),
    "tova": lambda model: EquipCache(model, "tova", 16, sinks=2),
    "h2o": lambda model: EquipCache(model, "h2o", 16, sinks=2),
}


def read(model: PreTrainedModel, held: Cache) -> torch.Tensor:
    """Logits of a prompt and the tokens behind it, one at a time, with gradients."""
    text = tiny.ids(1, LENGTH)
    return torch.cat([model(chunk, past_key_values=held).logits for chunk in [text[:, :PROMPT], *text[:, PROMPT:].split(1, 1)]], 1)


@pytest.mark.parametrize("name", SMALL)
def test_what_inference_mode_made_takes_part_in_a_backward_pass(name: str) -> None:
    model = tiny.llama()
    expected_cache = SMALL[name](model)
    with torch.no_grad():
        read(model, expected_cache)
    expected = read(model, expected_cache)
    with torch.inference_mode():
        held = SMALL[name](model)
        read(model, held)
        read(model, SMALL[name](model))
    for following in (held, SMALL[name](model)):
        model.zero_grad()
        got = read(model, following)
        got.sum().backward()
        assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters())
        if following is held:
            torch.testing.assert_close(got, expected)


def by_argument(model: PreTrainedModel, held: Cache) -> None:
    model(tiny.ids(1, PROMPT), past_key_values=held, output_attentions=True)


def by_config(model: PreTrainedModel, held: Cache) -> None:
    model.config.output_attentions = True
    model(tiny.ids(1, PROMPT), past_key_values=held)


def by_generate(model: PreTrainedModel, held: Cache, **options: Any) -> None:
    options |= {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 6}
    model.generate(tiny.ids(1, PROMPT), past_key_values=held, **options)


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

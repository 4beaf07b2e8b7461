"""Running pieces of a prompt: taken over inside generate, span by span, or from a layer up."""

import gc
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import CLIPVisionConfig, DynamicCache, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, ZambaConfig

from hf_kvcaches import GrowingCache, SegmentReuseCache, SegmentStore
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.identity import identity_of
from hf_kvcaches.core.layers import GrowingLayer
from hf_kvcaches.core.source import SourceCache
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.reuse import partial as passes
from tests import tiny
from tests.conformance import models
from tests.helpers.prompts import padded_ids


class HalfwayCache(SourceCache):
    """Takes over the first half of every prompt and runs it itself, as one span."""

    def __init__(self, model):
        self.calls = []
        super().__init__(model)

    def make_layer(self, layer_idx):
        return GrowingLayer()

    def take_prefill(self, call):
        tokens = call.input_ids.shape[1] // 2
        mask = None if call.attention_mask is None else call.attention_mask[:, : self.seen + tokens]
        positions = torch.arange(self.seen, self.seen + tokens) if call.position_ids is None else call.position_ids[:, :tokens]
        passes.run_span(call.model, self, call.input_ids[:, :tokens], positions, mask)
        self.calls.append(tokens)
        return tokens


@pytest.fixture(params=["llama", "gemma2", "gpt2", "opt", "gpt_neox", "qwen2_mixed"])
def model(request):
    return models.build(request.param)


def left_padded():
    return padded_ids(11, 4, 0)


def test_a_cache_can_run_half_the_prompt_inside_generate(model):
    expected = model.generate(**left_padded(), max_new_tokens=8, do_sample=False)
    cache = HalfwayCache(model)
    assert torch.equal(model.generate(**left_padded(), max_new_tokens=8, do_sample=False, past_key_values=cache), expected)
    assert cache.calls == [5]


@torch.no_grad()
def test_a_plain_forward_pass_keeps_all_its_logits():
    model = tiny.llama()
    cache = HalfwayCache(model)
    assert model(tiny.ids(1, 10), past_key_values=cache).logits.shape[1] == 10
    assert cache.calls == []


def test_neither_hook_nor_cache_keeps_the_model_alive():
    model = tiny.llama()
    cache = HalfwayCache(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(ConfigError, match="outlived"):
        _ = cache.model


def test_a_wrong_count_from_a_cache_is_caught():
    class Liar(HalfwayCache):
        def take_prefill(self, call):
            return super().take_prefill(call) + 1

    model = tiny.llama()
    with pytest.raises(RuntimeError, match="take_prefill"):
        model.generate(tiny.ids(1, 10), max_new_tokens=2, past_key_values=Liar(model))


def hidden_states(model, **inputs):
    """What enters each layer, and what leaves the last one before the final norm."""
    layers = decoder_layers(model)[2]
    found = []
    handles = [layer.register_forward_pre_hook(lambda module, args, kwargs: found.append(args[0]), with_kwargs=True) for layer in layers]
    handles.append(layers[-1].register_forward_hook(lambda module, args, out: found.append(out[0] if isinstance(out, tuple) else out)))
    model(**inputs)
    for handle in handles:
        handle.remove()
    return found


@torch.no_grad()
def test_some_layers_run_from_stored_hidden_states(model):
    batch = left_padded()
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    real, layers = batch["attention_mask"].bool(), len(decoder_layers(model)[2])
    whole = GrowingCache(model)
    hidden = hidden_states(model, **batch, position_ids=positions, past_key_values=whole)
    for start in range(layers):
        for stop in range(start + 1, layers + 1):
            partial = GrowingCache(model)
            entering = hidden[start] if start else None
            left = passes.run_layers(model, start, stop, batch["input_ids"], partial, positions, batch["attention_mask"], hidden=entering)
            torch.testing.assert_close(left[real], hidden[stop][real], atol=1e-5, rtol=1e-5)
            seen = [layer.get_seq_length() for layer in partial.layers]
            assert seen == [11 if start <= index < stop else 0 for index in range(layers)]
            for mine, theirs in zip(partial.layers[start:stop], whole.layers[start:stop], strict=True):
                kept = mine.keys.shape[2] if mine.is_sliding else 11
                torch.testing.assert_close(mine.keys[:, :, :kept], theirs.keys[:, :, :kept], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (4, 5), (2, 2), (2, 5), (1, 0)])
def test_layers_that_do_not_exist_are_refused(start, stop):
    model = tiny.llama()
    with pytest.raises(ConfigError, match=r"start|stop"):
        passes.run_layers(model, start, stop, tiny.ids(1, 3), GrowingCache(model), torch.arange(3), hidden=torch.zeros(1, 3, 32))


@torch.no_grad()
def test_a_partial_pass_leaves_the_model_as_it_is_while_it_runs():
    model = tiny.llama()
    names, parts, text = list(model.state_dict()), list(model.modules()), tiny.ids(1, 6)
    expected, found = model(text).logits, []

    def look(module, args):
        assert list(model.state_dict()) == names
        assert all(a is b for a, b in zip(model.modules(), parts, strict=True))
        if not found:
            found.append(None)
            found[0] = model(text).logits

    handle = model.model.layers[2].register_forward_pre_hook(look)
    passes.run_layers(model, 2, 3, text, GrowingCache(model), torch.arange(6), hidden=torch.randn(1, 6, 32))
    handle.remove()
    assert torch.equal(found[0], expected)


@torch.no_grad()
def test_a_partial_pass_runs_methods_that_were_put_onto_the_model():
    from accelerate.hooks import ModelHook, add_hook_to_module

    model, text = tiny.llama(), tiny.ids(1, 6)
    hidden = hidden_states(model, input_ids=text)
    forward = type(model.model).forward
    model.model.forward = types.MethodType(lambda self, *args, **kwargs: forward(self, *args, **kwargs), model.model)
    add_hook_to_module(model.model, ModelHook())
    model.model.compile(backend="eager")
    left = passes.run_layers(model, 1, 3, text, GrowingCache(model), torch.arange(6), hidden=hidden[1])
    torch.testing.assert_close(left, hidden[3])


@torch.no_grad()
def test_a_forward_that_cannot_be_moved_to_a_twin_is_refused():
    model = tiny.llama()
    whole = model.model.forward
    model.model.forward = lambda *args, **kwargs: whole(*args, **kwargs)
    with pytest.raises(UnsupportedError, match="forward"):
        passes.run_layers(model, 0, 2, tiny.ids(1, 6), GrowingCache(model), torch.arange(6))


def llava():
    """A model of images and text, whose two halves have as many layers."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    vision = CLIPVisionConfig(**shape, image_size=8, patch_size=4, projection_dim=16)
    text = LlamaConfig(**shape, vocab_size=96, initializer_range=0.3)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=5)).eval()


def test_the_decoder_of_a_model_with_images_is_not_taken_for_its_encoder():
    model, text = llava(), tiny.ids(1, 7, seed=1).clamp(min=6)
    cache = GrowingCache(model)
    with torch.no_grad():
        hidden = hidden_states(model, input_ids=text, past_key_values=GrowingCache(model))
        got = passes.run_layers(model, 1, 2, text, cache, torch.arange(7), hidden=hidden[1])
    torch.testing.assert_close(got, hidden[2])
    assert [layer.seen for layer in cache.layers] == [0, 7]


def test_prompts_with_images_are_left_to_the_model():
    model, text = llava(), tiny.ids(1, 12, seed=1).clamp(min=6)
    text[0, 2:6] = 5
    inputs = {"input_ids": text, "pixel_values": torch.randn(1, 3, 8, 8), "logits_to_keep": 1}
    cache = HalfwayCache(model)
    with torch.no_grad():
        expected = llava()(**inputs, past_key_values=DynamicCache()).logits
        torch.testing.assert_close(model(**inputs, past_key_values=cache).logits, expected)
    assert cache.calls == []


def test_prompts_whose_hidden_states_are_wanted_are_left_to_the_model():
    model = tiny.llama()
    cache = HalfwayCache(model)
    with torch.no_grad():
        outputs = model(input_ids=tiny.ids(1, 8), past_key_values=cache, logits_to_keep=1, output_hidden_states=True)
    assert outputs.hidden_states[0].shape[1] == 8
    assert cache.calls == []


@torch.no_grad()
def test_a_model_that_feeds_its_embeddings_to_later_layers_gets_those_of_its_tokens():
    heads = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 4)
    kinds = {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 1}
    config = ZambaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, pad_token_id=0, **heads, **kinds)
    model, text = tiny.build(config), tiny.ids(1, 6)
    hidden = hidden_states(model, input_ids=text)
    left = passes.run_layers(model, 2, 4, text, GrowingCache(model), torch.arange(6), hidden=hidden[2])
    torch.testing.assert_close(left, hidden[4], atol=1e-5, rtol=1e-5)


def test_two_threads_take_over_prompts_of_one_model_at_a_time():
    model = tiny.llama()
    store = SegmentStore("memory", quantization=None)
    prompts = [torch.cat([tiny.ids(1, 40, seed=number % 3), tiny.ids(1, 30, seed=9)], 1) for number in range(6)]
    expected = [model.generate(ids, max_new_tokens=4, do_sample=False) for ids in prompts]
    digest = identity_of(model).digest
    faults = []

    def ask(offset):
        for number in range(12):
            index = (number + offset) % len(prompts)
            cache = SegmentReuseCache(model, store, mode="exact")
            written = model.generate(prompts[index], past_key_values=cache, max_new_tokens=4, do_sample=False)
            if not torch.equal(written, expected[index]) or identity_of(model).digest != digest:
                faults.append(index)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ask, (0, 5)))
    assert not faults


@torch.no_grad()
def test_threads_that_make_and_free_caches_of_one_model_all_take_over():
    model, failed = tiny.llama(), []

    def work(_):
        for _ in range(30):
            cache = HalfwayCache(model)
            model(input_ids=tiny.ids(1, 4), past_key_values=cache, logits_to_keep=1)
            failed.extend([] if cache.calls == [2] else [cache.calls])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not failed
    gc.collect()
    assert not model._forward_pre_hooks

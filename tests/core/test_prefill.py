"""Running pieces of a prompt: taken over inside generate, span by span, or from a layer up."""

import copy
import gc
import threading

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    OPTConfig,
    Qwen2Config,
    ZambaConfig,
)

from hf_kvcaches import GrowingCache, SegmentReuseCache, SegmentStore
from hf_kvcaches.core import only_layers, prefill
from hf_kvcaches.core.identity import identity_of
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import tiny


class HalfwayCache(GrowingCache):
    """Takes over the first half of every prompt and runs it itself, as one span."""

    takes_over_prefill = True

    def __init__(self, model):
        self.calls = []
        super().__init__(model)

    def take_prefill(self, call):
        tokens = call.input_ids.shape[1] // 2
        mask = None if call.attention_mask is None else call.attention_mask[:, : self.seen + tokens]
        positions = torch.arange(self.seen, self.seen + tokens) if call.position_ids is None else call.position_ids[:, :tokens]
        prefill.run_span(call.model, self, call.input_ids[:, :tokens], positions, mask)
        self.calls.append(tokens)
        return tokens


FAMILIES = {
    "llama": tiny.llama,
    "gemma2": tiny.gemma2,
    "gpt2": tiny.gpt2,
    "opt": lambda: tiny.build(
        OPTConfig(
            vocab_size=96, hidden_size=32, ffn_dim=64, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=16, init_std=0.3
        )
    ),
    "gpt_neox": lambda: tiny.build(
        GPTNeoXConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, initializer_range=0.3
        )
    ),
    "qwen2": lambda: tiny.build(
        Qwen2Config(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=6,
            max_window_layers=2,
            initializer_range=0.3,
        )
    ),
}


@pytest.fixture(params=list(FAMILIES))
def model(request):
    return FAMILIES[request.param]()


def left_padded():
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0
    return {"input_ids": tiny.ids(2, 11), "attention_mask": mask}


def test_a_cache_can_run_half_the_prompt_inside_generate(model):
    expected = model.generate(**left_padded(), max_new_tokens=8, do_sample=False)
    cache = HalfwayCache(model)
    assert torch.equal(model.generate(**left_padded(), max_new_tokens=8, do_sample=False, past_key_values=cache), expected)
    assert cache.calls == [5]


def test_a_chat_is_taken_over_turn_by_turn():
    model = tiny.llama()
    cache, text, reference = HalfwayCache(model), tiny.ids(1, 9), tiny.ids(1, 9)
    for turn in range(3):
        text = model.generate(text, max_new_tokens=5, do_sample=False, past_key_values=cache)
        reference = model.generate(reference, max_new_tokens=5, do_sample=False)
        assert torch.equal(text, reference)
        text, reference = (torch.cat([t, tiny.ids(1, 6, seed=turn + 1)], dim=1) for t in (text, reference))
    assert len(cache.calls) == 3


def test_chunked_prefill_is_taken_over_chunk_by_chunk():
    model = tiny.llama()
    prompt = tiny.ids(1, 21)
    cache = HalfwayCache(model)
    got = model.generate(prompt, max_new_tokens=5, do_sample=False, prefill_chunk_size=8, past_key_values=cache)
    assert torch.equal(got, model.generate(prompt, max_new_tokens=5, do_sample=False))
    assert cache.seen == 25


@torch.no_grad()
def test_a_plain_forward_pass_keeps_all_its_logits():
    model, cache = tiny.llama(), None
    cache = HalfwayCache(model)
    assert model(tiny.ids(1, 10), past_key_values=cache).logits.shape[1] == 10
    assert cache.calls == []


def test_other_caches_of_the_same_model_are_left_alone():
    model = tiny.llama()
    keep = HalfwayCache(model)
    other = GrowingCache(model)
    model.generate(tiny.ids(1, 10), max_new_tokens=2, do_sample=False, past_key_values=other)
    assert keep.calls == []


def test_the_hook_is_shared_and_goes_with_the_last_cache():
    model = tiny.llama()
    caches = [HalfwayCache(model) for _ in range(3)]
    caches.append(copy.deepcopy(caches[0]))
    assert len(model._forward_pre_hooks) == 1
    while caches:
        assert prefill.is_installed(model)
        caches.pop()
        gc.collect()
    assert not prefill.is_installed(model)
    assert len(model._forward_pre_hooks) == 0


def test_a_copied_model_does_not_keep_the_hook_of_its_original():
    original = tiny.llama()
    keep = HalfwayCache(original)
    model = copy.deepcopy(original)
    cache = HalfwayCache(model)
    assert len(model._forward_pre_hooks) == 1
    model.generate(tiny.ids(1, 10), max_new_tokens=2, do_sample=False, past_key_values=cache)
    assert (cache.calls, keep.calls) == ([5], [])
    del cache
    gc.collect()
    assert len(model._forward_pre_hooks) == 0


def test_a_copy_takes_over_too():
    model = tiny.llama()
    twin = copy.deepcopy(HalfwayCache(model))
    model.generate(tiny.ids(1, 10), max_new_tokens=2, do_sample=False, past_key_values=twin)
    assert twin.calls == [5]


def test_neither_hook_nor_cache_keeps_the_model_alive():
    import weakref

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


@torch.no_grad()
def test_spans_run_one_after_the_other_equal_the_whole(model):
    text = tiny.ids(1, 14)
    expected = model.base_model(text, past_key_values=DynamicCache(config=model.config)).last_hidden_state
    cache, parts = GrowingCache(model), []
    for start, stop in ((0, 5), (5, 6), (6, 14)):
        parts.append(prefill.run_span(model, cache, text[:, start:stop], torch.arange(start, stop)))
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_upper_layers_run_from_stored_hidden_states(model):
    batch = left_padded()
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    real = batch["attention_mask"].bool()
    for start in range(1, len(prefill.compat.decoder_layers(model)[2])):
        whole = GrowingCache(model)
        with prefill.capture_hidden(model, start) as captured:
            expected = model(**batch, position_ids=positions, past_key_values=whole).logits
        partial = GrowingCache(model)
        logits = prefill.run_from_layer(model, start, captured[0], partial, positions, batch["attention_mask"], logits_to_keep=0)
        torch.testing.assert_close(logits[real], expected[real], atol=1e-5, rtol=1e-5)
        assert [layer.get_seq_length() for layer in partial.layers] == [0] * start + [11] * (len(partial.layers) - start)
        for mine, theirs in zip(partial.layers[start:], whole.layers[start:], strict=True):
            kept = mine.keys.shape[2] if mine.is_sliding else 11
            torch.testing.assert_close(mine.keys[:, :, :kept], theirs.keys[:, :, :kept], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_upper_layers_catch_up_with_filled_lower_ones(model):
    text = tiny.ids(1, 14)
    start = len(prefill.compat.decoder_layers(model)[2]) - 1
    cache = GrowingCache(model)
    with prefill.capture_hidden(model, start) as captured:
        expected = model(text, past_key_values=cache).logits
    cache.layers[start] = GrowingCache(model).layers[start]
    parts = [
        prefill.run_from_layer(model, start, captured[0][:, a:b], cache, torch.arange(a, b), logits_to_keep=0) for a, b in ((0, 9), (9, 14))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-4, rtol=1e-4)
    follow = tiny.ids(1, 1, seed=5)
    fresh = model(torch.cat([text, follow], dim=1)).logits[:, -1]
    torch.testing.assert_close(model(follow, past_key_values=cache).logits[:, -1], fresh, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_model_is_whole_again_after_a_partial_run_even_after_an_error():
    model = tiny.llama()
    layers = model.model.layers
    with pytest.raises(RuntimeError):
        prefill.run_from_layer(model, 2, torch.zeros(1, 3, 7), GrowingCache(model), torch.arange(3))
    assert model.model.layers is layers


@pytest.mark.parametrize("layer", [-1, 4])
def test_layers_that_do_not_exist_are_refused(layer):
    model = tiny.llama()
    with pytest.raises(ConfigError, match="layer"), prefill.capture_hidden(model, layer):
        pass
    with pytest.raises(ConfigError, match="layer"):
        prefill.run_from_layer(model, layer, torch.zeros(1, 3, 32), GrowingCache(model), torch.arange(3))


def test_a_partial_run_of_everything_is_sent_to_run_span():
    model = tiny.llama()
    with pytest.raises(ConfigError, match="run_span"):
        prefill.run_from_layer(model, 0, torch.zeros(1, 3, 32), GrowingCache(model), torch.arange(3))


def test_gemma2_config_alternates_layer_kinds():
    # The partial runs above prove something about mask look-up only while the kinds of layers differ.
    assert len(set(Gemma2Config(num_hidden_layers=4).layer_types)) == 2


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
        with prefill.capture_hidden(model, 1) as hidden:
            expected = model(text, past_key_values=GrowingCache(model)).logits
        got = prefill.run_from_layer(model, 1, hidden[0], cache, torch.arange(7), logits_to_keep=0)
    torch.testing.assert_close(got, expected)
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


def test_a_model_that_feeds_its_embeddings_to_later_layers_is_refused():
    config = ZambaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        n_mamba_heads=1,
        pad_token_id=0,
    )
    model = tiny.build(config)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="embeddings"):
        prefill.run_from_layer(model, 2, torch.randn(1, 6, 32), GrowingCache(model), torch.arange(6))


def test_threads_that_run_the_model_meanwhile_get_all_of_its_layers():
    model = tiny.llama()
    prompts = [tiny.ids(1, 40 + number, seed=number) for number in range(4)]
    expected = [model.generate(ids, max_new_tokens=4, do_sample=False) for ids in prompts]
    halfway = threading.Event()
    found = []

    def exchange():
        hidden = torch.zeros(1, 3, model.config.hidden_size)
        with only_layers.only_layers(model, 2, hidden=hidden):
            halfway.set()
            done.wait(60)

    done = threading.Event()
    thread = threading.Thread(target=exchange)
    thread.start()
    halfway.wait(60)
    found = [model.generate(ids, max_new_tokens=4, do_sample=False) for ids in prompts]
    done.set()
    thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_two_threads_take_over_prompts_of_one_model_at_a_time():
    model = tiny.llama()
    store = SegmentStore("memory", quantization=None)
    prompts = [torch.cat([tiny.ids(1, 40, seed=number % 3), tiny.ids(1, 30, seed=9)], 1) for number in range(12)]
    expected = [model.generate(ids, max_new_tokens=4, do_sample=False) for ids in prompts]
    digest = identity_of(model).digest
    faults = []

    def ask(offset):
        for number in range(24):
            index = (number + offset) % len(prompts)
            cache = SegmentReuseCache(model, store, mode="exact")
            written = model.generate(prompts[index], past_key_values=cache, max_new_tokens=4, do_sample=False)
            if not torch.equal(written, expected[index]) or identity_of(model).digest != digest:
                faults.append(index)

    threads = [threading.Thread(target=ask, args=(offset,)) for offset in (0, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults

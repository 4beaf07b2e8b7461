"""The registered attention: invisible for plain tensors, a door for views, and easy to take back."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, BloomConfig, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_kvcaches
from hf_kvcaches import EquipCache, GrowingCache
from hf_kvcaches.core import view as attention
from hf_kvcaches.core.layers import GrowingLayer
from hf_kvcaches.core.view import LayerView, previous_attention
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import tiny
from tests.helpers.prompts import padded_ids
from tests.reference.policies import StreamingReference


def padded_batch() -> dict[str, torch.Tensor]:
    return padded_ids(12, 5, 1, 0)


@pytest.mark.parametrize(
    ("build", "implementation"),
    [(tiny.llama, "sdpa"), (tiny.llama, "eager"), (tiny.gemma2, "eager"), (tiny.gpt2, "sdpa"), (tiny.gpt2, "eager")],
)
@torch.no_grad()
def test_plain_tensors_give_the_same_logits_to_the_bit(build, implementation):
    model = build()
    model.set_attn_implementation(implementation)
    before = model(**padded_batch()).logits
    attention.enable(model)
    assert attention.is_enabled(model.config)
    assert torch.equal(model(**padded_batch()).logits, before)


def test_disable_restores_what_was_there_and_enabling_twice_changes_nothing():
    for implementation in ("eager", "sdpa"):
        model = tiny.llama()
        model.set_attn_implementation(implementation)
        attention.enable(model)
        attention.enable(model)
        assert model.config._attn_implementation == attention.NAME
        attention.disable(model)
        assert model.config._attn_implementation == implementation
        assert type(model.config._attn_implementation) is str
        attention.disable(model)
        assert model.config._attn_implementation == implementation


def test_a_saved_model_does_not_carry_the_attention_along(tmp_path):
    model = tiny.llama()
    attention.enable(model)
    model.save_pretrained(tmp_path)
    assert "hf_kvcaches" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"


@torch.no_grad()
def test_set_by_its_bare_name_it_falls_back_on_eager():
    model = tiny.gemma2()
    model.set_attn_implementation("eager")
    before = model(**padded_batch()).logits
    model.set_attn_implementation(attention.NAME)
    assert torch.equal(model(**padded_batch()).logits, before)
    attention.disable(model)
    assert model.config._attn_implementation == "eager"


def test_a_model_that_computes_attention_itself_is_refused():
    model = tiny.build(BloomConfig(vocab_size=tiny.VOCABULARY, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(UnsupportedError, match="Bloom"):
        hf_kvcaches.enable(model)


def test_what_is_no_model_is_refused():
    with pytest.raises(ConfigError, match="model"):
        hf_kvcaches.enable("meta-llama/Llama-3.2-1B")


class RecordingView(LayerView):
    """Attends like the model would, and keeps what it was given."""

    def __init__(self, keys, values, log):
        self.keys, self.values, self.log = keys, values, log

    def attend(self, module, query, mask, **kwargs):
        self.log.append((module.layer_idx, mask))
        return previous_attention(module, query, self.keys, self.values, mask, **kwargs)


class ViewLayer(DynamicLayer):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = super().update(key_states, value_states)
        view = RecordingView(keys, values, self.log)
        return view, view


@pytest.mark.parametrize("build", [tiny.llama, tiny.gemma2, tiny.gpt2])
@torch.no_grad()
def test_a_view_is_asked_and_gets_the_mask_that_the_model_made(build):
    model, batch, log = build(), padded_batch(), []
    expected = model(**batch, past_key_values=DynamicCache()).logits
    attention.enable(model)
    layers = model.config.num_hidden_layers
    got = model(**batch, past_key_values=Cache(layers=[ViewLayer(log) for _ in range(layers)])).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert [index for index, _ in log] == list(range(layers))
    full = [mask for index, mask in log if build is not tiny.gemma2 or index % 2]  # the others have a window
    assert all(torch.equal(_shown(mask)[:, 0, -1], batch["attention_mask"].bool()) for mask in full)


def _shown(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


class ViewCache(GrowingCache):
    """Attends like the model would, through views."""

    def make_layer(self, layer_idx):
        return ViewGrowingLayer()


class ViewGrowingLayer(GrowingLayer):
    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = super().update(key_states, value_states)
        view = RecordingView(keys, values, [])
        return view, view


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_the_model_carries_its_own_attention_but_for_the_call_that_is_answered(implementation):
    model, names = tiny.llama(), []
    model.set_attn_implementation(implementation)
    expected = model(**padded_batch()).logits
    model.model.layers[1].register_forward_pre_hook(lambda *_: names.append(model.config._attn_implementation))
    got = model(**padded_batch(), past_key_values=ViewCache(model)).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert names == [implementation]
    assert type(model.config._attn_implementation) is str


def test_three_threads_use_one_model_with_caches_that_answer_and_one_that_does_not():
    model = tiny.llama()
    expected = model(tiny.ids(1, 6)).logits.detach()

    @torch.no_grad()
    def work(make):
        for _ in range(40):
            torch.testing.assert_close(model(tiny.ids(1, 6), past_key_values=make()).logits, expected, atol=1e-5, rtol=1e-5)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, (lambda: ViewCache(model), lambda: ViewCache(model), DynamicCache)))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("holds_traceback", [False, True])
@torch.no_grad()
def test_an_interrupt_between_a_cache_and_its_attention_leaves_the_model_as_it_was(holds_traceback):
    model, errors = tiny.llama(), []
    cache = ViewCache(model)
    answering = ALL_ATTENTION_FUNCTIONS[attention.NAME]

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    AttentionInterface.register(attention.NAME, interrupt)
    try:
        model(tiny.ids(1, 6), past_key_values=cache)
    except KeyboardInterrupt as error:
        errors.append(error if holds_traceback else None)
    finally:
        AttentionInterface.register(attention.NAME, answering)
    if holds_traceback:
        assert model.config._attn_implementation == attention.NAME
        errors.clear()
    assert type(model.config._attn_implementation) is str
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_masks_prepared_ahead_by_generate_work():
    model = tiny.llama()
    batch = padded_batch()
    arguments = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    before = model.generate(**batch, **arguments)
    attention.enable(model)
    assert torch.equal(model.generate(**batch, **arguments), before)


@torch.no_grad()
def test_the_forward_pass_compiles_as_one_graph():
    model = tiny.llama()
    batch = padded_batch()
    before = model(**batch).logits
    attention.enable(model)
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    assert torch.equal(compiled(**batch, use_cache=False).logits, before)


# Models that keep latents, which a cache can answer for only where it knows them


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_latents_are_refused_by_a_cache_that_takes_none_or_was_built_with_a_config(model_type: str) -> None:
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4) | dict.fromkeys(
        ("num_hidden_layers", "first_k_dense_replace"), 2
    )
    sizes |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim"), 8) | {
        "kv_lora_rank": 16,
        "q_lora_rank": None,
    }
    config = AutoConfig.for_model(model_type, vocab_size=tiny.VOCABULARY, hidden_size=32, intermediate_size=32, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedError, match=r"Reference needs.*keys and values after they are in the cache.*Use DynamicCache"):
        StreamingReference(model, budget=16)
    with pytest.raises(UnsupportedError, match=r"latent.*positions='original'"):
        EquipCache(model.config)
    cache = EquipCache(model.config, positions="original")
    with pytest.raises(UnsupportedError, match="outside of transformers' AttentionInterface"), torch.no_grad():
        model(input_ids=tiny.ids(1, 9), past_key_values=cache)
    assert cache.seen == 0

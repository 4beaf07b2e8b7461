"""The registered attention: invisible for plain tensors, a door for views, and easy to take back."""

import copy
import json
import pickle

import pytest
import torch
from transformers import BloomConfig, DynamicCache, GptOssConfig
from transformers.cache_utils import Cache, DynamicLayer

import hf_kvcaches
from hf_kvcaches.core import attention
from hf_kvcaches.core.attention import LayerView, MaskRecipe, previous_attention
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import tiny


def padded_batch() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, :5] = 0
    mask[1, :1] = 0
    return {"input_ids": tiny.ids(3, 12), "attention_mask": mask}


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


@torch.no_grad()
def test_softcapping_is_still_applied():
    capped, free = tiny.gemma2(), tiny.gemma2(attn_logit_softcapping=None)
    free.load_state_dict(capped.state_dict())
    for model in (capped, free):
        model.set_attn_implementation("eager")
    attention.enable(capped)
    attention.enable(free)
    assert not torch.allclose(capped(tiny.ids(1, 12)).logits, free(tiny.ids(1, 12)).logits, atol=1e-4)


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


def test_a_copied_or_pickled_config_still_knows_what_to_restore():
    model = tiny.llama()
    model.set_attn_implementation("eager")
    attention.enable(model)
    for twin in (copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config))):
        assert attention.is_enabled(twin)
        assert attention.previous_implementation(twin) == "eager"


def test_a_saved_model_does_not_carry_the_attention_along(tmp_path):
    model = tiny.llama()
    attention.enable(model)
    model.save_pretrained(tmp_path)
    assert "hf_kvcaches" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(("build", "fallback"), [(tiny.llama, "sdpa"), (tiny.gemma2, "eager")])
@torch.no_grad()
def test_set_by_its_bare_name_it_falls_back_on_what_the_model_can_do(build, fallback):
    model = build()
    model.set_attn_implementation(fallback)
    before = model(**padded_batch()).logits
    model.set_attn_implementation(attention.NAME)
    assert torch.equal(model(**padded_batch()).logits, before)
    attention.disable(model)
    assert model.config._attn_implementation == fallback


@torch.no_grad()
def test_set_by_its_bare_name_it_keeps_attention_sinks():
    shape = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = tiny.build(
        GptOssConfig(**shape, num_key_value_heads=2, head_dim=16, num_local_experts=4, initializer_range=0.3, pad_token_id=0)
    )
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(2.0)
    before = model(tiny.ids(2, 9)).logits
    model.set_attn_implementation(attention.NAME)
    assert torch.equal(model(tiny.ids(2, 9)).logits, before)


def test_a_mask_is_brought_to_the_device_of_the_layer():
    arguments = {"batch_size": 1, "q_length": 3, "kv_length": 3, "attention_mask": None, "allow_is_causal_skip": False}
    recipe = attention.MaskRecipe(arguments)
    assert recipe.make("sdpa", torch.device("meta")).device.type == "meta"
    assert recipe.make("sdpa", torch.device("cpu")).device.type == "cpu"
    assert recipe.make("sdpa", torch.device("meta")) is recipe.make("sdpa", torch.device("meta"))


def test_a_model_that_computes_attention_itself_is_refused():
    model = tiny.build(BloomConfig(vocab_size=tiny.VOCABULARY, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(UnsupportedError, match="Bloom"):
        hf_kvcaches.enable(model)


def test_what_is_no_model_is_refused():
    with pytest.raises(ConfigError, match="model"):
        hf_kvcaches.enable("meta-llama/Llama-3.2-1B")


@torch.no_grad()
def test_the_mask_is_made_once_for_all_layers(monkeypatch):
    made = []
    original = attention.compat.mask_function("sdpa")
    monkeypatch.setitem(attention.compat.AttentionMaskInterface._global_mapping, "sdpa", lambda **kw: made.append(1) or original(**kw))
    model = tiny.llama()
    attention.enable(model)
    model(**padded_batch())
    assert len(made) == 1


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
def test_a_view_is_asked_and_sees_the_padding_mask(build):
    model, batch, log = build(), padded_batch(), []
    expected = model(**batch, past_key_values=DynamicCache()).logits
    attention.enable(model)
    layers = model.config.num_hidden_layers
    got = model(**batch, past_key_values=Cache(layers=[ViewLayer(log) for _ in range(layers)])).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert [index for index, _ in log] == list(range(layers))
    assert all(isinstance(mask, MaskRecipe) and torch.equal(mask.padding, batch["attention_mask"].bool()) for _, mask in log)


def test_a_model_that_looks_into_its_mask_is_told_what_to_do():
    with pytest.raises(AttributeError, match=r"dtype.*disable\(model\)"):
        _ = MaskRecipe({"attention_mask": None}).dtype
    copied = copy.deepcopy(MaskRecipe({"attention_mask": None}))
    assert copied.padding is None


@torch.no_grad()
def test_without_padding_there_is_no_padding_mask():
    model, log = tiny.llama(), []
    attention.enable(model)
    model(tiny.ids(1, 6), past_key_values=Cache(layers=[ViewLayer(log) for _ in range(4)]))
    assert all(mask.padding is None for _, mask in log)


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

"""The cache as a whole: what it holds, what it says, what it refuses, and that it survives being saved."""

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import ArtifactError, ConfigError, EquipCache, GrowingCache, KVCache, UnsupportedError
from hf_kvcaches.core.files import Content, container, read_file
from hf_kvcaches.core.report import measured_bytes
from tests import tiny


@pytest.fixture
def model():
    return tiny.llama()


def fill(model, tokens: int = 9, **kwargs) -> GrowingCache:
    cache = GrowingCache(model, **kwargs)
    with torch.no_grad():
        model(tiny.ids(1, tokens), past_key_values=cache)
    return cache


@torch.no_grad()
def test_logits_are_those_of_a_dynamic_cache_to_the_bit():
    text = tiny.ids(2, 12)
    for model in (tiny.llama(), tiny.gemma2(), tiny.gpt2()):
        caches = GrowingCache(model), DynamicCache(config=model.config)
        one, other = ([model(part, past_key_values=cache).logits for part in text.split([9, 1, 1, 1], 1)] for cache in caches)
        assert all(map(torch.equal, one, other))


def test_making_a_cache_changes_nothing_about_the_model(model):
    before = dict(vars(model.config)), dict(vars(model))
    GrowingCache(model)
    EquipCache(model, budget=8)
    assert (dict(vars(model.config)), dict(vars(model))) == before


def test_a_cache_built_with_a_config_has_no_model(model):
    with pytest.raises(ConfigError, match="no model"):
        _ = GrowingCache(model.config).model


def test_the_report_counts_what_is_really_allocated(model):
    cache = fill(model)
    report = cache.report()
    assert (report.cache, report.seen, report.kept) == ("GrowingCache", 9, (9, 9, 9, 9))
    capacity = cache.layers[0].key_buffer.shape[2]
    assert report.bytes == 4 * 2 * 2 * capacity * 8 * 4
    assert report.as_dict() == {"cache": "GrowingCache", "seen": 9, "kept": (9, 9, 9, 9), "bytes": report.bytes}
    assert "tokens seen" in str(report)
    assert "9" in str(report)
    assert repr(cache).startswith("GrowingCache(4 layers, seen=9")


def test_views_of_one_block_are_counted_once():
    block = torch.zeros(100)
    assert measured_bytes([block[:10], block[50:], torch.zeros(3)]) == 412


def test_what_a_learned_prompt_put_in_is_not_saved(tmp_path):
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(tiny.llama(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedError, match="learned prompt"):
        GrowingCache(model).save(tmp_path / "cache")


def test_an_empty_cache_can_be_saved(model, tmp_path):
    GrowingCache(model).save(tmp_path / "empty")
    assert GrowingCache.load(tmp_path / "empty", model).seen == 0


def test_a_cache_without_a_model_can_not_be_saved(model, tmp_path):
    with pytest.raises(ConfigError, match="model"):
        GrowingCache(model.config).save(tmp_path / "cache")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.update(format_version=99), "expected format version 7, got 99. Upgrade"),
        (lambda header: header.update(format_version="new"), "of the wrong kind"),
        (lambda header: header.update(type="kv-codec"), "expected a 'cache', got a 'kv-codec'"),
        (lambda header: header.pop("layers"), "fields are missing"),
        (lambda header: header.update(settings=[]), "of the wrong kind"),
        (lambda header: header.update(codec={"metadata": {}}), "doesn't make a GrowingCache"),
        (lambda header: header["layers"].pop(), "this model's cache has"),
        (lambda header: header["layers"][0]["values"].update(seen=-(1 << 60)), "counters"),
    ],
)
def test_headers_that_do_not_fit_are_refused(model, tmp_path, change, message):
    path = tmp_path / "cache"
    fill(model).save(path)
    header, tensors = read_file(path)
    change(header)
    path.write_bytes(b"".join(container(Content(header, tensors))))
    with pytest.raises(ArtifactError, match=message):
        GrowingCache.load(path, model)


def test_a_cache_for_a_smaller_model_is_refused_by_a_larger_one(model):
    cache = GrowingCache(tiny.llama(num_hidden_layers=2))
    with pytest.raises(ConfigError, match="2 layers"), torch.no_grad():
        model(tiny.ids(1, 3), past_key_values=cache)


@pytest.mark.parametrize("wrong", [None, "gpt2", 3, torch.nn.Linear(1, 1)])
def test_what_is_neither_model_nor_config_is_refused(wrong):
    with pytest.raises(ConfigError, match="model"):
        GrowingCache(wrong)


def test_the_base_class_can_not_be_built(model):
    with pytest.raises(TypeError):
        KVCache(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no CUDA device is offloading refused")
def test_offloading_without_a_gpu_is_refused(model):
    with pytest.raises(UnsupportedError, match="CUDA"):
        GrowingCache(model, offloading=True)

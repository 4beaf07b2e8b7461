"""The cache as a whole: what transformers asks of it, what it holds and says, what it refuses, and that it survives being saved."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import (
    AdaptiveSubspace,
    ArtifactError,
    CacheReport,
    ConfigError,
    EquipCache,
    GrowingCache,
    SubspaceCache,
    UnsupportedError,
)
from hf_kvcaches.core.files import Content, container, read_file
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.report import measured_bytes
from tests import tiny
from tests.helpers.caches import SMALL


@pytest.fixture
def model():
    return tiny.llama()


@torch.no_grad()
def filled(model, cache, tokens=30):
    model(input_ids=tiny.ids(1, tokens), past_key_values=cache)
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


def test_the_report_counts_what_is_really_allocated(model):
    cache = filled(model, GrowingCache(model), 9)
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
    with pytest.raises(ConfigError, match="no model"):
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
    filled(model, GrowingCache(model), 9).save(path)
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no CUDA device is offloading refused")
def test_offloading_without_a_gpu_is_refused(model):
    with pytest.raises(UnsupportedError, match="CUDA"):
        GrowingCache(model, offloading=True)


PROMPT = tiny.ids(1, 24)
MODELS = {"llama": tiny.llama, "hybrid": tiny.gemma2, "linear": tiny.lfm2}
CASES = [(family, name) for family in MODELS for name in SMALL if family != "linear" or name in ("growing", "equip", "equip, scores")]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def model_and_make(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Any]:
    family, name = request.param
    model = MODELS[family]()
    model.generation_config.eos_token_id = None
    return model, SMALL[name]


def answer(model: PreTrainedModel, cache: Any, prompt: torch.Tensor = PROMPT, new: int = 6) -> torch.Tensor:
    return model.generate(prompt, past_key_values=cache, max_new_tokens=new, do_sample=False, pad_token_id=0)


def test_an_empty_and_a_filled_cache_say_of_themselves_what_is_true(model_and_make: Any) -> None:
    model, make = model_and_make
    cache, plain = make(model), DynamicCache(config=model.config)
    assert len(cache) == len(plain) == model.config.num_hidden_layers
    for filled in (False, True):
        if filled:
            answer(model, cache)
            answer(model, plain)
        assert cache.is_initialized is filled
        assert cache.get_seq_length() == plain.get_seq_length()
        assert type(cache.get_seq_length()) is int
        assert all(layer.is_compileable in (True, False) for layer in cache.layers)
        assert f"seen={plain.get_seq_length()}" in repr(cache)
        for name in ("is_sliding", "is_dummy", "is_linear"):
            if hasattr(plain, name) and not (name == "is_sliding" and not isinstance(cache, GrowingCache | EquipCache | SubspaceCache)):
                assert getattr(cache, name) == getattr(plain, name), name
        if hasattr(plain, "get_max_length"):
            assert cache.get_max_length(len(cache)) == -1
            assert all(layer.get_max_length() == -1 for layer in cache.layers if isinstance(layer, KVLayer))
        if hasattr(plain, "get_query_offset"):
            assert cache.get_query_offset() == plain.get_query_offset()
        assert not any(getattr(cache, "is_recording_past", lambda layer: False)(layer) for layer in range(len(cache)))


@pytest.mark.skipif(not hasattr(DynamicCache, "early_initialization"), reason="newer than this transformers")
def test_what_was_initialized_early_answers_as_ever(model_and_make: Any) -> None:
    model, make = model_and_make
    early = make(model)
    dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    early.early_initialization(1, model.config.num_key_value_heads, dim, torch.float32, torch.device("cpu"))
    assert early.is_initialized
    assert (early.seen, max(early.report().kept)) == (0, 0)
    assert torch.equal(answer(model, early), answer(model, make(model)))
    early.reset()
    assert torch.equal(answer(model, early), answer(model, make(model)))


class DeferredStop:
    """What transformers' `DeferredStopCheck` does to a cache, which is returned one pass too far and put back."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        cache.activate_past_recording()

    def step(self) -> None:
        self.cache.crop(0)

    def finish(self, steps_to_undo: int) -> None:
        self.cache.crop(-steps_to_undo)
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


@torch.no_grad()
@pytest.mark.parametrize("undone", [0, 1])
def test_a_stop_that_is_noticed_one_pass_late_leaves_the_cache_as_if_it_had_been_in_time(model_and_make: Any, undone: int) -> None:
    model, make = model_and_make
    late, plain = make(model), make(model)
    if not getattr(late, "is_croppable", False):
        pytest.skip("it is left to wait at each step")
    text = answer(model, plain, new=7)
    answer(model, late, new=1)
    stop = DeferredStop(late)
    for index in range(PROMPT.shape[1], PROMPT.shape[1] + 6):
        model(input_ids=text[:, index : index + 1], past_key_values=late, logits_to_keep=1)
        stop.step()
    if undone:
        model(input_ids=tiny.ids(1, 1, seed=9), past_key_values=late, logits_to_keep=1)
    stop.finish(undone)
    assert late.seen == plain.seen
    assert not any(getattr(late, "is_recording_past", lambda layer: False)(layer) for layer in range(len(late)))
    longer = torch.cat([text, tiny.ids(1, 9, seed=3)], 1)
    assert answer(model, late, longer).tolist() == answer(model, plain, longer).tolist()
    assert late.report().kept == plain.report().kept
    assert late.report().bytes == plain.report().bytes


def row(report, name):
    rows = [line.strip() for line in str(report).splitlines() if line.strip().startswith(name + "  ")]
    assert len(rows) == 1, str(report)
    return rows[0][len(name) :].strip()


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (GrowingCache, "30"),
        (lambda model: EquipCache(model, "streaming", 12), "12"),
        (lambda model: SubspaceCache(model, adaptive=AdaptiveSubspace(rank=4, warmup=16), sinks=1, recent=2), "30"),
    ],
    ids=["growing", "equip", "subspace"],
)
def test_layers_that_the_model_keeps_to_itself_are_named_and_not_counted_among_the_kept(make, kept):
    model = tiny.gemma2(num_hidden_layers=6)
    cache = filled(model, make(model))
    report = cache.report()
    assert row(report, "layers") == f"3 of 6; 3 keep the model's windows of {model.config.sliding_window}"
    assert row(report, "slots kept") == kept
    assert report.own_kept == (int(kept),) * 3
    assert set(report.others) == {0, 2, 4}
    assert f"(3 of 6 layers, seen=30, kept={kept}," in repr(cache)
    json.dumps(report.as_dict())


def test_layers_of_other_kinds_are_named_too():
    model = tiny.lfm2()
    assert row(filled(model, GrowingCache(model)).report(), "layers") == "1 of 3; 2 keep a state of the model's own"


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({}, "512", "512"),
        ({"budget": 16}, "16", "16"),
        ({"budget": 0.5}, "0.5", "15"),
        ({"budget": [8, 10, 12, 14]}, "8 to 14", "8 to 14"),
        ({"budget": 10, "decode_budget": 20}, "10", "20"),
    ],
    ids=str,
)
def test_the_budget_of_a_pruned_cache_is_reported(options, before, after):
    model = tiny.llama()
    cache = EquipCache(model, "streaming", **options)
    assert (row(cache.report(), "policy"), row(cache.report(), "budget")) == ("streaming", before)
    assert row(filled(model, cache).report(), "budget") == after
    assert isinstance(cache.report(), CacheReport)
    json.dumps(cache.report().as_dict())


def test_a_policy_that_waits_reports_the_budget_it_was_given():
    model = tiny.llama()
    cache = filled(model, EquipCache(model, "kvzip", 16))
    assert cache.report().budget == (16,) * 4
    assert cache.report().kept == (30,) * 4


# Texts

ID = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Report(CacheReport):
    """Fields of all kinds."""

    flops_saved: float = 0.0
    loss: float = 0.0
    tiers: dict | None = None
    neighbour: str | None = None
    spans: tuple = ()
    reason: str = ""


def rows(**fields):
    text = str(Report("A", 1234, (1234,), 2**20, **fields))
    return {line[:15].strip(): line[15:].strip() for line in text.splitlines()[1:]}


def test_what_is_empty_has_no_row():
    assert set(rows()) == {"tokens seen", "slots kept", "memory", "flops saved", "loss"}


def test_values_are_printed_as_people_read_them():
    shown = rows(flops_saved=0.9908349105059777, loss=0.0123456, tiers={"exact": 1640, "computed": 2}, neighbour=ID, reason="A hook.")
    assert shown["flops saved"] == "99.1%"
    assert shown["loss"] == "0.01235"
    assert shown["tiers"] == "exact 1,640, computed 2"
    assert shown["neighbour"] == "01234567…"
    assert shown["reason"] == "A hook."


def test_of_a_long_list_the_beginning_is_printed():
    assert rows(spans=tuple(range(1, 12)))["spans"] == "1, 2, 3, 4, 5, 6, 7, 8, 3 more"
    assert rows(spans=("", None)).get("spans") is None

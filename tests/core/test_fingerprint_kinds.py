"""What a fingerprint makes of adapters, of other precisions, and of weights that can't be read where the model runs."""

import copy
import gc
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from peft import PeftModel, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_kvcaches import (
    GrowingCache,
    KVCodec,
    ModelFingerprint,
    SegmentReuseCache,
    SegmentStore,
    SubspaceCache,
    WarmStartLibrary,
    set_fingerprint,
)
from hf_kvcaches.core.identity import identity_of
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError
from tests import tiny
from tests.core.fingerprint_helpers import TINY, changed, llama, lora, nudge, two_adapters
from tests.helpers.prompts import greedy
from tests.warmstart.warm import library_of, words


def test_the_order_of_active_adapters_counts():
    model = two_adapters()
    model.base_model.set_adapter(["law", "medical"])
    one = ModelFingerprint.of(model)
    model.base_model.set_adapter(["medical", "law"])
    other = ModelFingerprint.of(model)
    assert changed(one, other) == {"adapters"}
    assert "active ['law', 'medical'] here, ['medical', 'law'] there" in one.differs_from(other)[0]


def test_one_adapter_weight_counts_and_an_inactive_adapter_does_not():
    model = two_adapters()
    before = ModelFingerprint.of(model)
    attention = model.base_model.model.model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.lora_A["medical"].weight.add_(1)
    assert ModelFingerprint.of(model) == before
    with torch.no_grad():
        attention.q_proj.lora_A["law"].weight[0, 0] += 1
    after = ModelFingerprint.of(model)
    assert changed(before, after) == {"adapters"}


def test_the_scaling_of_a_single_layer_of_an_adapter_counts():
    model = two_adapters()
    before = ModelFingerprint.of(model)
    [module for module in model.modules() if hasattr(module, "scale_layer")][2].scale_layer(0.5)
    assert changed(before, ModelFingerprint.of(model)) == {"adapters"}


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=["magnitude vector", "saved module"])
def test_all_that_an_adapter_brings_counts(changes):
    model = get_peft_model(llama(), lora(**changes))
    before = ModelFingerprint.of(model)
    assert before.weights == ModelFingerprint.of(llama()).weights
    name = next(n for n, _ in model.named_parameters() if "magnitude" in n or "modules_to_save" in n)
    nudge(name)(model)
    assert changed(before, ModelFingerprint.of(model)) == {"adapters"}


def test_a_merged_adapter_changes_the_base_and_is_named_and_unmerging_is_seen():
    model = two_adapters()
    # Small powers of two add and subtract without rounding, so that unmerging gives back the same bits.
    for name, value in model.named_parameters():
        value.data = torch.where(torch.rand_like(value) < 0.5, 0.25, -0.5) if "norm" not in name else value.data
    before = ModelFingerprint.of(model)
    model.merge_adapter()
    merged = ModelFingerprint.of(model)
    assert changed(before, merged) == {"weights", "adapters"}
    assert "law" in merged.describe()
    assert "merged" in merged.describe()
    model.unmerge_adapter()
    assert ModelFingerprint.of(model) == before
    model.merge_adapter()
    gone = ModelFingerprint.of(model.merge_and_unload())
    assert changed(merged, gone) == {"adapters"}


def test_adapters_added_by_transformers_itself_count():
    if Version(peft.__version__) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"this transformers adds adapters with PEFT {MIN_PEFT_VERSION} and newer only")
    model = llama()
    plain = ModelFingerprint.of(model)
    model.add_adapter(lora(), adapter_name="law")
    model.add_adapter(lora(), adapter_name="medical")
    model.set_adapter("law")
    law = ModelFingerprint.of(model)
    assert changed(plain, law) == {"adapters"}
    model.set_adapter("medical")
    assert changed(law, ModelFingerprint.of(model)) == {"adapters"}
    model.disable_adapters()
    assert ModelFingerprint.of(model) == plain


def test_one_saved_adapter_loaded_by_peft_and_by_transformers_is_one_model(tmp_path):
    two_adapters().save_pretrained(tmp_path, selected_adapters=["law"])
    by_peft = PeftModel.from_pretrained(llama(), tmp_path / "law", adapter_name="law")
    by_transformers = llama()
    by_transformers.load_adapter(str(tmp_path / "law"), adapter_name="law")
    assert ModelFingerprint.of(by_peft).differs_from(ModelFingerprint.of(by_transformers)) == []


TYPES = [torch.float32, torch.bfloat16, torch.float16]
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "llama yarn": lambda: llama(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}),
    "gemma2": tiny.gemma2,
    "gpt2": tiny.gpt2,
    "gpt_neox": lambda: tiny.build(GPTNeoXConfig(**TINY)),
}


def fingerprint(model: torch.nn.Module) -> ModelFingerprint:
    return ModelFingerprint.of(model)


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    return copy.deepcopy(model).to(dtype)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("there", TYPES)
def test_a_model_is_known_in_every_precision_loaded_or_cast(name: str, there: torch.dtype, tmp_path: Path) -> None:
    MODELS[name]().save_pretrained(tmp_path)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype) for dtype in TYPES]
    expected = ModelFingerprint.from_dict(json.loads(json.dumps(fingerprint(models[TYPES.index(there)]).to_dict())))
    for model in [*models, *(cast(models[0], dtype) for dtype in TYPES)]:
        expected.require_model(model, "it")
    for model in models:
        if model.dtype != there:
            with pytest.raises(FingerprintMismatch):
                ModelFingerprint.of(model).require_same(expected, "it")


def scaled_matrix(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.01)


def exchanged(model: PreTrainedModel) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data.copy_(weight.data.roll(1, 0))


CHANGES: dict[str, tuple[Callable[[PreTrainedModel], object], str]] = {
    "another seed": (lambda model: model.load_state_dict(llama(seed=1).state_dict()), "weights differ"),
    "one matrix scaled": (scaled_matrix, "weights differ"),
    "rows exchanged": (exchanged, "weights differ"),
    "a setting": (lambda model: setattr(model.model.layers[0].self_attn, "scaling", 1.0), "settings differ"),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CHANGES)
def test_another_model_is_refused_in_every_precision(name: str, dtype: torch.dtype) -> None:
    change, reason = CHANGES[name]
    model = llama()
    expected = fingerprint(model)
    change(model)
    with pytest.raises(FingerprintMismatch, match=reason):
        expected.require_model(cast(model, dtype), "it")
    with pytest.raises(FingerprintMismatch, match=reason):
        fingerprint(cast(model, dtype)).require_model(llama(), "it")


@pytest.mark.parametrize("dtype", TYPES)
def test_adapters_are_known_in_every_precision_and_merged_or_other_ones_are_refused(dtype: torch.dtype) -> None:
    model = two_adapters()
    expected = fingerprint(model)
    expected.require_model(cast(model, dtype), "it")
    changed = copy.deepcopy(model)
    changed.base_model.model.model.layers[0].self_attn.q_proj.lora_A["law"].weight.data.mul_(1.01)
    with pytest.raises(FingerprintMismatch, match="adapters differ"):
        expected.require_model(cast(changed, dtype), "it")
    model.set_adapter("medical")
    with pytest.raises(FingerprintMismatch, match="adapters differ: active"):
        expected.require_model(cast(model, dtype), "it")


# Artifacts in use

PROMPT = tiny.ids(1, 60, seed=3)


@pytest.mark.parametrize("dtype", TYPES)
def test_codecs_serve_their_model_in_every_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    KVCodec.calibrate(tiny.llama(), None, [tiny.ids(96).tolist()], bytes_ratio=1.5, progress=False).save_pretrained(tmp_path)
    model = tiny.llama().to(dtype)
    codec = KVCodec.from_pretrained(tmp_path, model=model)
    logits = greedy(model, PROMPT, SubspaceCache(model, codec, sinks=2, recent=4)).logits[0]
    # All dimensions are kept, so only rounding is lost.
    tolerance = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}[dtype]
    torch.testing.assert_close(logits, greedy(model, PROMPT, None).logits[0], atol=tolerance, rtol=0.01)
    with pytest.raises(FingerprintMismatch, match="weights differ"):
        SubspaceCache(tiny.llama(seed=1).to(dtype), codec)


def test_stored_keys_and_values_stay_with_their_precision(tmp_path: Path) -> None:
    model, other = tiny.llama(), tiny.llama().to(torch.bfloat16)
    fingerprint(model).require_model(other, "it")
    library_of(model, tiny.ids(1, 12)).save_pretrained(tmp_path / "library")
    with pytest.raises(FingerprintMismatch, match="weights differ"):
        WarmStartLibrary.from_pretrained(tmp_path / "library", other, words())
    cache = GrowingCache(model)
    greedy(model, PROMPT, cache)
    cache.save(tmp_path / "cache")
    with pytest.raises(FingerprintMismatch, match="weights differ"):
        GrowingCache.load(tmp_path / "cache", other)


def without_data(model: torch.nn.Module) -> torch.nn.Module:
    """The weights on the meta device, as where another program keeps them."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
    return model


def carried(fingerprint: ModelFingerprint) -> ModelFingerprint:
    return ModelFingerprint.from_dict(json.loads(json.dumps(fingerprint.to_dict())))


def test_weights_that_cannot_be_read_ask_for_a_fingerprint() -> None:
    model = without_data(tiny.llama())
    with pytest.raises(UnsupportedError, match=r"embed_tokens.weight.*meta device.*set_fingerprint"):
        ModelFingerprint.of(model)
    with SegmentStore("memory") as store:
        assert "set_fingerprint" in identity_of(model).reason
        codec = KVCodec.calibrate(tiny.llama(), None, [tiny.ids(60).tolist()], progress=False)
        for ask in (lambda: SubspaceCache(model, codec), lambda: GrowingCache(model).save("unused")):
            with pytest.raises((FingerprintMismatch, UnsupportedError), match="set_fingerprint"):
                ask()
        SegmentReuseCache(model, store, mode="auto")


def test_a_given_fingerprint_says_what_cannot_be_read() -> None:
    expected = ModelFingerprint.of(tiny.llama())
    model = without_data(tiny.llama())
    set_fingerprint(model, carried(expected))
    assert ModelFingerprint.of(model) == expected
    assert identity_of(model).digest == expected.digest
    codec = KVCodec.calibrate(tiny.llama(), None, [tiny.ids(60).tolist()], progress=False)
    SubspaceCache(model, codec)
    other = KVCodec.calibrate(tiny.llama(seed=1), None, [tiny.ids(60).tolist()], progress=False)
    with pytest.raises(FingerprintMismatch, match="weights differ"):
        SubspaceCache(model, other)
    set_fingerprint(model, None)
    with pytest.raises(UnsupportedError, match="set_fingerprint"):
        ModelFingerprint.of(model)


def test_what_can_be_read_is_read() -> None:
    model = tiny.llama()
    fingerprint = ModelFingerprint.of(model)
    set_fingerprint(model, fingerprint)
    model.model.norm.weight.data[0] += 1
    assert ModelFingerprint.of(model).differs_from(fingerprint) == ["weights differ"]
    model.model.layers[0].self_attn.scaling = 1.0
    assert "settings differ" in ModelFingerprint.of(without_data(model)).differs_from(fingerprint)[0]


@pytest.mark.parametrize(
    "other",
    [
        lambda: tiny.llama(hidden_size=48, num_attention_heads=6),
        lambda: tiny.llama(num_hidden_layers=2),
        lambda: tiny.llama().to(torch.bfloat16),
    ],
    ids=["shape", "layers", "dtype"],
)
def test_a_fingerprint_of_another_model_is_refused_and_the_one_before_stays(other) -> None:
    model, fingerprint = without_data(tiny.llama()), ModelFingerprint.of(tiny.llama())
    set_fingerprint(model, fingerprint)
    with pytest.raises(UnsupportedError, match="set_fingerprint"):
        set_fingerprint(model, ModelFingerprint.of(other()))
    assert ModelFingerprint.of(model) == fingerprint


def test_what_is_no_fingerprint_is_refused() -> None:
    with pytest.raises(ConfigError, match="fingerprint"):
        set_fingerprint(tiny.llama(), "a digest")


def test_adapters_that_cannot_be_read_are_known_too_and_merged_ones_are_refused() -> None:
    whole = two_adapters()
    fingerprint = ModelFingerprint.of(whole)
    model = without_data(two_adapters())
    set_fingerprint(model, fingerprint)
    assert ModelFingerprint.of(model) == ModelFingerprint.of(model.get_base_model()) == fingerprint
    model.set_adapter("medical")
    with pytest.raises(UnsupportedError, match="set_fingerprint"):
        ModelFingerprint.of(model)
    readable = two_adapters()
    set_fingerprint(readable, fingerprint)
    readable.merge_adapter()
    without_data(readable.get_base_model())
    with pytest.raises(UnsupportedError, match="set_fingerprint"):
        ModelFingerprint.of(readable)


def test_a_given_fingerprint_keeps_no_model_alive() -> None:
    model = llama()
    set_fingerprint(model, ModelFingerprint.of(model))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.full
def test_a_sharded_model_is_the_whole_one_by_its_given_fingerprint(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(sharded, args=(tmp_path, ModelFingerprint.of(tiny.llama()).to_dict()), nprocs=2)
    for rank in range(2):
        found = ModelFingerprint.from_dict(json.loads((tmp_path / str(rank)).read_text()))
        assert not found.differs_from(ModelFingerprint.of(tiny.llama()))


def sharded(rank: int, folder: Path, fingerprint: dict) -> None:
    """What one of the processes does."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"})
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = tiny.llama()
    for part in (*model.model.layers, model):
        fully_shard(part)
    assert "set_fingerprint" in identity_of(model).reason
    set_fingerprint(model, ModelFingerprint.from_dict(fingerprint))
    found = identity_of(model).fingerprint
    assert found is not None
    (folder / str(rank)).write_text(json.dumps(found.to_dict()))
    dist.destroy_process_group()

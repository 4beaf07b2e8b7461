"""What was made for a model serves it in any precision, and no other model."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedModel

from hf_kvcaches import GrowingCache, KVCodec, SubspaceCache, WarmStartLibrary
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.errors import FingerprintMismatch
from tests import tiny
from tests.core.fingerprint_helpers import TINY, llama, two_adapters
from tests.warmstart.warm import library_of, words

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


def answer(model: PreTrainedModel, cache: object) -> Any:
    return model.generate(
        PROMPT, past_key_values=cache, max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_codecs_serve_their_model_in_every_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    KVCodec.calibrate(tiny.llama(), None, [tiny.ids(96).tolist()], bytes_ratio=1.5, progress=False).save_pretrained(tmp_path)
    model = tiny.llama().to(dtype)
    codec = KVCodec.from_pretrained(tmp_path, model=model)
    logits = answer(model, SubspaceCache(model, codec, sinks=2, recent=4)).logits[0]
    # All dimensions are kept, so only rounding is lost.
    tolerance = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}[dtype]
    torch.testing.assert_close(logits, answer(model, None).logits[0], atol=tolerance, rtol=0.01)
    with pytest.raises(FingerprintMismatch, match="weights differ"):
        SubspaceCache(tiny.llama(seed=1).to(dtype), codec)


def test_stored_keys_and_values_stay_with_their_precision(tmp_path: Path) -> None:
    model, other = tiny.llama(), tiny.llama().to(torch.bfloat16)
    fingerprint(model).require_model(other, "it")
    library_of(model, tiny.ids(1, 12)).save_pretrained(tmp_path / "library")
    with pytest.raises(FingerprintMismatch, match="weights differ"):
        WarmStartLibrary.from_pretrained(tmp_path / "library", other, words())
    cache = GrowingCache(model)
    answer(model, cache)
    cache.save(tmp_path / "cache")
    with pytest.raises(FingerprintMismatch, match="weights differ"):
        GrowingCache.load(tmp_path / "cache", other)

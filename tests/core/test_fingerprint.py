"""A fingerprint changes with everything that changes keys and values, and with nothing else."""

import copy
import functools
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_kvcaches.core.fingerprint import ModelFingerprint, digest_of_tokenizer
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch
from tests.core.fingerprint_helpers import TINY, Change, changed, llama, nudge, tokenizer, two_adapters
from tests.costs import seconds


def gemma2() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Gemma2Config(**TINY, num_key_value_heads=2, head_dim=8, sliding_window=16))


def new_rope(model: torch.nn.Module) -> None:
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 500000.0}


def pictures() -> torch.nn.Module:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    vision = {**sizes, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = {**TINY, "num_key_value_heads": 2, "head_dim": 8}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))


def on(path: str, **values: object) -> Change:
    """Sets attributes of a part of the model."""

    def change(model: torch.nn.Module) -> None:
        part = functools.reduce(getattr, path.split("."), model)
        for name, value in values.items():
            setattr(part, name, value)

    return change


LAYER = "model.layers.1.self_attn"
CHANGES: dict[str, tuple[Callable[[], torch.nn.Module], Change, set[str], str]] = {
    "an embedding": (llama, nudge("model.embed_tokens.weight"), {"weights"}, "weights differ"),
    "a saved buffer": (llama, lambda m: m.register_buffer("extra", torch.ones(3)), {"weights"}, "weights differ"),
    "rope theta": (llama, new_rope, {"settings"}, "rope_parameters"),
    "window": (gemma2, on("config", sliding_window=8), {"settings"}, "sliding_window 8 here, 16 there"),
    "window in use": (gemma2, on(LAYER, sliding_window=8), {"settings"}, "settings differ: modules"),
    "layer types": (gemma2, on("config", layer_types=["full_attention"] * 2), {"settings"}, "layer_types"),
    "softcap": (gemma2, on("config", attn_logit_softcapping=9.0), {"settings"}, "attn_logit_softcapping 9.0 here, 50.0 there"),
    "causality": (llama, on(LAYER, is_causal=False), {"settings"}, "settings differ: modules"),
    "an unknown option": (llama, on("config", brand_new_option=True), {"settings"}, "brand_new_option True here, None there"),
    "quantisation": (llama, on("config", quantization_config={"bits": 4}), {"settings"}, "quantization_config"),
    "vision": (pictures, on("config.vision_config", layer_norm_eps=0.3), {"settings"}, "settings differ: config.vision_config"),
    "text inside": (pictures, on("config.text_config", sliding_window=3), {"settings"}, "settings differ: config.text_config"),
    "dtype": (llama, lambda m: m.lm_head.to(torch.bfloat16), {"weights"}, "weights differ"),
}


@pytest.mark.parametrize(("make", "change", "components", "reason"), CHANGES.values(), ids=CHANGES.keys())
def test_each_single_change_shows_in_its_component_and_is_named(make, change, components, reason):
    model = make()
    before = ModelFingerprint.of(model)
    change(model)
    after = ModelFingerprint.of(model)
    assert changed(before, after) == components
    assert after != before
    assert after.digest != before.digest
    assert str(after) != str(before)
    reasons = after.differs_from(before)
    assert len(reasons) == len(components)
    assert reason in "; ".join(reasons)
    assert before.differs_from(after)
    assert after == ModelFingerprint.of(copy.deepcopy(model)) == ModelFingerprint.of(model)


def test_dynamic_rope_keeps_its_identity_after_a_long_prompt():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY, rope_parameters=rope, max_position_embeddings=16))
    before, frequencies = ModelFingerprint.of(model), model.model.rotary_emb.inv_freq.clone()
    model(torch.arange(40)[None])
    assert not torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert ModelFingerprint.of(model) == before


SCRIPT = """
import sys
from transformers import AutoTokenizer, LlamaForCausalLM
from hf_kvcaches import ModelFingerprint
print(ModelFingerprint.of(LlamaForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])).digest)
"""


def test_another_process_finds_the_same_digest(tmp_path):
    llama().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    here = ModelFingerprint.of(LlamaForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path))
    environment = {**os.environ, "PYTHONHASHSEED": "4242", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()[-1]
    assert there == here.digest


# Tokenizers

TOKENIZER_CHANGES: dict[str, Callable[[PreTrainedTokenizerFast], object]] = {
    "chat template": lambda t: setattr(t, "chat_template", "{{ messages }}"),
    "an added token": lambda t: t.add_tokens(["whale"]),
    "a special token": lambda t: t.add_special_tokens({"eos_token": "<end>"}),
    "which token is special": lambda t: setattr(t, "bos_token", "</s>"),
}


@pytest.mark.parametrize("change", TOKENIZER_CHANGES.values(), ids=TOKENIZER_CHANGES.keys())
def test_each_single_change_of_the_tokenizer_is_seen(change):
    model, words = llama(), tokenizer()
    before = ModelFingerprint.of(model, words)
    change(words)
    after = ModelFingerprint.of(model, words)
    assert changed(before, after) == {"tokenizer"}
    assert "tokenizer differs" in after.differs_from(before)[0]


def test_tokenizers_are_compared_only_where_both_have_one():
    model = llama()
    without, with_one = ModelFingerprint.of(model), ModelFingerprint.of(model, tokenizer())
    other = ModelFingerprint.of(model, tokenizer(25))
    assert without != with_one
    assert without.differs_from(with_one) == with_one.differs_from(without) == []
    with_one.require_same(without, "the cache")
    assert with_one.differs_from(other)


@pytest.mark.parametrize("value", ["a name", 3, object()])
def test_what_is_no_tokenizer_is_refused(value):
    with pytest.raises(ConfigError, match="tokenizer"):
        ModelFingerprint.of(llama(), value)


@pytest.mark.parametrize("value", ["a name", None, torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(value):
    with pytest.raises(ConfigError, match="model"):
        ModelFingerprint.of(value)


# Stored fingerprints


def test_it_survives_json_pickle_and_deepcopy():
    model = two_adapters()
    before = ModelFingerprint.of(model, tokenizer())
    for again in (
        ModelFingerprint.from_dict(json.loads(json.dumps(before.to_dict()))),
        pickle.loads(pickle.dumps(before)),
        copy.deepcopy(before),
    ):
        assert again == before
        assert again.digest == before.digest
        assert again.describe() == before.describe()
        assert "law" in again.describe()


def test_require_same_says_what_differs_and_what_to_do():
    model = two_adapters()
    law = ModelFingerprint.of(model)
    model.set_adapter("medical")
    with pytest.raises(FingerprintMismatch) as caught:
        ModelFingerprint.of(model).require_same(law, "the cache in 'chat.safetensors'")
    message = str(caught.value)
    assert message.startswith(
        "the cache in 'chat.safetensors' was made for another model: adapters differ: active ['medical'] here, ['law'] there"
    )
    assert "Load the model that it was made for" in message


def test_a_stored_fingerprint_that_was_changed_anywhere_is_an_artifact_error():
    data = json.loads(json.dumps(ModelFingerprint.of(llama(), tokenizer()).to_dict()))
    without = [{name: value for name, value in data.items() if name != left} for left in data]
    changed = [data | {name: value} for name in data for value in (3, "00", {}) if value != data[name]]
    inside = [data | {name: data[name] | {"more": 1}} for name in ("adapters", "settings", "facts")]
    for broken in (None, [], {}, *without, *changed, *inside):
        with pytest.raises(ArtifactError, match="fingerprint"):
            ModelFingerprint.from_dict(broken)
    # What an older version described is not called another model.
    with pytest.raises(ArtifactError, match=r"format version 5, got 4.*describe weights otherwise.*Make it anew"):
        ModelFingerprint.from_dict(data | {"format_version": 4})


def test_a_local_path_is_not_told(tmp_path):
    llama().save_pretrained(tmp_path / "small")
    found = ModelFingerprint.of(AutoModelForCausalLM.from_pretrained(tmp_path / "small"))
    assert found.facts["name"] == "small"
    assert str(tmp_path) not in json.dumps(found.to_dict())


# Cost


def test_reading_weights_costs_less_than_a_second_per_gigabyte():
    model = llama(vocab_size=8000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4)
    size = sum(p.nbytes for p in model.parameters())
    assert size > 200e6
    assert seconds(lambda: ModelFingerprint.of(model), clock=time.process_time) / (size / 1e9) < 1.0


# The digest under which what belongs to a tokenizer is stored


def of_words(vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="a")), unk_token="a")


def test_a_tokenizer_that_is_loaded_again_has_the_same_digest_and_one_that_is_used_too(tmp_path):
    words = tokenizer()
    before = digest_of_tokenizer(words)
    words("some text", padding="max_length" if words.pad_token else False, truncation=True, max_length=4)
    words.save_pretrained(tmp_path)
    assert digest_of_tokenizer(words) == before
    assert digest_of_tokenizer(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == before


@pytest.mark.parametrize(
    "vocabulary",
    [{"a": 1, "b": 0}, {"a": 0, "c": 1}, {"ab": 0, "": 1}, {"a": 0, "b": 2}, {"a": 0, "b": 1, "c": 2}],
    ids=["other order", "another word", "another cut", "gap", "one more"],
)
def test_each_word_and_its_id_count(vocabulary):
    assert digest_of_tokenizer(of_words(vocabulary)) != digest_of_tokenizer(of_words({"a": 0, "b": 1}))


def test_a_vocabulary_of_200_000_words_is_read_once():
    words = of_words({"a": 0} | {f"word{number}": number for number in range(1, 200_000)})

    def seconds(call) -> float:
        began = time.process_time()
        call()
        return time.process_time() - began

    first = seconds(lambda: digest_of_tokenizer(words))
    assert first < 3
    assert seconds(lambda: digest_of_tokenizer(words)) < first / 5


def test_a_tokenizer_without_a_serialisation_has_a_digest_too():
    class Slow:
        chat_template, special_tokens_map, added_tokens_decoder = None, {}, {}

        def __init__(self, vocabulary):
            self.vocabulary = vocabulary

        def get_vocab(self):
            return self.vocabulary

        def __call__(self, text):
            return {"input_ids": [0]}

    one, same, other = Slow({"a": 0}), Slow({"a": 0}), Slow({"b": 0})
    assert digest_of_tokenizer(one) == digest_of_tokenizer(copy.copy(same)) != digest_of_tokenizer(other)

"""The digest is that of the whole fingerprint, and a changed model is noticed at the next call or soon after."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from peft import get_peft_model
from transformers import PreTrainedModel

from hf_kvcaches.core import watching
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.watching import digest_of_model
from tests.core.fingerprint_helpers import llama, lora, two_adapters


def whole(model: PreTrainedModel) -> str:
    return ModelFingerprint.of(model, refresh=True).digest


def tensors(model: PreTrainedModel) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.fixture
def fingerprints(monkeypatch: pytest.MonkeyPatch) -> list[PreTrainedModel]:
    """Collects the models whose fingerprint is taken."""
    taken: list[PreTrainedModel] = []

    class Counting(ModelFingerprint):
        @classmethod
        def of(cls, model, *args, **kwargs):
            taken.append(model)
            return ModelFingerprint.of(model, *args, **kwargs)

    monkeypatch.setattr(watching, "ModelFingerprint", Counting)
    return taken


def test_the_digest_is_that_of_the_fingerprint_and_is_taken_once(fingerprints: list[PreTrainedModel]) -> None:
    model, other = llama(), llama(seed=1)
    assert {digest_of_model(model) for _ in range(50)} == {whole(model)}
    assert digest_of_model(other) == whole(other) != whole(model)
    with torch.no_grad():
        model(torch.arange(9)[None])
    assert digest_of_model(model) == digest_of_model(llama())
    assert [each is model for each in fingerprints] == [True, False, False]


def at_once(model: PreTrainedModel, change: Callable[[], object]) -> None:
    """A change is seen at the next call, wherever in its round the watch is, and undone changes too."""
    before = digest_of_model(model)
    for _ in range(3):
        digest_of_model(model)
    change()
    after = digest_of_model(model)
    assert after == whole(model)
    assert after != before


def add_one(model: PreTrainedModel, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[7].add_(1)


IN_PLACE = {
    "one element": lambda model: add_one(model, "model.layers.1.mlp.up_proj.weight"),
    "a norm": lambda model: add_one(model, "model.norm.weight"),
    "loaded weights": lambda model: model.load_state_dict(llama(seed=2).state_dict()),
    "another type": lambda model: model.to(torch.bfloat16),
    "another tensor": lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight + 1)),
    "every tensor through .data": lambda model: [parameter.data.add_(0.5) for parameter in model.parameters()],
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(2),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_changes_that_pytorch_counts_or_that_are_everywhere_are_seen_at_once(name: str) -> None:
    model = llama()
    at_once(model, lambda: IN_PLACE[name](model))


CONFIG = {
    "a number": lambda config: setattr(config, "sliding_window", 5),
    "an entry of a dict": lambda config: config.rope_parameters.update(rope_theta=7.0),
    "a dict": lambda config: setattr(config, "rope_parameters", {"rope_type": "default", "rope_theta": 7.0}),
}


@pytest.mark.parametrize("name", CONFIG)
def test_a_changed_config_is_seen_at_once(name: str) -> None:
    model = llama()
    at_once(model, lambda: CONFIG[name](model.config))


def test_the_way_attention_is_computed_makes_no_other_model(fingerprints: list[PreTrainedModel]) -> None:
    model = llama()
    before = digest_of_model(model)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert digest_of_model(model) == before == whole(model)
    assert len(fingerprints) == 1


def test_an_optimizers_step_is_seen_at_once() -> None:
    for fused in (False, True):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
        at_once(model, optimizer.step)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_write_through_data_to_any_single_tensor_is_seen_within_a_few_calls(layers: int) -> None:
    """At most a quarter of the tensors' number, and three."""
    model = llama(num_hidden_layers=layers)
    count = len(tensors(model))
    for index in range(len(list(model.parameters()))):
        before = digest_of_model(model)
        next(parameter for number, parameter in enumerate(model.parameters()) if number == index).data.add_(1)
        seen = [digest_of_model(model) for _ in range(count // 4 + count % 4)]
        assert seen[-1] != before
        assert seen[-1] == whole(model)


def test_a_model_of_few_tensors_is_looked_at_whole() -> None:
    linear = torch.nn.Linear(3, 2)
    samples = watching._Watched(list(linear.parameters()), [], (), "")
    assert watching._same_content(samples, list(linear.parameters()))
    for parameter in linear.parameters():
        parameter.data.add_(1)
        assert not watching._same_content(samples, list(linear.parameters()))
        parameter.data.sub_(1)


# Adapters


def test_switching_disabling_and_merging_adapters_is_seen_at_once() -> None:
    wrapped = two_adapters()
    model = wrapped.get_base_model()
    law = digest_of_model(model)
    at_once(model, lambda: wrapped.set_adapter("medical"))
    with wrapped.disable_adapter():
        assert digest_of_model(model) == whole(model) == whole(llama())
    at_once(model, lambda: wrapped.set_adapter("law"))
    assert digest_of_model(model) == law
    at_once(model, lambda: wrapped.base_model.set_adapter(["law", "medical"]))
    at_once(model, lambda: wrapped.set_adapter("law"))
    at_once(model, wrapped.merge_adapter)
    wrapped.unmerge_adapter()
    assert digest_of_model(model) == whole(model)


def test_a_new_adapter_and_another_strength_are_seen_at_once() -> None:
    model = llama()
    wrapped = []
    at_once(model, lambda: wrapped.append(get_peft_model(model, lora())))
    layer = next(module for module in model.modules() if hasattr(module, "scale_layer"))
    at_once(model, lambda: layer.scale_layer(0.5))
    at_once(model, lambda: wrapped[0].unload())
    assert digest_of_model(model) == whole(llama())


def test_adapters_that_are_loaded_are_seen_at_once(tmp_path) -> None:
    two_adapters().save_pretrained(tmp_path)
    model = llama()
    at_once(model, lambda: model.load_adapter(str(tmp_path / "law"), adapter_name="law"))
    at_once(model, lambda: model.load_adapter(str(tmp_path / "medical"), adapter_name="medical"))
    at_once(model, lambda: model.set_adapter("law"))
    at_once(model, model.disable_adapters)


def test_an_adapters_weights_are_seen_at_once() -> None:
    model = two_adapters().get_base_model()
    weight = model.model.layers[0].self_attn.q_proj.lora_A["law"].weight
    at_once(model, lambda: torch.nn.init.ones_(weight))


# Odd tensors


def test_weights_made_in_inference_mode_are_watched_by_their_content() -> None:
    with torch.inference_mode():
        model = llama()
    assert digest_of_model(model) == digest_of_model(model) == whole(model)
    with torch.inference_mode():
        at_once(model, lambda: [parameter.add_(1) for parameter in model.parameters()])


def test_a_watched_model_is_not_kept_alive() -> None:
    model = llama()
    digest_of_model(model)
    count = len(watching._watched)
    del model
    gc.collect()
    assert len(watching._watched) < count

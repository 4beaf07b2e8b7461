"""What identity costs, and what makes no other model: moving weights, looking, compiling, gradients."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import get_peft_model
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_kvcaches import EquipCache, GrowingCache, SegmentReuseCache, SegmentStore
from hf_kvcaches.core.identity import identity_of
from hf_kvcaches.kernels import checksum
from tests import tiny
from tests.core.fingerprint_helpers import lora
from tests.costs import seconds
from tests.identity.changes import PROMPT, Setup, ask, one_element, plain, requested, two_adapters


class Readings:
    """Counts the tensors whose checksum is computed."""

    def __init__(self) -> None:
        self.count = 0

    def since(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Readings]:
    counted, exact = Readings(), checksum.checksum

    def counting(value: torch.Tensor) -> int:
        counted.count += 1
        return exact(value)

    monkeypatch.setattr(checksum, "checksum", counting)
    return counted


def test_the_identity_of_a_model_of_28_layers_takes_a_millisecond_of_processor_time() -> None:
    config = LlamaConfig(vocab_size=256, hidden_size=1024, intermediate_size=2816, num_hidden_layers=28, num_attention_heads=16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    first = identity_of(model)
    # Three times what it takes on a machine with nothing else to do, for those that have.
    assert seconds(lambda: identity_of(model), times=64) < 0.003
    assert identity_of(model) == first


def test_later_turns_and_other_caches_of_a_process_read_no_weights(readings: Readings) -> None:
    setup = Setup(tiny.llama(max_position_embeddings=1024))
    with SegmentStore("memory", quantization=None) as store:
        cache = SegmentReuseCache(setup.runner, store, mode="exact")
        tokens = ask(setup, cache, PROMPT)[0]
        store.flush()
        assert readings.since() > 30
        for seed in (3, 4):
            tokens = ask(setup, cache, torch.cat([tokens, tiny.ids(1, 80, seed=seed)], dim=1))[0]
        other = SegmentReuseCache(setup.runner, store, mode="exact")
        ask(setup, other, PROMPT)
        store.flush()
        assert other.report().reused_tokens >= 64
    assert readings.since() == 0


@pytest.mark.parametrize("make", [GrowingCache, lambda model: EquipCache(model, "h2o", 16)], ids=["growing", "equip"])
def test_caches_that_share_nothing_read_no_weights_before_they_are_saved(make: Any, readings: Readings, tmp_path: Path) -> None:
    setup = Setup(two_adapters())
    cache = make(setup.runner)
    tokens = ask(setup, cache, PROMPT)[0]
    setup.runner.set_adapter("medical")
    ask(setup, GrowingCache(setup.runner), PROMPT)
    setup.runner.set_adapter("law")
    ask(setup, cache, torch.cat([tokens, PROMPT], dim=1))
    assert readings.since() == 0
    cache.save(tmp_path / "cache.safetensors")
    assert readings.since() > 30


def test_weights_are_read_again_once_after_they_moved(readings: Readings) -> None:
    model = tiny.llama()
    first = identity_of(model).digest
    readings.since()
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert identity_of(model).digest != first
    assert readings.since() > 30
    assert identity_of(model).digest
    assert readings.since() == 0


def test_a_large_tensor_that_is_written_silently_is_noticed_within_64_requests() -> None:
    model = tiny.llama(vocab_size=4096)
    first = identity_of(model)
    model.lm_head.weight.data.mul_(1.001)
    assert any(identity_of(model) != first for _ in range(64))
    assert identity_of(model).digest


def test_what_was_not_read_in_time_has_no_fingerprint() -> None:
    model = tiny.llama()
    before = identity_of(model)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert not identity_of(model).matches(before)
    assert before.known_digest() == ""


def test_an_identity_keeps_neither_the_model_nor_its_weights_alive() -> None:
    model = tiny.llama()
    layer = model.model.layers[0]
    layer.register_forward_hook(tiny.observing(lambda module, args, output, owner=model: None))
    identity = identity_of(model)
    assert identity.digest
    gone = [weakref.ref(model), weakref.ref(model.lm_head.weight)]
    del model, layer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert identity.digest


def compiled(model: PreTrainedModel) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def looking(model: PreTrainedModel) -> None:
    model.model.layers[1].register_forward_hook(tiny.observing(lambda module, args, output: None))


def looked_inside(model: PreTrainedModel) -> None:
    model(PROMPT, output_hidden_states=True, output_attentions=True)


def generated(model: PreTrainedModel) -> None:
    model.generate(PROMPT, max_new_tokens=3, do_sample=False)


def shared(model: PreTrainedModel) -> None:
    with SegmentStore("memory") as store:
        for _ in range(2):
            cache = SegmentReuseCache(model, store, mode="auto")
            model.generate(PROMPT, past_key_values=cache, max_new_tokens=2, do_sample=False)
            store.flush()
        assert cache.report().reused_tokens


def unloaded(model: PreTrainedModel) -> None:
    assert get_peft_model(model, lora()).unload() is model


HARMLESS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "offloaded by accelerate": cpu_offload,
    "compiled forward": compiled,
    "a hook that looks": looking,
    "outputs of all layers": looked_inside,
    "generate": generated,
    "prompts taken over": shared,
    "gradients of inputs": lambda model: model.enable_input_require_grads(),
    "training mode without dropout": lambda model: model.train(),
    "attention implementation": lambda model: model.set_attn_implementation("eager"),
    "an adapter that is gone": unloaded,
    "frozen": lambda model: model.requires_grad_(False),
    "a forward with a cache": lambda model: model(PROMPT, past_key_values=DynamicCache(config=model.config)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_answer_changes_no_identity(name: str) -> None:
    model = plain()
    before = identity_of(model).digest
    assert before
    with contextlib.nullcontext() if name == "offloaded by accelerate" else torch.no_grad():
        HARMLESS[name](model)
    assert identity_of(model).digest == before


def test_offloaded_weights_are_read_where_they_are() -> None:
    model = plain()
    before = identity_of(model).digest
    weight = model.model.layers[0].mlp.down_proj.weight.data
    one_element(weight)
    requested(Setup(model))
    after = identity_of(model).digest
    cpu_offload(model)
    assert identity_of(model).digest == after != before


def test_a_hook_of_the_callers_own_on_top_of_accelerates_is_found() -> None:
    model = plain()
    cpu_offload(model)
    mlp = model.model.layers[0].mlp.down_proj
    wrapped = mlp._old_forward
    mlp._old_forward = lambda hidden: wrapped(hidden) * 2
    assert "replaced" in identity_of(model).reason


def test_a_prepared_model_for_training_with_lora_is_known_by_its_dropout() -> None:
    model = get_peft_model(plain(), lora(lora_dropout=0.1)).train()
    assert "training mode" in identity_of(model.get_base_model()).reason
    assert identity_of(model.eval().get_base_model()).digest

"""What only moves weights, looks, compiles or is in the way of gradients makes no other model, and keeps a cache sharing."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import get_peft_model
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import SegmentReuseCache, SegmentStore
from hf_kvcaches.core.identity import identity_of
from tests import tiny
from tests.core.fingerprint_helpers import lora
from tests.identity.changes import PROMPT, Setup, one_element, plain, requested


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

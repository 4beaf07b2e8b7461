"""Everything that may change about a model between two requests, each with a way back where there is one."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_kvcaches import compat
from hf_kvcaches.core.identity import identity_of
from tests import tiny
from tests.core.fingerprint_helpers import lora
from tests.helpers.prompts import greedy

PROMPT = tiny.ids(1, 130, seed=1)
INVOCATION = [5, 9, 7]


@dataclass
class Setup:
    """A model on its way through two requests, with options of `generate` in the changed state."""

    runner: Any
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> PreTrainedModel:
        return compat.base_model(self.runner)

    @property
    def first(self) -> Any:
        """The first decoder layer."""
        return self.model.model.layers[0]

    @property
    def weight(self) -> nn.Parameter:
        return self.first.mlp.down_proj.weight


@dataclass(frozen=True)
class Change:
    """One way to change a model.

    Args:
        enter: A context manager that changes it, and changes it back at its end as far as that is possible.
        make: The model before.
        comes_back: Whether it is the original again, bit by bit, after the context.
        seen: Whether a fingerprint tells; else caches share nothing meanwhile.
        in_call: Whether it takes effect only inside of `generate`.
        other_type: Whether keys have another type then, which a cache that holds some refuses.
        bypassed: Whether reuse between computed tokens would bypass it, so that caches that move tokens are refused.
    """

    enter: Callable[[Setup], contextlib.AbstractContextManager[Any]]
    make: Callable[[], Any]
    comes_back: bool = True
    seen: bool = True
    in_call: bool = False
    other_type: bool = False
    bypassed: bool = False


def plain() -> Any:
    return tiny.llama(max_position_embeddings=1024)


def two_adapters() -> PeftModel:
    torch.manual_seed(1)
    model = get_peft_model(plain(), lora(), adapter_name="law")
    model.add_adapter("medical", lora())
    return model.eval()


def activated() -> PeftModel:
    torch.manual_seed(2)
    return get_peft_model(plain(), lora(alora_invocation_tokens=INVOCATION, task_type="CAUSAL_LM")).eval()


def with_tokens() -> PeftModel:
    torch.manual_seed(3)
    model = get_peft_model(plain(), lora(trainable_token_indices={"embed_tokens": PROMPT[0, :4].tolist()})).eval()
    with torch.no_grad():
        model.base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta["default"].add_(0.5)
    return model


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def requested(setup: Setup) -> None:
    """Asks as 64 requests do, within which a silent write is found."""
    for _ in range(64):
        identity_of(setup.model)


@contextlib.contextmanager
def restored(setup: Setup, tensor: torch.Tensor, write: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """A silent write, and a silent way back."""
    before = tensor.detach().clone()
    write(tensor)
    requested(setup)
    yield
    tensor.data.copy_(before)
    requested(setup)


@contextlib.contextmanager
def between(change: Callable[[], object], back: Callable[[], object] = lambda: None) -> Iterator[None]:
    """What is done, and what is done at the end."""
    change()
    yield
    back()


def hooked(handle: Any) -> contextlib.AbstractContextManager[None]:
    return between(lambda: None, handle.remove)


def one_element(parameter: torch.Tensor) -> None:
    parameter.data.view(-1)[5] += 3.0


def through_numpy(parameter: torch.Tensor) -> None:
    parameter.detach().numpy()[0, 5] += 3.0


@contextlib.contextmanager
def optimizer_step(setup: Setup) -> Iterator[None]:
    optimizer = torch.optim.AdamW(setup.model.parameters(), lr=0.02, fused=True)
    setup.model(PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()
    requested(setup)  # fused: it moves no version counter
    yield


def other_weights(setup: Setup) -> contextlib.AbstractContextManager[None]:
    before = {name: tensor.clone() for name, tensor in setup.model.state_dict().items()}
    other = tiny.llama(seed=4, max_position_embeddings=1024).state_dict()
    return between(lambda: setup.model.load_state_dict(other), lambda: setup.model.load_state_dict(before))


def shifted(_module: Any, _args: Any, output: Any) -> Any:
    return output + 0.3


def hook_on_all(setup: Setup) -> contextlib.AbstractContextManager[None]:
    target = setup.first.mlp
    return hooked(register_module_forward_hook(lambda module, args, output: output + 0.3 if module is target else None))


def own_forward(setup: Setup) -> contextlib.AbstractContextManager[None]:
    mlp = setup.first.mlp
    original = mlp.forward
    return between(lambda: setattr(mlp, "forward", lambda hidden: original(hidden) * 0.5), lambda: delattr(mlp, "forward"))


def class_forward(setup: Setup) -> contextlib.AbstractContextManager[None]:
    original = LlamaMLP.forward
    return attribute(LlamaMLP, "forward", lambda self, hidden: original(self, hidden) * 0.5)


@contextlib.contextmanager
def dropout(setup: Setup) -> Iterator[None]:
    with contextlib.ExitStack() as changes:
        for layer in setup.model.model.layers:
            changes.enter_context(attribute(layer.self_attn, "attention_dropout", 0.5))
        setup.model.train()
        yield
        setup.model.eval()


@contextlib.contextmanager
def own_attention(setup: Setup) -> Iterator[None]:
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS.register("doubled", lambda *args, **kwargs: (sdpa(*args, **kwargs)[0] * 2, None))
    AttentionMaskInterface.register("doubled", AttentionMaskInterface._global_mapping["sdpa"])
    setup.model.set_attn_implementation("doubled")
    yield
    setup.model.set_attn_implementation("sdpa")


@contextlib.contextmanager
def added(setup: Setup) -> Iterator[None]:
    torch.manual_seed(1)
    setup.runner = get_peft_model(setup.model, lora()).eval()
    yield
    setup.runner = setup.runner.unload()


def scaled(setup: Setup) -> contextlib.AbstractContextManager[None]:
    layers = [module for module in setup.model.modules() if hasattr(module, "scale_layer")]
    return between(lambda: [layer.scale_layer(0.5) for layer in layers], lambda: [layer.scale_layer(2.0) for layer in layers])


CHANGES: dict[str, Change] = {
    "one element through .data": Change(lambda s: restored(s, s.weight, one_element), plain),
    "one element through numpy": Change(lambda s: restored(s, s.weight, through_numpy), plain),
    "one embedding": Change(lambda s: restored(s, s.model.get_input_embeddings().weight, lambda w: w.data[PROMPT[0, 0]].add_(0.5)), plain),
    "fused optimizer step": Change(optimizer_step, plain, comes_back=False),
    "loaded weights": Change(other_weights, plain),
    "dtype": Change(lambda s: between(lambda: s.model.to(torch.bfloat16)), plain, comes_back=False, other_type=True),
    "attention scaling": Change(lambda s: attribute(s.first.self_attn, "scaling", 1.0), plain),
    "rotary attention scaling": Change(lambda s: attribute(s.model.model.rotary_emb, "attention_scaling", 1.7), plain),
    "inv_freq": Change(lambda s: restored(s, s.model.model.rotary_emb.inv_freq, lambda f: f.data.mul_(0.5)), plain),
    "norm epsilon": Change(lambda s: attribute(s.first.input_layernorm, "variance_epsilon", 2.0), plain),
    "activation module": Change(lambda s: attribute(s.first.mlp, "act_fn", nn.Tanh()), plain),
    "adapter added": Change(added, plain),
    "adapter switched": Change(
        lambda s: between(lambda: s.runner.set_adapter("medical"), lambda: s.runner.set_adapter("law")), two_adapters
    ),
    "adapter disabled": Change(lambda s: s.runner.disable_adapter(), two_adapters),
    "adapter scaled": Change(scaled, two_adapters),
    "adapter merged": Change(lambda s: between(s.runner.merge_adapter), two_adapters, comes_back=False),
    "adapter weight": Change(lambda s: restored(s, s.first.self_attn.v_proj.lora_A["law"].weight, one_element), two_adapters),
    "adapter of tokens": Change(lambda s: s.runner.disable_adapter(), with_tokens),
    "adapter by row": Change(
        lambda s: between(lambda: s.options.update(adapter_names=["medical"]), s.options.clear), two_adapters, seen=False, in_call=True
    ),
    "hook": Change(lambda s: hooked(s.first.mlp.register_forward_hook(shifted)), plain, seen=False),
    "pre-hook": Change(lambda s: hooked(s.first.mlp.register_forward_pre_hook(lambda _, args: (args[0] * 2,))), plain, seen=False),
    "hook on all modules": Change(hook_on_all, plain, seen=False),
    "replaced forward": Change(own_forward, plain, seen=False),
    "forward of the class": Change(class_forward, plain, seen=False),
    "autocast": Change(lambda _: torch.autocast("cpu", torch.bfloat16), plain, seen=False, other_type=True),
    "dropout": Change(dropout, plain, seen=False),
    "registered attention": Change(own_attention, plain, seen=False, bypassed=True),
}
LASTING = {name: change for name, change in CHANGES.items() if not change.in_call}
QUESTION = torch.cat([PROMPT, tiny.ids(1, 12, seed=2)], dim=1)


def ask(setup: Setup, cache: Any, ids: torch.Tensor = QUESTION, new: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the logits of the new ones."""
    torch.manual_seed(0)  # for dropout
    found = greedy(setup.runner, ids, cache, new, **setup.options)
    return found.sequences, torch.stack(found.logits, 1).float()


def plainly(setup: Setup, ids: torch.Tensor = QUESTION) -> tuple[torch.Tensor, torch.Tensor]:
    return ask(setup, DynamicCache(config=setup.model.config), ids)


def assert_like(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(found[0], expected[0])
    assert torch.allclose(found[1], expected[1], atol=1e-3, rtol=1e-3)

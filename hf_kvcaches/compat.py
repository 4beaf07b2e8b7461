"""What differs between transformers versions and model families, and the only module that may know of it."""

from __future__ import annotations

import inspect
import sys
import tomllib
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from types import FrameType
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from hf_kvcaches.errors import ConfigError, UnsupportedError, with_article


class _MarkedType(ABCMeta):
    # A mark on a class would replace the property by which its caches are told of a `generate`.

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "_is_user_defined":
            kind = cls.__name__
            hint = f"Pass {kind}(model, ...), or custom_generate=per_call({kind}, ...) for a new one in each call."
            raise ConfigError(f"past_key_values: expected a cache, got the class {kind}. {hint}")
        super().__setattr__(name, value)


class MarkedCache(metaclass=_MarkedType):
    """A cache that is told when a `generate` begins with it, as transformers marks it then. `PerCall` alone may be `custom_generate`."""

    _marked = False

    # Here and not in `KVCache`: a class that has `__new__` beside `__init__` shows the signature of `__new__`.
    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if "logits_processor" in kwargs and "generation_config" in kwargs:
            raise _not_custom_generate(cls, f"the class {cls.__name__}")
        return super().__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be `custom_generate`, which `generate` leaves out where it can't be called."""
        kind = with_article(type(self).__name__)
        raise _not_custom_generate(type(self), kind, f", or {kind} as past_key_values")

    @property
    def _is_user_defined(self) -> bool:
        return self._marked

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self._marked = value
        self.generate_begins()

    def generate_begins(self) -> None:
        """Called when `generate` begins with this cache, before it runs anything."""


def _not_custom_generate(kind: type, got: str, other: str = "") -> ConfigError:
    recipe = f"per_call({kind.__name__}, ...)"
    return ConfigError(f"custom_generate: expected {recipe}, got {got}. Pass {recipe}{other}.")


# Behind the decorator that turns gradients off; taken now, because programs replace `generate` by a wrapper of their own.
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def begin_decoding(model: PreTrainedModel, cache: MarkedCache) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The method by which the running `generate` would decode with a cache of the caller's, and the arguments that only such methods get.

    For a callable `custom_generate`, to which `generate` hands neither streamer nor assistant, and no tokenizers.
    """
    frame: FrameType | None = sys._getframe(2)  # calls the callable
    while frame is not None and frame.f_code is not _GENERATE:  # a wrapper of the caller's may be between
        frame = frame.f_back
    if frame is None:
        raise ConfigError("custom_generate: expected to be called by generate. Pass it: model.generate(..., custom_generate=...).")
    given = frame.f_locals
    mode, config, assistant = given["generation_mode"], given["generation_config"], given["assistant_model"]
    method = GENERATION_MODES_MAPPING[mode]
    if "/" in method:
        raise UnsupportedError(f"custom_generate: {mode.value} needs {method!r} as custom_generate. Pass that, and a new past_key_values.")
    other = assistant is not None and decoder_config(assistant.config).vocab_size != decoder_config(model.config).vocab_size
    if other and config.speculation_type != "dflash":
        raise UnsupportedError(
            "assistant_model: expected one with the model's vocabulary, because generate hands no tokenizers to a callable "
            "custom_generate. Leave custom_generate out, and pass a new cache as past_key_values."
        )
    arguments = model._extract_generation_mode_kwargs(None, {}, given["synced_gpus"], assistant, given["streamer"])
    model._validate_generation_mode(mode, config, arguments)
    decode = getattr(type(model), method)
    if "inputs_tensor" in inspect.signature(decode).parameters:
        arguments["inputs_tensor"] = given["inputs_tensor"]
    cache._is_user_defined = True
    return decode.__get__(model), arguments


def is_callers_cache(cache: object) -> bool:
    """Whether `generate` was given that cache, and did not make it."""
    return bool(getattr(cache, "_is_user_defined", False))


def split_model(model_or_config: object) -> tuple[PreTrainedModel | None, PreTrainedConfig]:
    """The model (without a PEFT wrapper) if one was given, and the config of its decoder."""
    if isinstance(model_or_config, PreTrainedConfig):
        return None, decoder_config(model_or_config)
    model = base_model(model_or_config)
    return model, decoder_config(model.config)


def base_model(model: object) -> PreTrainedModel:
    """The transformers model behind a PEFT, compiled or data-parallel wrapper."""
    seen: Any = model
    while not isinstance(seen, PreTrainedModel):
        inner = seen.get_base_model() if hasattr(seen, "get_base_model") else getattr(seen, "_orig_mod", getattr(seen, "module", None))
        if inner is None and type(seen).__name__ == "PeftMixedModel":
            inner = seen.base_model.model
        if inner is None or inner is seen:
            raise ConfigError.of("model", "a transformers model or its config", type(model).__name__, "Pass model or model.config.")
        seen = inner
    return seen


def records_attentions() -> bool:
    """Whether the running forward pass is to return attention weights, by its argument or by its model's config."""
    return "attentions" in (output_capturing._active_collector.get() or ())


def has_learned_prompt(model: object) -> bool:
    """Whether a PEFT wrapper puts a learned prompt or prefix before every text."""
    return bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the part that has the KV cache (the text model of a multimodal one)."""
    return config.get_text_config(decoder=True)


def layer_plan(config: PreTrainedConfig) -> list[tuple[str, Any]]:
    """For every cache layer of a decoder its type, and an empty layer of transformers' own of that type."""
    types, _ = get_layer_types_and_kwargs(config)
    try:
        return list(zip(types, DynamicCache(config=config).layers, strict=True))
    except KeyError as error:
        raise UnsupportedError(f"The model has a layer of the type {error}, for which transformers has no cache layer.") from None


@cache
def _families() -> dict[str, frozenset[str]]:
    facts = tomllib.loads((files("hf_kvcaches") / "families.toml").read_text())
    return {fact: frozenset(names.split()) for fact, names in facts.items()}


# Names of attributes of modules, and of keys of configs, that say nothing about what a model computes.
WITHOUT_EFFECT = _families()["attributes_without_effect"]


def is_family(config: PreTrainedConfig, fact: str) -> bool:
    """Whether a config is of a family of which a fact, a name in `families.toml`, is known."""
    return config.model_type in _families()[fact]


def modules_of(module: nn.Module) -> list[nn.Module]:
    """A module and all within it, each once, in no particular order but always the same; faster than `module.modules()`."""
    found, waiting = {id(module): module}, [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


def members_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Configs, children, parameters and buffers of modules, without those that accelerate or the forward itself exchanges."""
    members: list[Any] = []
    for module in modules:
        own = module.__dict__
        members += (own.get("config"), *own["_modules"].values())
        if "_hf_hook" not in own or offloaded_weights(module) is None:
            fixed = (value for name, value in own["_buffers"].items() if not _changes_with_length(module, name))
            members += (*own["_parameters"].values(), *fixed)
    return members


def _changes_with_length(module: nn.Module, name: str) -> bool:
    """Whether a buffer holds rotary frequencies that the forward changes with the length of the text."""
    rope = str(getattr(module, "rope_type", "")) if name.endswith("inv_freq") and "original" not in name else ""
    return "dynamic" in rope or "longrope" in rope


def unusual(modules: list[nn.Module]) -> list[nn.Module]:
    """Those of some modules whose calls may run more than the forward of their class in evaluation mode."""
    named = ((module, module.__dict__) for module in modules)
    return [each for each, own in named if own["training"] or own["_forward_pre_hooks"] or own["_forward_hooks"] or "forward" in own]


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Version counters of tensors, which grow with each write that autograd knows of; those of inference mode have none."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def state_of(module: nn.Module) -> dict[str, Any]:
    """What a module itself contributes to the state dict, more than parameters for quantized ones, and other buffers that don't change."""
    entries: dict[str, Any] = {}
    module._save_to_state_dict(entries, "", True)
    entries |= dict(module.named_buffers(recurse=False))
    return {name: value for name, value in entries.items() if not _changes_with_length(module, name)}


def offloaded_weights(module: nn.Module) -> Mapping[str, Any] | None:
    """Where accelerate keeps the weights of a module that are not in it, by their names there."""
    maps = (getattr(hook, "weights_map", None) for hook in _accelerate_hooks(module))
    return next((weights for weights in maps if weights is not None), None)


def _accelerate_hooks(module: nn.Module) -> Sequence[Any]:
    hook = vars(module).get("_hf_hook")
    return () if hook is None else getattr(hook, "hooks", (hook,))


def forward_hooks(module: nn.Module | None) -> list[Any]:
    """The hooks that run before and after a module's forward, or for None those of all modules."""
    if module is None:
        return [*torch_module._global_forward_pre_hooks.values(), *torch_module._global_forward_hooks.values()]
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def replaced_forward(module: nn.Module) -> Any:
    """What a module calls in the place of its class's forward; None where it calls that, perhaps compiled, or with weights moved."""
    forward = vars(module).get("forward")
    moves = all(type(hook).__name__ in _MOVING and type(hook).__module__ == "accelerate.hooks" for hook in _accelerate_hooks(module))
    if moves and getattr(getattr(forward, "func", None), "__module__", None) == "accelerate.hooks":
        forward = vars(module).get("_old_forward", forward)
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    if getattr(forward, "__module__", "") == "transformers.distributed.tensor_parallel":  # it calls what was there before
        return None
    if forward is None or getattr(forward, "__func__", None) is getattr(type(module).forward, "__func__", type(module).forward):
        return None
    return forward


# Accelerate's hooks that move weights and inputs, and do nothing else.
_MOVING = frozenset(("AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook"))
# Where a config has the name of its attention implementation, which is read in every layer of every step: its property is slow.
ATTENTION_NAME = "_attn_implementation_internal"


def can_switch_attention(model: PreTrainedModel) -> bool:
    """Whether the model looks its attention function up by name (BLOOM, MPT, Falcon and other older ones don't)."""
    return bool(model._can_set_attn_implementation())


# By which name `generate` hands its cache on: that of its own argument, which 5.24 renamed.
GENERATE_CACHE = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a forward pass; transformers 5.24 renamed `past_key_values`, and models take both names."""
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def cache_kwargs(model: object, cache: Any) -> dict[str, Any]:
    """The arguments that make a forward pass use a cache (None: without one), by the name that transformers does not warn about."""
    name = "cache" if "cache" in parameter_names(type(base_model(model))) else "past_key_values"
    return {name: cache, "use_cache": cache is not None}


def parameter_names(kind: type[nn.Module]) -> tuple[str, ...]:
    """The names of the arguments of a module's forward."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def attention_function(name: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function of that name; `eager` is the one in the module's own modeling file."""
    if name != "eager":
        return ALL_ATTENTION_FUNCTIONS[name]
    for cls in type(module).__mro__:
        own = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if own is not None:
            return own
    raise UnsupportedError(
        f"{type(module).__name__} has no eager attention function to fall back on; load the model with another attn_implementation."
    )


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model wants its token ids."""
    return layer_device(model.get_input_embeddings())


def layer_device(layer: nn.Module) -> torch.device:
    """Where a part of a model computes; its weights may be elsewhere between its turns, offloaded by accelerate."""
    hooks = (hook for module in layer.modules() if "_hf_hook" in module.__dict__ for hook in _accelerate_hooks(module))
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((torch.device(device) for device in devices if device is not None), next(layer.parameters()).device)


def process() -> tuple[int, int]:
    """The number of this process and of all, if the program runs under `accelerate`; else (0, 1)."""
    accelerate: Any = sys.modules.get("accelerate")
    if accelerate is None or not accelerate.PartialState._shared_state:  # the user's Accelerator makes it; asking for one would start it
        return 0, 1
    state = accelerate.PartialState()
    return int(state.process_index), int(state.num_processes)


def remove_pre_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Removes a forward pre-hook of which nobody has the handle."""
    for key in [key for key, registered in module._forward_pre_hooks.items() if registered is hook]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def state_of_twin(module: nn.Module, children: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What a shallow copy of a module has of its own: a compiled call would run the original, and shared layers get no more hooks."""
    return {"_modules": {**module._modules, **children}, "_compiled_call_impl": None, "_output_capturing_hooks_installed": True}


def assert_in_graph(condition: torch.Tensor, message: str) -> None:
    """Asserts a condition inside of a compiled graph, without waiting for it."""
    torch._assert_async(condition, message)


def compiles(device: torch.device) -> bool:
    """Whether steps may be compiled: on accelerators `generate` does, and elsewhere whoever has called `torch.compile` before."""
    return device.type != "cpu" or "torch._dynamo.backends.common" in sys.modules


def mark_static(tensor: torch.Tensor) -> None:
    """Say that a tensor stays where it is, for graphs that are replayed."""
    torch._dynamo.mark_static_address(tensor, guard=False)


def fused_attention(kind: str) -> Callable[..., Any]:
    """PyTorch's "flash_attention", "flash_attention_for_cpu" or "efficient_attention", which return the logarithm of their sums, too."""
    return cast("Callable[..., Any]", getattr(torch.ops.aten, f"_scaled_dot_product_{kind}"))

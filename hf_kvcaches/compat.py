"""What differs between transformers versions and model families, and the only module that may know of it."""

from __future__ import annotations

import inspect
import sys
import tomllib
from abc import ABCMeta
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.masking_utils import AttentionMaskInterface as AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils import output_capturing

from hf_kvcaches.errors import ConfigError, UnsupportedError


class _MarkedType(ABCMeta):
    """The type of cache classes. A mark on a class would replace the property by which its caches are told of a `generate`."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "_is_user_defined":
            kind = cls.__name__
            hint = f"Pass {kind}(model, ...), or custom_generate=per_call({kind}, ...) for a new one in each call."
            raise ConfigError(f"past_key_values: expected a cache, got the class {kind}. {hint}")
        super().__setattr__(name, value)


class MarkedCache(metaclass=_MarkedType):
    """A cache that is told when a `generate` begins with it: transformers marks a cache that the caller brings along."""

    _marked = False

    @property
    def _is_user_defined(self) -> bool:
        return self._marked

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self._marked = value
        self.generate_begins()

    def generate_begins(self) -> None:
        """Called when `generate` begins with this cache, before it runs anything."""


def _locals_of_generate() -> Mapping[str, Any] | None:
    """The local variables of the `generate` that called the caller's caller, directly or not; None where there is none."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(_MOST_FRAMES):
        if frame is not None and frame.f_code is not _GENERATE:
            frame = frame.f_back
    return None if frame is None or frame.f_code is not _GENERATE else frame.f_locals


def begin_decoding(model: PreTrainedModel, cache: MarkedCache) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The method by which the running `generate` would decode with a cache of the caller's, and the arguments that only such methods get.

    For a callable `custom_generate`, to which `generate` hands neither streamer nor assistant, and no tokenizers.
    """
    given = _locals_of_generate()
    if given is None:
        raise ConfigError("custom_generate: expected to be called by generate. Pass it: model.generate(..., custom_generate=...).")
    mode, config, assistant = given["generation_mode"], given["generation_config"], given["assistant_model"]
    method = GENERATION_MODES_MAPPING[mode]
    if "/" in method:
        raise UnsupportedError(f"custom_generate: {mode.value} needs {method!r} as custom_generate. Pass that, and a new past_key_values.")
    other = assistant is not None and decoder_config(assistant.config).vocab_size != decoder_config(model.config).vocab_size
    if other and getattr(config, "speculation_type", None) != "dflash":
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


# Some models wrap the method in which caches are marked.
_MOST_FRAMES = 4
# Behind the decorator that turns gradients off.
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


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


def layer_plan(config: PreTrainedConfig) -> list[tuple[str, dict[str, Any]]]:
    """For every cache layer its type, and the arguments of transformers' own layer of that type."""
    types, arguments = get_layer_types_and_kwargs(config)
    # In 5.17 there is one dict for all layers.
    each = [arguments] * len(types) if isinstance(arguments, dict) else arguments
    return list(zip(types, each, strict=True))


# With which attention modules make keys and values of the latents that a cache returns.
EXPANSION = "expand_kv"


def has_latents(model: PreTrainedModel) -> bool:
    """Whether a model keeps latents, of which its attention makes keys and values (multi-head latent attention)."""
    return any(hasattr(module, EXPANSION) for module in modules_of(model.get_decoder()))


def runs_layers_in_loops(config: PreTrainedConfig) -> bool:
    """Whether a model runs some layers several times in a pass."""
    return bool(getattr(decoder_config(config), "n_recurrent_loops", 1) > 1)


def shares_keys_between_layers(config: PreTrainedConfig) -> bool:
    """Whether some layers attend to the keys of others."""
    return bool(getattr(config, "num_kv_shared_layers", 0)) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ())


@cache
def _families() -> dict[str, frozenset[str]]:
    facts = tomllib.loads((files("hf_kvcaches") / "families.toml").read_text())
    return {fact: frozenset(names.split()) for fact, names in facts.items()}


# Names of attributes of modules, and of keys of configs, that say nothing about what a model computes.
WITHOUT_EFFECT = _families()["attributes_without_effect"]


def is_family(config: PreTrainedConfig, fact: str) -> bool:
    """Whether a config is of a family of which a fact is known.

    Args:
        fact: A name in `families.toml`.
    """
    return config.model_type in _families()[fact]


def layer_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The config of each layer, which differ in models whose layers have different head sizes."""
    count: int = config.num_hidden_layers
    if not getattr(config, "is_heterogeneous", False):
        return [config] * count
    return [config.per_layer_config[index] for index in range(count)]


def transformers_layer(layer_type: str, arguments: dict[str, Any]) -> Any:
    """Transformers' own growing layer of a type that a method leaves alone (sliding, linear, shared)."""
    if layer_type not in DYNAMIC_LAYER_TYPE_MAPPING:
        raise UnsupportedError(f"The model has a layer of the type {layer_type!r}, for which transformers names no cache layer.")
    return DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**arguments)


def modules_of(module: nn.Module) -> list[nn.Module]:
    """A module and all within it, each once, in no particular order but always the same; faster than `module.modules()`."""
    found, waiting = {id(module): module}, [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


def members_of(module: nn.Module) -> list[Any]:
    """A module's config, children, parameters and buffers, without those that accelerate or the forward itself exchanges."""
    own = module.__dict__
    if "_hf_hook" in own and offloaded_weights(module) is not None:
        return [own.get("config"), *own["_modules"].values()]
    fixed = [value for name, value in own["_buffers"].items() if not _changes_with_length(module, name)] if own["_buffers"] else ()
    return [own.get("config"), *own["_modules"].values(), *own["_parameters"].values(), *fixed]


def _changes_with_length(module: nn.Module, name: str) -> bool:
    """Whether a buffer holds rotary frequencies that the forward changes with the length of the text."""
    rope = str(getattr(module, "rope_type", "")) if name.endswith("inv_freq") and "original" not in name else ""
    return "dynamic" in rope or "longrope" in rope


def unusual(modules: list[nn.Module]) -> list[nn.Module]:
    """Those of some modules whose calls may run more than the forward of their class in evaluation mode."""
    named = ((module, module.__dict__) for module in modules)
    return [each for each, own in named if own["training"] or own["_forward_pre_hooks"] or own["_forward_hooks"] or "forward" in own]


def version_of(tensor: torch.Tensor) -> int:
    """A tensor's version counter, which grows with each write that autograd knows of; tensors of inference mode have none."""
    return -1 if tensor.is_inference() else tensor._version


def state_of(module: nn.Module) -> dict[str, Any]:
    """What a module itself contributes to the state dict, more than parameters for quantized ones, and other buffers that don't change."""
    entries: dict[str, Any] = {}
    module._save_to_state_dict(entries, "", True)
    entries |= dict(module.named_buffers(recurse=False))
    return {name: value for name, value in entries.items() if not _changes_with_length(module, name)}


def offloaded_weights(module: nn.Module) -> Mapping[str, Any] | None:
    """Where accelerate keeps the weights of a module that are not in it, by their names there."""
    hook = vars(module).get("_hf_hook")
    maps = (getattr(part, "weights_map", None) for part in getattr(hook, "hooks", (hook,)))
    return next((weights for weights in maps if weights is not None), None)


def forward_hooks(module: nn.Module | None) -> list[Any]:
    """The hooks that run before and after a module's forward, or for None those of all modules."""
    if module is None:
        return [*torch_module._global_forward_pre_hooks.values(), *torch_module._global_forward_hooks.values()]
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def replaced_forward(module: nn.Module) -> Any:
    """What a module calls in the place of its class's forward; None where it calls that, perhaps compiled, or with weights moved."""
    forward = vars(module).get("forward")
    hook = vars(module).get("_hf_hook")
    parts = (hook, *getattr(hook, "hooks", ()))
    if getattr(getattr(forward, "func", None), "__module__", None) == "accelerate.hooks" and all(
        type(part).__name__ in _MOVING and type(part).__module__ == "accelerate.hooks" for part in parts
    ):
        forward = vars(module).get("_old_forward", forward)
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    if getattr(forward, "__module__", "") == "transformers.distributed.tensor_parallel":  # it calls what was there before
        return None
    if forward is None or getattr(forward, "__func__", None) is getattr(type(module).forward, "__func__", type(module).forward):
        return None
    return forward


# Accelerate's hooks that move weights and inputs, and do nothing else.
_MOVING = frozenset(("AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook", "SequentialHook"))


def attention_in_use(config: PreTrainedConfig) -> Callable[..., Any] | None:
    """The function by which transformers computes a config's attention; None for one in the modeling file."""
    name = config._attn_implementation
    return ALL_ATTENTION_FUNCTIONS.get(getattr(name, "previous", name))


# Where a config has the name of its attention implementation, which is read in every layer of every step: its property is slow.
ATTENTION_NAME = "_attn_implementation_internal"


def attention_configs(model: PreTrainedModel) -> tuple[PreTrainedConfig, ...]:
    """The configs in which the attention modules of a model's decoder look up their implementation, each once."""
    decoder = modules_of(model.get_decoder())
    configs = [
        module.config
        for module in decoder
        if hasattr(module, "layer_idx") and isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    return tuple({id(config): config for config in configs}.values())


def can_switch_attention(model: PreTrainedModel) -> bool:
    """Whether the model looks its attention function up by name (BLOOM, MPT, Falcon and other older ones don't)."""
    return bool(model._can_set_attn_implementation())


# By which name `generate` hands its cache on: that of its own argument, which 5.24 renamed.
GENERATE_CACHE = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"


CACHE_NAMES = ("cache", "past_key_values")


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a forward pass; transformers 5.24 renamed `past_key_values`, and models take both names."""
    return next((cache for name in CACHE_NAMES if (cache := kwargs.get(name)) is not None), None)


def cache_kwargs(model: object, cache: Any) -> dict[str, Any]:
    """The arguments that make a forward pass use a cache, by the name that the installed transformers does not warn about.

    Args:
        model: Whose forward is called: a model, one of its modules, or a wrapper such as PEFT's.
        cache: None for a pass without one.
    """
    module = model if isinstance(model, nn.Module) and "input_ids" in parameter_names(type(model)) else base_model(model)
    name = "cache" if "cache" in parameter_names(type(module)) else "past_key_values"
    return {name: cache, "use_cache": cache is not None}


def parameter_names(kind: type[nn.Module]) -> tuple[str, ...]:
    """The names of the arguments of a module's forward."""
    return _names_of(kind.forward)


@cache
def _names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def supports_sdpa(config: PreTrainedConfig) -> bool:
    """Whether a config's models may be computed with sdpa; those that transformers has no model for may."""
    models = MODEL_MAPPING.get(type(config), ())
    return all(getattr(model, "_supports_sdpa", True) for model in (models if isinstance(models, tuple) else (models,)))


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


def mask_function(name: str) -> Callable[..., Any] | None:
    """The function that makes masks for that attention, or None where it wants none."""
    return AttentionMaskInterface._global_mapping.get(name)


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, str, nn.ModuleList]:
    """The module that runs the decoder layers, the name of its list of layers, and the list, which is as long as the config says."""
    count = decoder_config(model.config).num_hidden_layers
    # The encoder of an image or a text may have as many layers, and comes first.
    for module in model.get_decoder().modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and name in ("layers", "h", "blocks") and len(child) == count and _have_cache(child):
                return module, name, child
    raise UnsupportedError(f"Found no list of {count} decoder layers in {type(model).__name__}. Use GrowingCache.")


def _have_cache(layers: nn.ModuleList) -> bool:
    """Whether any layer knows its index, as those do that have keys and values in a cache; layers of an encoder of images don't."""
    return any(hasattr(module, "layer_idx") for layer in layers for module in layer.modules())


def attention_module(layer: nn.Module) -> nn.Module:
    """The part of a decoder layer that makes keys and values."""
    for module in layer.modules():
        if module is not layer and hasattr(module, "layer_idx") and hasattr(module, "is_causal"):
            return module
    raise UnsupportedError(f"Found no attention in a layer of the kind {type(layer).__name__}.")


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model wants its token ids."""
    return layer_device(model.get_input_embeddings())


def layer_device(layer: nn.Module) -> torch.device:
    """Where a part of a model computes; its weights may be elsewhere between its turns, offloaded by accelerate."""
    for module in modules_of(layer):
        hook = module.__dict__.get("_hf_hook")
        for part in () if hook is None else getattr(hook, "hooks", (hook,)):
            device = getattr(part, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return next(layer.parameters()).device


def process() -> tuple[int, int]:
    """The number of this process and of all, if the program runs under `accelerate`; else (0, 1)."""
    if "accelerate" not in sys.modules:
        return 0, 1
    from accelerate import PartialState

    # Made by the user's Accelerator; asking for one would start it.
    if not PartialState._shared_state:
        return 0, 1
    state = PartialState()
    return int(state.process_index), int(state.num_processes)


def remove_pre_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Removes a forward pre-hook of which nobody has the handle."""
    for key in [key for key, registered in module._forward_pre_hooks.items() if registered is hook]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def state_of_twin(module: nn.Module, children: Mapping[str, nn.Module]) -> dict[str, Any]:
    """In what a shallow copy of a module differs from it.

    A compiled call would run the module that it was compiled from, and transformers' own hooks must not be installed on shared layers.
    """
    return {"_modules": {**module._modules, **children}, "_compiled_call_impl": None, "_output_capturing_hooks_installed": True}


def assert_in_graph(condition: torch.Tensor, message: str) -> None:
    """Asserts a condition inside of a compiled graph, without waiting for it."""
    torch._assert_async(condition, message)

"""The parts of a model's decoder: its layers, what makes keys and values in them, and the configs that these read."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.errors import UnsupportedError

# The method by which attention modules make keys and values of the latents that a cache returns.
EXPANSION = "expand_kv"


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, str, nn.ModuleList]:
    """Return the module that runs the decoder layers, the name of its list of layers, and the list, which is as long as the config says."""
    count = compat.decoder_config(model.config).num_hidden_layers
    for module in model.get_decoder().modules():
        for name, layers in module.named_children():
            listed = name in ("layers", "h", "blocks") and isinstance(layers, nn.ModuleList) and len(layers) == count
            # The encoder of an image or a text may have as many layers, and comes first; those know no index in a cache.
            if listed and any(hasattr(part, "layer_idx") for part in layers.modules()):
                return module, name, layers
    raise UnsupportedError(f"Found no list of {count} decoder layers in {type(model).__name__}. Use GrowingCache.")


def attention_module(layer: nn.Module) -> nn.Module:
    """Return the part of a decoder layer that makes keys and values."""
    for module in layer.modules():
        if module is not layer and hasattr(module, "layer_idx") and hasattr(module, "is_causal"):
            return module
    raise UnsupportedError(f"Found no attention in a layer of the kind {type(layer).__name__}.")


def attention_configs(model: PreTrainedModel) -> tuple[PreTrainedConfig, ...]:
    """Return the configs in which a decoder's attention modules look up their implementation, each once."""
    modules = [module for module in compat.modules_of(model.get_decoder()) if hasattr(module, "layer_idx")]
    configs = {id(module.config): module.config for module in modules if isinstance(getattr(module, "config", None), PreTrainedConfig)}
    return tuple(configs.values())

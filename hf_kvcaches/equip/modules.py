"""What a cache puts on its model's attention modules: hooks that tell its layers what a module is called with, and a way for latents.

Slots of multi-head latent attention hold latents: one KV head, whose keys are the rotated part with the latent behind it, and whose values
are the latents. Queries and outputs are multiplied by the expansion in place of keys and values (DeepSeek-V2, arXiv 2405.04434, 2.1.2).
"""

from __future__ import annotations

from contextlib import suppress
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import EXPANSION, Attachment, attention_module, decoder_layers
from hf_kvcaches.core.view import LayerView, previous_attention
from hf_kvcaches.equip.policies.tokens import ModuleCall
from hf_kvcaches.equip.slot_layer import SlotLayer
from hf_kvcaches.equip.storage import Flat, Raw, read_decoded
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.launch import Backend
from hf_kvcaches.kernels.slots import Attended

_by_model: WeakKeyDictionary[PreTrainedModel, dict[int, nn.Module]] = WeakKeyDictionary()


def _begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell a cache before a pass whether that came without a mask; refuse image tokens where the cache rotates keys to other positions.

    An image token has one position per axis, and all axes of a text token agree. The attention function does not get these positions.
    """
    cache = compat.cache_of(kwargs)
    if not hasattr(cache, "unmasked"):
        return
    cache.unmasked = len(args) < 2 and kwargs.get("attention_mask") is None
    ids = kwargs.get("position_ids") if cache.refuses_images and not torch.compiler.is_compiling() else None
    if ids is not None and ids.ndim == 3:
        axes = ids[-3:]  # before the three there may be the index in the text
        if not bool((axes == axes[:1]).all()):
            raise UnsupportedError(
                "position_ids: image tokens have a position for each axis, and this cache moves tokens by one. Pass positions='original'."
            )


def _tell(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell a layer what its module is called with before the module asks it."""
    cache = compat.cache_of(kwargs)
    layers = getattr(cache, "layers", ())
    layer = layers[module.layer_idx] if module.layer_idx < len(layers) else None
    if isinstance(layer, SlotLayer):
        inputs = None
        if layer.policy.reads_inputs:
            inputs = {name: value for name, value in kwargs.items() if not isinstance(value, Cache)}
            inputs["hidden_states"] = args[0] if args else kwargs["hidden_states"]
        mask = None if getattr(cache, "unmasked", False) else kwargs.get("attention_mask", False)
        layer.module_call = ModuleCall(module, mask, kwargs.get("position_ids"), inputs)


_begin.only_observes = _tell.only_observes = True  # type: ignore[attr-defined]


class _Telling(Attachment):
    """`_begin` before a decoder, `_tell` before each of its attention modules that is found; `expand_kv` as the method of latent ones."""

    def attach(self, model: PreTrainedModel) -> None:
        for module, hook in self._hooked(model):
            if hook not in compat.forward_hooks(module):
                module.register_forward_pre_hook(hook, with_kwargs=True)
        for latent in latent_modules(model).values():
            vars(latent)[EXPANSION] = MethodType(expand_kv, latent)

    def detach(self, model: PreTrainedModel) -> None:
        for module, hook in self._hooked(model):
            compat.remove_pre_hook(module, hook)
        for latent in latent_modules(model).values():
            vars(latent).pop(EXPANSION, None)

    def _hooked(self, model: PreTrainedModel) -> list[tuple[Any, Any]]:
        hooked: list[tuple[Any, Any]] = [(model.get_decoder(), _begin)]
        with suppress(UnsupportedError):
            for layer in decoder_layers(model)[2]:
                with suppress(UnsupportedError):  # another mixer
                    hooked.append((attention_module(layer), _tell))
        return hooked


TELLING = _Telling()


def latent_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The attention modules of a model that keep latents, by the index of their layer in the cache."""
    if model not in _by_model:
        modules = compat.modules_of(model.get_decoder())
        _by_model[model] = {int(module.layer_idx): module for module in modules if hasattr(module, EXPANSION)}  # type: ignore[arg-type]
    return _by_model[model]


def keeps_latents(model: PreTrainedModel, config: Any) -> bool:
    """Whether a model's attention keeps latents; refuses those that can't be pruned."""
    modules = latent_modules(model) if getattr(config, "kv_lora_rank", None) else {}
    for module in modules.values():
        _require_absorbable(module)
    return bool(modules)


def _require_absorbable(module: nn.Module) -> None:
    """Refuse a module whose expansion is more than a product with one weight."""
    projection: Any = module.kv_b_proj
    method: Any = getattr(module, EXPANSION)
    if (
        type(projection) is not nn.Linear
        or projection.bias is not None
        or projection.weight.is_meta
        or compat.forward_hooks(projection)
        or compat.replaced_forward(projection) is not None
        or getattr(method, "__func__", None) not in (expand_kv, getattr(type(module), EXPANSION))
    ):
        raise UnsupportedError(
            f"model: EquipCache multiplies queries by the weight of {type(module).__name__}.kv_b_proj, which has to be a plain linear "
            "layer: not quantized, not offloaded, without adapters that are not merged, and without hooks. Use DynamicCache."
        )


def expand_kv(module: nn.Module, latents: Any, rotated: Any) -> Any:
    """Let a `LatentView` pass to attention unexpanded; its name is that of the method, by which a module is pickled."""
    if isinstance(latents, LatentView):
        return latents, latents
    return getattr(type(module), EXPANSION)(module, latents, rotated)


expand_kv.only_observes = True  # type: ignore[attr-defined]


class LatentView(LayerView):
    """New tokens of a cache on their way through a module, in place of its keys and values."""

    def __init__(self, module: nn.Module, tokens: LayerView) -> None:
        _require_absorbable(module)
        self.tokens, self.afterwards = tokens, tokens.afterwards

    def attend(self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any) -> Attended:
        attention: Any = module
        weight, width = attention.kv_b_proj.weight, attention.qk_nope_head_dim
        key_rows, value_rows = weight.view(query.shape[1], -1, weight.shape[1]).tensor_split([width], 1)  # (heads, dims, latent_dim)
        unrotated, rotated = query.tensor_split([width], -1)
        kwargs |= {"dense_attention": _attend_expanded, "expansion": (key_rows, value_rows, unrotated)}
        output, weights = self.tokens.attend(module, torch.cat([rotated, unrotated @ key_rows], -1), mask, **kwargs)
        if output.shape[-1] == weight.shape[1]:  # sums of latents; a whole first prompt comes back as values
            output = (output.transpose(1, 2) @ value_rows.mT).transpose(1, 2)
        return output, weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokens, name)


def _attend_expanded(
    module: nn.Module, query: torch.Tensor, keys: torch.Tensor, latents: torch.Tensor, mask: Any, *, expansion: Any, **options: Any
) -> Attended:
    """Attention of a whole first prompt, which has as many keys as queries: expanding each costs less than scores over latents."""
    key_rows, value_rows, unrotated = expansion
    (_, heads, tokens, _), rotary = unrotated.shape, query.shape[-1] - latents.shape[-1]
    if query.shape[2] != tokens or value_rows.shape[1] == latents.shape[-1]:  # the result has to be told from sums of latents
        return previous_attention(module, query, keys.expand(-1, heads, -1, -1), latents.expand(-1, heads, -1, -1), mask, **options)
    keys = torch.cat([latents @ key_rows.to(latents.dtype).mT, keys[..., :rotary].expand(-1, heads, -1, -1)], -1)
    query = torch.cat([unrotated.to(query.dtype), query[..., :rotary]], -1)
    return previous_attention(module, query, keys, latents @ value_rows.to(latents.dtype).mT, mask, **options)


class Latent(Flat):
    """Slots whose keys are `rotated` dimensions and a latent; values are the latent, which is not kept again."""

    names = ("keys",)
    read = read_decoded

    def __init__(self, backend: Backend, rotated: int, latent_dim: int) -> None:
        # One key of 576 dimensions for 128 heads is beyond what the kernels hold in shared memory.
        super().__init__("torch" if backend == "auto" else backend)
        self.rotated, self.latent_dim = rotated, latent_dim

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if (keys.shape[-1], values.shape[-1]) != (self.rotated + self.latent_dim, self.latent_dim):
            raise UnsupportedError(
                "EquipCache takes latents from the attention of its model alone, and these come from elsewhere. Feed it the text instead."
            )
        super().check(keys, values)

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Raw:
        return (keys,)

    def decode(self, raw: Raw) -> tuple[torch.Tensor, torch.Tensor]:
        return raw[0], raw[0][..., self.rotated :]

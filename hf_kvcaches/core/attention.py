"""The registered attention `hf_kvcaches`: the door through which a cache layer answers queries itself.

A cache layer may return a `LayerView` in place of keys and values. Models hand it to the attention function unchanged, and ours
asks it to attend. For ordinary tensors ours does exactly what the model did before: same function, same mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_kvcaches import compat
from hf_kvcaches.errors import UnsupportedError

NAME = "hf_kvcaches"


class _Enabled(str):
    """The attention's name in a config, which also remembers what stood there before.

    A config's attention name is copied and pickled with the model and never written to `config.json`; so is the memory of the
    implementation to restore, because it is the same object.
    """

    previous: str

    def __new__(cls, previous: str) -> _Enabled:
        self = super().__new__(cls, NAME)
        self.previous = previous
        return self

    def __reduce__(self) -> tuple[type[_Enabled], tuple[str]]:
        return _Enabled, (self.previous,)


class LayerView(ABC):
    """What a cache layer hands to the attention function when it wants to answer the queries itself."""

    @abstractmethod
    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: MaskRecipe | torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of `query` over what the layer holds.

        Args:
            module: The model's attention module.
            query: Rotated queries, (batch, heads, queries, head_dim).
            mask: What the mask is made of, or a ready mask where the caller of the model passed one.
            **kwargs: `scaling`, `dropout`, `softcap` and whatever else the model gives its attention function.

        Returns:
            The output, (batch, queries, heads, head_dim), and the weights or None.
        """


class MaskRecipe:
    """The arguments a mask is made from. A mask is made only where one is needed, and once for all layers of a forward pass.

    Args:
        arguments: What transformers gives its mask functions: `q_length`, `kv_length`, `q_offset`, `kv_offset`, `mask_function`,
            `attention_mask` (the padding mask), `dtype`, `device` and more.
    """

    # A recipe made ahead by `generate` comes back to the model as its attention mask; four dimensions mean "ready, leave it alone".
    ndim = 4

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self._made: dict[tuple[str, torch.device | None], Any] = {}
        self._newest: torch.Tensor | None = None
        # What transformers asks for where the cache may be compiled. A graph that looked at the padding mask itself, which grows, would
        # be compiled once more.
        if arguments.get("q_length") == 1 and arguments.get("allow_is_causal_skip") is False and not torch.compiler.is_compiling():
            newest = self.newest(1)
            self._newest = None if newest is None else newest.clone()

    @property
    def padding(self) -> torch.Tensor | None:
        """True where a token is real, (batch, tokens seen), or None when nothing is padded."""
        mask = self.arguments["attention_mask"]
        return mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None

    def newest(self, tokens: int) -> torch.Tensor | None:
        """True where a new token is real, (batch, tokens), or None when nothing is padded. A graph finds it ready where it can.

        Args:
            tokens: How many are new.
        """
        if self._newest is not None:
            return self._newest
        padding, start = self.padding, self.arguments["q_offset"]
        if padding is None:
            return None
        if not isinstance(start, torch.Tensor):
            return padding[:, start : start + tokens]
        return padding.index_select(1, torch.arange(tokens, device=padding.device) + start.to(padding.device))

    def make(self, implementation: str, device: torch.device | None = None) -> Any:
        """The mask as the attention of that name wants it.

        Args:
            implementation: The attention's name.
            device: Where it is needed. The layers of one model may be on several, and nobody moves a recipe along with a layer's inputs.
        """
        if (implementation, None) not in self._made:
            make = compat.mask_function(implementation)
            self._made[implementation, None] = None if make is None else make(**self.arguments)
        made = self._made[implementation, None]
        if device is None or getattr(made, "device", device) == device:
            return made
        if (implementation, device) not in self._made:
            self._made[implementation, device] = made.to(device)
        return self._made[implementation, device]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"this model reads {name!r} from its attention mask, which hf_kvcaches makes only where attention needs it. "
            "Call hf_kvcaches.disable(model): the model can't be used with caches that answer its queries."
        )

    def contiguous(self) -> MaskRecipe:
        """Itself: `generate` asks this of masks that it prepares ahead for compiled forward passes."""
        return self


def _make_recipe(**arguments: Any) -> MaskRecipe:
    given = arguments.get("attention_mask")
    return given if isinstance(given, MaskRecipe) else MaskRecipe(arguments)


def _attend(
    module: nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # The first question is much the cheaper one, and asked in every layer of every step.
    if type(key) is not torch.Tensor and isinstance(key, LayerView) and isinstance(value, LayerView):
        return key.attend(module, query, attention_mask, **kwargs)
    return previous_attention(module, query, key, value, attention_mask, **kwargs)


def previous_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over plain tensors by the implementation that the model had before.

    Args:
        module: The model's attention module.
        query: (batch, heads, queries, head_dim).
        key: (batch, kv_heads, keys, head_dim).
        value: Like `key`.
        mask: A recipe, a ready mask or None.
        **kwargs: Passed on.
    """
    implementation = previous_implementation(module.config)
    if isinstance(mask, MaskRecipe):
        mask = mask.make(implementation, query.device)
    result: tuple[torch.Tensor, torch.Tensor | None] = compat.attention_function(implementation, module)(
        module, query, key, value, mask, **kwargs
    )
    return result


def previous_implementation(config: PreTrainedConfig) -> str:
    """The attention implementation behind ours, or the one in force where ours is not enabled."""
    name = config._attn_implementation
    if isinstance(name, _Enabled):
        return name.previous
    if name != NAME:
        return name or "eager"
    # Set by its bare name, as with attn_implementation="hf_kvcaches": nothing stood there before. Softcapping is beyond sdpa, and so are
    # the attention sinks of some families, which it would leave out without a word.
    return "eager" if getattr(config, "attn_logit_softcapping", None) or not compat.supports_sdpa(config) else "sdpa"


def is_enabled(config: PreTrainedConfig) -> bool:
    """Whether the model of that config asks our attention."""
    # Asked in every layer of every step; the public property goes through the config's slow attribute access twice.
    return bool(config._attn_implementation_internal == NAME)


def enable(model: Any) -> None:
    """Switches a model to this package's attention, so that caches can answer its queries. Caches built with the model do it themselves.

    Args:
        model: A transformers model, also inside a PEFT wrapper.
    """
    base = compat.base_model(model)
    if not compat.can_switch_attention(base):
        raise UnsupportedError(
            f"model: {type(base).__name__} computes attention itself instead of looking it up in transformers' AttentionInterface, "
            "so a cache can't answer its queries. Use a cache that hands out plain tensors (GrowingCache), or another model."
        )
    for part in compat.models_inside(base):
        if compat.can_switch_attention(part) and not isinstance(part.config._attn_implementation, _Enabled):
            part.config._attn_implementation_internal = _Enabled(previous_implementation(part.config))


def disable(model: Any) -> None:
    """Gives a model the attention implementation back that it had before `enable`.

    Args:
        model: A transformers model, also inside a PEFT wrapper.
    """
    for part in compat.models_inside(compat.base_model(model)):
        if is_enabled(part.config):
            part.config._attn_implementation_internal = previous_implementation(part.config)


compat.AttentionInterface.register(NAME, _attend)
compat.AttentionMaskInterface.register(NAME, _make_recipe)

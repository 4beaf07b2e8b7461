"""What a model's attention asks of a cache layer that answers queries itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from hf_kvcaches.core.attention import LayerView, MaskRecipe
from hf_kvcaches.errors import UnsupportedError


@dataclass(frozen=True)
class Call:
    """What a model's attention module asks.

    Args:
        module: The module.
        mask: What it was given as its mask.
        options: Its other arguments.
    """

    module: nn.Module
    mask: MaskRecipe | torch.Tensor | None
    options: dict[str, Any]

    @property
    def scaling(self) -> float:
        """Of the scores."""
        scaling = self.options.get("scaling")
        return float(scaling) if scaling is not None else float(self.module.head_dim) ** -0.5  # type: ignore[arg-type]

    @property
    def softcap(self) -> float | None:
        """Bound of the scores."""
        return self.options.get("softcap")

    @property
    def bias(self) -> torch.Tensor | None:
        """Added to the scores, (batch or 1, heads or 1, queries, tokens seen)."""
        return self.options.get("position_bias")

    def check(self, cache: str) -> None:
        """Refuses what a cache that answers queries itself leaves out.

        Args:
            cache: Its name.
        """
        for name in ("s_aux", "head_mask", "cu_seq_lens_q"):
            if self.options.get(name) is not None:
                raise UnsupportedError(f"{cache} does not support attention with {name}. Use another cache with this model.")
        if self.options.get("dropout"):
            raise UnsupportedError(f"{cache} does not support dropout of attention weights. Call model.eval(), or set it to 0.")


class AnsweringLayer(Protocol):
    """A layer that takes new tokens together with their queries.

    Attributes:
        no_tensors: Why it has no keys and values to read from, and what to do instead: the end of an error.
    """

    no_tensors: ClassVar[str]

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
        """Takes the new tokens and gives their queries' attention, (batch, tokens, heads, head_dim)."""


class NewTokens(LayerView):
    """What such a layer hands out in place of keys and values: the new ones, on their way to its `attend`.

    Args:
        layer: The layer.
        keys: (batch, kv_heads, tokens, head_dim), as the model rotated them.
        values: Like `keys`.
    """

    def __init__(self, layer: AnsweringLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: MaskRecipe | torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.layer.attend(query, self.keys, self.values, Call(module, mask, kwargs)), None

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(f"This model reads {name!r} from the keys or values that its cache returns, and {self.layer.no_tensors}")

"""What a model's attention asks of a cache layer that answers queries itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_kvcaches.core.attention import MaskRecipe
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

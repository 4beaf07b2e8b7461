"""What a layer is built with, and what a model's attention asks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_kvcaches.core.attention import MaskRecipe
from hf_kvcaches.equip.policies import Policy
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels._slots_checks import Backend


@dataclass(frozen=True)
class Settings:
    """What the user asked of one layer.

    Args:
        budget: Slots, or a fraction of the prompt.
        sinks: First tokens of each row that always stay.
        recent: Newest tokens that always stay; None for the policy's own number.
        policy: Who goes.
        backend: Of the kernels.
    """

    budget: int | float
    sinks: int
    recent: int | None
    policy: Policy
    backend: Backend = "auto"


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

    def check(self) -> None:
        """Refuses what attention over slots leaves out."""
        for name in ("s_aux", "head_mask", "cu_seq_lens_q"):
            if self.options.get(name) is not None:
                raise UnsupportedError(f"EquipCache does not support attention with {name}. Use another cache with this model.")
        if self.options.get("dropout"):
            raise UnsupportedError("EquipCache does not support dropout of attention weights. Call model.eval(), or set it to 0.")

"""What a layer is built with."""

from __future__ import annotations

from dataclasses import dataclass

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip.policies import Policy
from hf_kvcaches.kernels.launch import Backend


@dataclass(frozen=True)
class EquipSettings:
    """What the user asked of one layer.

    Args:
        sinks: First tokens of each row that always stay.
        recent: Newest tokens that always stay; None for the policy's own number.
        geometry: How the model rotates the layer's keys.
    """

    budget: int | float
    sinks: int
    recent: int | None
    policy: Policy
    geometry: RotaryGeometry
    backend: Backend = "auto"

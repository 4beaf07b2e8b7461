"""What a layer took in, kept exactly beside its coefficients, so that errors can be measured."""

from __future__ import annotations

import torch

from hf_kvcaches.core.calls import Call
from hf_kvcaches.core.layers import TensorLayer
from hf_kvcaches.subspace.numbering import Arrival, gathered

SHADOW = ("shadow_keys", "shadow_values", "shadow_query")
SHADOW_COUNTERS = ("shadow_scaling", "shadow_softcap")


class ShadowedLayer(TensorLayer):
    """A layer that can keep exact copies of all tokens by their numbers. It never attends to them.

    Attributes:
        shadow_keys: As the model rotated them, (batch, kv_heads, capacity, head_dim); and `shadow_values`.
        shadow_query: The last real one of each row, likewise, (batch, heads, 1, head_dim); NaN where a row had none yet, and None after
            tokens have been taken back, until others come.
        shadow_scaling: What its products with keys are multiplied with.
        shadow_softcap: What these are capped at; 0 for nothing.
    """

    shadow_keys: torch.Tensor | None = None
    shadow_values: torch.Tensor | None = None
    shadow_query: torch.Tensor | None = None
    shadow_scaling: float = 0
    shadow_softcap: float = 0

    def keep_shadow(
        self, query: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor, call: Call | None, arrival: Arrival
    ) -> None:
        """Copies new tokens.

        Args:
            query: Of all new columns; None where only keys and values are taken over.
            call: What else the model said, likewise.
        """
        numbers = arrival.numbers
        self.shadow_keys = numbers.put(self.shadow_keys, keys.detach())
        self.shadow_values = numbers.put(self.shadow_values, values.detach())
        if query is None or call is None:
            return
        self.shadow_scaling, self.shadow_softcap = call.scaling, call.softcap or 0
        query = arrival.real(query.detach())
        if numbers.even:
            self.shadow_query = query[:, :, -1:].clone()
            return
        came = (numbers.last > numbers.first)[..., None, None]
        held = query.new_full((), float("nan")) if self.shadow_query is None else self.shadow_query
        self.shadow_query = torch.where(came, gathered(query, (numbers.last - numbers.first - 1).clamp(min=0)), held)

    def used_shadow(self, tensors: dict[str, torch.Tensor], most: int) -> dict[str, torch.Tensor]:
        """Tensors by name, and the shadow among them without its reserve."""
        return tensors | {name: tensors[name][:, :, :most] for name in SHADOW[:2] if name in tensors}

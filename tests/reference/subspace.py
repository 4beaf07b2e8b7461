"""What `SubspaceCache` computes, written down plainly: all keys are kept, and those that it would not keep exactly are projected."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from hf_kvcaches.core.rope import RotaryGeometry


class SubspaceOracle(DynamicCache):
    """Hands out keys and values with a model's own attention; for left-padded rows, give the mask to `real`.

    Args:
        config: The model's.
        bases: As calibrated.
        sinks: First real tokens that are exact.
        recent: Newest tokens that are exact.
        tile: Coefficients are quantised in whole tiles of so many; None: not at all.
        real: False where a token of the prompt is padding, (batch, tokens).
    """

    def __init__(
        self, config: Any, bases: Any, *, sinks: int, recent: int, tile: int | None = None, real: torch.Tensor | None = None
    ) -> None:
        super().__init__(config=config)
        self.bases, self.sinks, self.recent, self.tile, self.real, self.config = bases, sinks, recent, tile, real, config

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        before = self.get_seq_length(layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if not before:
            return keys, values
        tokens = key_states.shape[2]
        stop = max(0, (before + tokens if tokens == 1 else before) - self.recent)
        return self._seen_through(keys, values, layer_idx, stop)

    def _seen_through(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values, own = keys.clone(), values.clone(), self.bases.layers[layer_idx]
        real = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool)
        if self.real is not None:
            real[:, : self.real.shape[1]] = self.real
        places = (real.cumsum(1) - 1).clamp(min=0)
        geometry = RotaryGeometry.from_config(self.config, layer_idx=layer_idx)
        turned = self.bases.settings.rotation == "aware" and geometry.kind == "rope"
        plain = geometry.unrotate(keys, places) if turned else keys
        shown_keys, shown_values = torch.empty_like(keys), torch.empty_like(values)
        for head in range(keys.shape[1]):
            coefficients = plain[:, head] @ own.key_encode[head].T
            value_coefficients = values[:, head] @ own.value_encode[head].T
            if self.tile is not None:
                coefficients = self._rounded(coefficients, own.key_energies[head], stop)
                value_coefficients = self._rounded(value_coefficients, own.value_energies[head], stop)
            shown_keys[:, head] = coefficients @ own.key_decode[head].T * own.gamma[head]
            shown_values[:, head] = value_coefficients @ own.value_decode[head].T
        if turned:
            shown_keys = geometry.rotate(shown_keys, places)
        inner = (real.cumsum(1) > self.sinks) & (torch.arange(keys.shape[2]) < stop)
        chosen = inner[:, None, :, None]
        return torch.where(chosen, shown_keys, keys), torch.where(chosen, shown_values, values)

    def _rounded(self, coefficients: torch.Tensor, energies: torch.Tensor, stop: int) -> torch.Tensor:
        """Coefficients as after 8 bits: of equal energy, one scale for a tile, whole tiles only."""
        assert self.tile is not None
        rounded, size = coefficients.clone(), energies[: coefficients.shape[-1]].float().sqrt()
        for start in range(self.sinks, stop - self.tile + 1, self.tile):
            white = coefficients[:, start : start + self.tile] / size
            scale = (white.abs().amax((-2, -1), keepdim=True) / 127).clamp(min=1e-30)
            rounded[:, start : start + self.tile] = (white / scale).round() * scale * size
        return rounded

"""The static mode: one basis for each head, from calibration."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from hf_kvcaches.core.calls import Call
from hf_kvcaches.core.passes import Pass, Passes
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.subspace.layer import SubspaceLayer
from hf_kvcaches.subspace.maps import Grouping, LayerMaps, LayerSource, of_heads
from hf_kvcaches.subspace.numbering import Arrival, SlotSpan
from hf_kvcaches.subspace.store import SIDES, StoreSettings

# From how many coefficients of a row at a time on it is measured what they lose: steps are not to be slower for it.
MEASURED = 16
# Of so many tokens at a time, so that a long prompt does not take more memory.
_PIECE = 2048


class StaticLayer(SubspaceLayer):
    """Projects all tokens on the bases that it was given.

    For each group of heads and each side there is `key_loss`, (batch, heads, 4), float32, with the group's number behind it: of the tokens
    that came with many others, the energy that was lost, that there was, the largest length of what one lost, and how many they are. What
    was taken back stays counted.
    """

    def __init__(
        self, settings: StoreSettings, source: LayerSource, geometry: RotaryGeometry | None, passes: Passes[Pass], config: PreTrainedConfig
    ) -> None:
        super().__init__(settings, geometry, passes, config, source.groups)
        self.source = source

    def declare(self, settings: StoreSettings, groups: int, *more: str) -> None:
        super().declare(settings, groups, *more, *(f"{side}_loss_{group}" for group in range(groups) for side in SIDES))

    @property
    def maps(self) -> LayerMaps:
        """The bases, where and how the layer needs them."""
        return self.source.on(self.settings.bases_dtype or self.dtype, self.device, self.settings.coefficients == "int8")

    @property
    def grouping(self) -> Grouping:
        return self.maps.grouping

    def decoders(self, group: int) -> list[torch.Tensor]:
        maps = self.maps.groups[group]
        return [maps.key_decode, maps.value_decode]

    def bases_of(self, group: int, tiles: SlotSpan) -> list[torch.Tensor | None]:
        return [None, None]

    def encode(self, query: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor, call: Call | None, arrival: Arrival) -> None:
        coefficients = arrival.span("coefficients", self.count)
        if not coefficients.longest:
            return
        keys, values = self.states(keys, values, arrival.numbers, coefficients.moved(self.settings.sinks))
        maps = self.maps
        for index, (group, heads) in enumerate(zip(maps.groups, maps.grouping.heads, strict=True)):
            sides = ("key", keys, group.key_encode, group.key_decode), ("value", values, group.value_encode, group.value_decode)
            for side, states, encode, decode in sides:
                own = of_heads(states, heads)
                found = torch.matmul(own.to(encode.dtype), encode.mT)
                if coefficients.longest >= MEASURED:
                    name = f"{side}_loss_{index}"
                    setattr(self, name, with_losses(getattr(self, name), own, found, decode, coefficients))
                self.write(f"{side}_{{}}_{index}", found.to(self.dtype), coefficients)

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        """The declared tensors, and the bases, which all caches of a model share."""
        bases = self.maps.tensors() if self.is_initialized else {}
        return super().owned_tensors() | {f"bases.{name}": tensor for name, tensor in bases.items()}

    def _move(self, device: torch.device | str) -> None:
        # The bases stay: other caches use them.
        for name, tensor in super().owned_tensors().items():
            setattr(self, name, tensor.to(device, non_blocking=True))


@torch.no_grad()
def with_losses(held: torch.Tensor | None, rows: torch.Tensor, found: torch.Tensor, decode: torch.Tensor, span: SlotSpan) -> torch.Tensor:
    """What was lost so far, and with more tokens: (batch, heads, 4), as in `StaticLayer`.

    Args:
        held: So far, or None for nothing.
        rows: The vectors, (batch, heads, tokens, d).
        found: Their coefficients, (batch, heads, tokens, rank).
        decode: What reads these, (heads, d, rank).
        span: Which ones they are. A row with few of them is left out.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    many = torch.tensor([stop - start if stop - start >= MEASURED else 0 for start, stop in zip(span.starts, span.stops, strict=True)])
    many = many.to(rows.device)[:, None]
    total = rows.new_zeros(*rows.shape[:2], 4, dtype=torch.float32) if held is None else held
    for start in range(0, rows.shape[2], _PIECE):
        whole = rows[:, :, start : start + _PIECE].to(dtype)
        left = whole - found[:, :, start : start + _PIECE].to(dtype) @ decode.to(dtype).mT
        lost, energy = (each.square().sum(-1) for each in (left, whole))
        counted = torch.arange(start, start + whole.shape[2], device=rows.device) < many
        if not span.even:
            lost, energy = (each.where(counted[:, None], 0.0) for each in (lost, energy))
        tokens = counted.sum(1, keepdim=True).expand(-1, rows.shape[1])
        new = torch.stack([lost.sum(-1), energy.sum(-1), lost.amax(-1).sqrt(), tokens.to(dtype)], -1).float()
        total = torch.cat([total[..., :2] + new[..., :2], total[..., 2:3].maximum(new[..., 2:3]), total[..., 3:] + new[..., 3:]], -1)
    return total

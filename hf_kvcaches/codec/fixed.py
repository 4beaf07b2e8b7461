"""The forms of a codec with fixed widths: a basis for each group of heads, and bits for each direction, alike in all groups of a layer.

A direction's coefficient that has `w` bits is kept as the integer `floor(coefficient / step) + 2^(w - 1)`, clipped to w bits. Steps are
fitted to a sample for each direction and width; bits go where they save most over all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from hf_kvcaches.codec.moments import Basis, LayerStatistics, Maker, States
from hf_kvcaches.core.files import part_of
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.kernels.code_format import WIDTHS, CodeLayout, packed_bytes
from hf_kvcaches.kernels.codes import CodeMap, decode

# Tokens of all rows that are encoded at a time, so that a long prompt needs no more memory.
_PIECE = 2048
# A direction with less energy is unused, as a share of the group's mean; and what other texts are taken to have there. A transform in
# half precision leaks 1e-8 to 1e-7 of the others' energy into it.
_UNUSED, _UNSEEN = 1e-6, 1e-5
# The step of a uniform quantizer that loses least of a normal distribution, in standard deviations.
_NORMAL_STEPS = {1: 1.596, 2: 0.9957, 3: 0.586, 4: 0.3352, 5: 0.1881, 6: 0.1041, 8: 0.0308}
# What it is multiplied with for distributions with heavier or lighter tails.
_MULTIPLES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
# These need no choice: they reach 32 and 16 standard deviations of the direction, or of the group in the mean where that is more, so that
# directions which the texts hardly use are not clipped either. Steps are of about float16's precision and of float32's.
_WIDE_STEPS = {16: 2.0**-10, 24: 2.0**-19}
# From so many bits on, steps reach all of the sample: that costs little, and a clipped coefficient costs much.
_REACHING = 6
# A direction that the texts do not use is taken to have this share of the group's mean deviation.
_LEAST_DEVIATION = 1e-4
_TINY = 1e-30
# Widths that take two parts are worth it only where bits are plenty.
_ALLOTTED = (1, 2, 4, 6, 8, 16, 24)


@dataclass(frozen=True, eq=False)
class FixedLayer(Basis):
    """One layer: a basis, quantizers and bits; tensors on the CPU."""

    steps: torch.Tensor  # (groups, size, widths), for each of `WIDTHS`, float32
    # What is lost of a direction at 0 bits and at each of `WIDTHS`, (groups, size, 1 + widths), float32. With the metric "loss" these are
    # twice the divergence of a token's prediction.
    distortions: torch.Tensor
    widths: torch.Tensor  # bits of each direction, (size,), uint8

    @classmethod
    def fit(cls, statistics: LayerStatistics) -> FixedLayer:
        """The basis and the quantizers; all widths are 0 so far."""
        basis, coefficients = statistics.basis()
        steps, distortions = _quantizers(coefficients.float())
        # A direction that the texts do not use gets bits that clip nothing, where there are bits for all.
        mean_energy = distortions[..., :1].mean(1, keepdim=True)
        clipped = torch.tensor([0, *WIDTHS], device=distortions.device) < 16
        unused = (distortions[..., :1] < _UNUSED * mean_energy) & clipped
        distortions = torch.where(unused, _UNSEEN * mean_energy, distortions)
        return cls(**vars(basis), steps=steps.cpu(), distortions=distortions.cpu(), widths=torch.zeros(basis.shape.size, dtype=torch.uint8))

    @property
    def nbytes(self) -> int:
        """Bytes of a token."""
        return self.shape.groups * packed_bytes(self.widths)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        lead, count = (self.shape.groups, self.shape.size), len(WIDTHS)
        return super().sizes() | {"steps": (*lead, count), "distortions": (*lead, 1 + count), "widths": lead[1:]}

    @classmethod
    def of(cls, shape: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> Self:
        layer = super().of(shape, tensors)
        if layer.widths.dtype != torch.uint8 or not set(layer.widths.tolist()) <= {0, *WIDTHS}:
            raise ArtifactError("The widths of a layer don't fit each other. Calibrate anew.")
        return layer


@dataclass(frozen=True, eq=False)
class FixedForm(Maker):
    """How codes of all layers are made and read, by the index of the layers that are coded."""

    layers: Mapping[int, FixedLayer]

    def at(self, bytes_ratio: float) -> FixedForm:
        """The form with other bits, for a share of the bytes."""
        layers = self.layers.values()
        distortions, copies = [layer.distortions.double().sum(0) for layer in layers], [layer.shape.groups for layer in layers]
        widths = allot(distortions, bytes_ratio * 2 * self.elements, copies)
        if not any(bool(own.any()) for own in widths):
            raise ConfigError.of("bytes_ratio", "enough for at least one direction", bytes_ratio, "Try 0.125.")
        parts = zip(self.layers.items(), widths, strict=True)
        return FixedForm({index: replace(layer, widths=own.to(torch.uint8)) for (index, layer), own in parts})

    @property
    def elements(self) -> int:
        """Numbers of a token's keys and values in all layers."""
        return sum(layer.shape.elements for layer in self.layers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of a token's codes in all layers."""
        return sum(layer.nbytes for layer in self.layers.values())

    @property
    def divergence(self) -> float:
        """What is expected of a prediction to change, in nats, where errors of layers do not add up; with the metric "loss"."""
        lost = 0.0
        for layer in self.layers.values():
            places = [(0, *WIDTHS).index(width) for width in layer.widths.tolist()]
            lost += float(layer.distortions.double()[:, torch.arange(len(places)), places].sum())
        return lost / 2

    def of_heads(self, shard: HeadShard) -> FixedForm:
        return FixedForm({index: layer.of_heads(shard) for index, layer in self.layers.items()})

    def coder(self, layer_idx: int, dtype: torch.dtype, device: torch.device) -> LayerCoder:
        """The coder of keys and values of a dtype in one layer, made once for each device and shared by all caches."""
        key = layer_idx, dtype, device
        if key not in self._made:
            # A later pass may need gradients, which tensors of the caller's inference mode refuse.
            with torch.inference_mode(False), torch.no_grad():
                self._made[key] = LayerCoder(self.layers[layer_idx], dtype, device)
        return self._made[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> FixedForm:
        return self  # never changed, and layers of copied caches hold it

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{index}.{name}": tensor for index, layer in self.layers.items() for name, tensor in layer.tensors().items()}

    def metadata(self) -> dict[str, Any]:
        return {str(index): list(layer.shape) for index, layer in self.layers.items()}

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> FixedForm:
        return cls({int(index): FixedLayer.of(shape, part_of(tensors, index)) for index, shape in metadata.items()})


class LayerCoder:
    """Encodes and decodes one layer's keys and values of a dtype on a device, by way of coefficients in float32 or float64."""

    def __init__(self, layer: FixedLayer, dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        kept = layer.widths.nonzero()[:, 0]
        widths = layer.widths[kept].long()
        layout = CodeLayout.of(widths)
        steps = layer.steps.double()[:, kept, [WIDTHS.index(width) for width in widths.tolist()]]
        mean, middle = layer.mean.double(), 2.0 ** (widths.double() - 1)
        rows = layer.transform[:, kept] / steps[..., None]
        decode = layer.inverse[:, :, kept] * steps[:, None]
        columns = decode[:, :, layout.directions] * (2.0 ** layout.shifts.double()).masked_fill(layout.filled, 0.0)
        # A direction's integer stands for the middle of its step, and a level is counted from the middle of its part.
        offset = mean + decode @ (0.5 - middle) + columns @ 2.0 ** (layout.bits.double() - 1)
        vectors = torch.cat([columns, offset[..., None]], -1).mT  # [G, levels + 1, size]
        keys, values = (side.unflatten(0, (layer.shape.groups, -1)).mT for side in layer.shape.split(vectors))
        self._shape, self._wide = layer.shape, wide
        # How kernels read the codes.
        self.map = CodeMap(layout.counts, keys.to(device, wide).contiguous(), values.to(device, wide).contiguous())
        self._layout, self._encode = layout.to(device), rows.to(device, wide)
        self._shift = (middle[:, None] - rows @ mean[..., None]).to(device, wide)
        self._top = (2.0 ** widths.double() - 1)[:, None].to(device, wide)
        # Integers of a byte take a quarter of the time of wider ones.
        self._integers = torch.uint8 if not len(widths) or int(widths.max()) <= 8 else torch.int32

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The codes, (batch, groups, rows, tokens), uint8, of keys, as the codec sees them, and values, (batch, kv_heads, tokens, dim)."""
        tokens, pieces = max(1, _PIECE // max(1, len(keys))), []
        for own in zip(keys.split(tokens, 2), values.split(tokens, 2), strict=True):
            steps = (self._encode @ self._shape.join(*own, self._wide).mT).add_(self._shift)
            # What is no number counts as 0; the rest is cut off by the conversion. These operations are vectorized, `fmax` is not.
            integers = torch.minimum(steps.nan_to_num_(0.0).clamp_min_(0.0), self._top, out=steps).to(self._integers)
            pieces.append(self._layout.pack(integers))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 3)

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> States:
        """Keys and values of what `encode` gave, (batch, kv_heads, tokens, dim) each."""
        return decode(codes, self.map, dtype)


def _quantizers(coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The step with the smallest squared error for each direction and width, (groups, d, widths), of coefficients, (groups, tokens, d).

    And the errors, those of width 0 first.
    """
    energies, largest = coefficients.square().mean(1), coefficients.abs().amax(1)
    of_group = energies.mean(-1, keepdim=True).sqrt().clamp_min(_TINY)
    deviations = energies.sqrt().maximum(_LEAST_DEVIATION * of_group)
    steps, distortions = [], [energies]
    for width in WIDTHS:
        top = 2 ** (width - 1) - 0.5
        best_error, best_step = torch.full_like(deviations, torch.inf), deviations
        if width in _WIDE_STEPS:
            candidates = [_WIDE_STEPS[width] * deviations.maximum(of_group)]
        else:
            candidates = [_NORMAL_STEPS[width] * multiple * deviations for multiple in _MULTIPLES]
        for candidate in candidates:
            step = candidate.maximum(largest / top) if width >= _REACHING else candidate
            levels = ((coefficients / step[:, None]).floor() + 0.5).clamp(-top, top)
            error = (levels * step[:, None] - coefficients).square().mean(1)
            better = error < best_error
            best_error, best_step = torch.where(better, error, best_error), torch.where(better, step, best_step)
        steps.append(best_step)
        distortions.append(best_error)
    return torch.stack(steps, -1), torch.stack(distortions, -1)


def allot(
    distortions: Sequence[torch.Tensor], budget: float, copies: Sequence[int], widths: Sequence[int] = _ALLOTTED
) -> list[torch.Tensor]:
    """The bits of each direction with which so many bytes of a token lose least, (directions,) for each layer.

    Args:
        distortions: For each layer what is lost of a direction at 0 bits and at each of `WIDTHS`, (directions, 1 + widths).
        copies: How often a token has the bytes of each layer.
        widths: The bits that directions may have.
    """
    lengths, levels = [len(layer) for layer in distortions], torch.tensor([0, *widths])
    lost = torch.cat(list(distortions)).double()[:, [0, *(1 + WIDTHS.index(width) for width in widths)]]
    times = torch.tensor(copies).repeat_interleave(torch.tensor(lengths))
    here, steps = torch.zeros(len(lost), dtype=torch.int64), []
    # The upgrades of a direction follow the lower convex hull of its distortions, so that each gains less than the one before.
    for _ in widths:
        price = levels - levels[here][:, None]
        gains = (lost.gather(1, here[:, None]) - lost) / price.clamp_min(1)
        gain, there = gains.masked_fill(price <= 0, -torch.inf).max(1)
        worth = gain > 0
        steps.append((gain[worth] / times[worth], levels[there[worth]], worth.nonzero()[:, 0]))
        here = torch.where(worth, there, here)
    gains, bits, directions = (torch.cat(parts) for parts in zip(*steps, strict=True))
    order = gains.argsort(descending=True, stable=True)

    def bought(count: int) -> Sequence[torch.Tensor]:
        chosen = order[:count]
        return torch.zeros_like(here).scatter_reduce(0, directions[chosen], bits[chosen], "amax").split(lengths)

    # Whole bytes of each plane count, so the price of a number of upgrades is only known when they are laid out.
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(count * packed_bytes(side) for count, side in zip(copies, bought(middle), strict=True)) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return list(bought(low))

"""The packed form of a codec: one basis for keys and values of all heads of a layer, one step for the whole model, entropy coded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from hf_kvcaches.codec.entropy import Tables
from hf_kvcaches.codec.packing import Packer, Span
from hf_kvcaches.codec.programs import Program, StepQuantizer, fit, integers_of
from hf_kvcaches.errors import ArtifactError, ConfigError

# Transforms take the square of their size, so heads that have more numbers together are joined in groups.
_LARGEST = 1024
# Tokens whose coefficients an artifact keeps, to choose steps and tables from.
SAMPLED = 1024

States = tuple[torch.Tensor, torch.Tensor]
"""Keys, before rotation unless the codec has rotation="post", and values of a layer, (kv_heads, tokens, dim) each."""


class Shape(NamedTuple):
    """The sizes of a layer's keys and values."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """How many heads share a basis."""
        counts = (count for count in range(self.heads, 1, -1) if not self.heads % count)
        return next((count for count in counts if count * (self.key_dim + self.value_dim) <= _LARGEST), 1)

    @property
    def size(self) -> int:
        """Numbers of a token in a group: the keys of its heads, then the values."""
        return self.group * (self.key_dim + self.value_dim)

    def join(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """(..., groups, tokens, size) of (..., heads, tokens, dim)."""
        parts = [states.unflatten(-3, (-1, self.group)).transpose(-3, -2).flatten(-2) for states in (keys, values)]
        return torch.cat(parts, -1)

    def split(self, joined: torch.Tensor) -> States:
        """The inverse."""
        sides = joined.split([self.group * self.key_dim, self.group * self.value_dim], -1)
        keys, values = (side.unflatten(-1, (self.group, -1)).transpose(-3, -2).flatten(-4, -3) for side in sides)
        return keys, values


@dataclass(frozen=True, eq=False)
class JointBasis:
    """The transform of a layer: errors of all coefficients cost the same.

    Args:
        shape: Of the layer.
        mean: (groups, size), float32.
        encode: (groups, size, size), float32.
        deviations: Of the coefficients, (groups * size,), float32.
        sample: Coefficients of some tokens in deviations, (tokens, groups * size), float16.
    """

    shape: Shape
    mean: torch.Tensor
    encode: torch.Tensor
    deviations: torch.Tensor
    sample: torch.Tensor

    @cached_property
    def decode(self) -> torch.Tensor:
        """(groups, size, size), float32."""
        return torch.linalg.inv(self.encode.double()).float()

    def to(self, device: torch.device) -> JointBasis:
        """The transform on another device."""
        moved = replace(self, mean=self.mean.to(device), encode=self.encode.to(device))
        moved.__dict__["decode"] = self.decode.to(device)
        return moved

    def coefficients(self, states: States) -> torch.Tensor:
        """(groups * size, tokens), float32."""
        joined = self.shape.join(*states).float() - self.mean[:, None]
        return (self.encode @ joined.mT).flatten(0, 1)

    def states(self, coefficients: torch.Tensor, dtype: torch.dtype) -> States:
        """The inverse."""
        joined = (self.decode @ coefficients.unflatten(0, self.mean.shape)).mT + self.mean[:, None]
        return self.shape.split(joined.to(dtype))

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        return {"mean": self.mean, "encode": self.encode, "deviations": self.deviations, "sample": self.sample}

    @classmethod
    def of(cls, shape: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> JointBasis:
        """From `tensors`, if they fit each other."""
        own = Shape(*shape)
        groups, count = own.heads // own.group, own.heads // own.group * own.size
        expected = {"mean": (groups, own.size), "encode": (groups, own.size, own.size), "deviations": (count,)}
        if any(tensors[name].shape != shape for name, shape in expected.items()) or tensors["sample"].shape[1:] != (count,):
            raise ArtifactError("The tensors of a joint basis don't fit each other. Calibrate anew.")
        return cls(own, **{name: tensors[name] for name in ("mean", "encode", "deviations", "sample")})


@dataclass(frozen=True, eq=False)
class PackedForm:
    """How all layers are packed.

    Args:
        bases: Of the layers that are coded, by index.
        quantizer: Of their coefficients; its programs are in the order of the bases.
    """

    bases: Mapping[int, JointBasis]
    quantizer: StepQuantizer

    @classmethod
    def fit(cls, bases: Mapping[int, JointBasis], bytes_ratio: float) -> PackedForm:
        """The form that takes a share of the bytes of keys and values in 16 bits."""
        samples = [basis.sample.float() * basis.deviations for basis in bases.values()]
        return cls(bases, fit(samples, bytes_ratio * 16 * _elements(bases)))

    @property
    def ratio(self) -> float:
        """The bytes that are expected of a long text, as a share of those of keys and values in 16 bits."""
        return self.quantizer.bits / (16 * _elements(self.bases))

    @property
    def divergence(self) -> float:
        """What is expected of a prediction to change, in nats, where errors of layers do not add up."""
        return self.quantizer.loss / 2

    def pack(self, states: Mapping[int, States], left_out: int = 0) -> dict[int, torch.Tensor]:
        """Records, (bytes,) uint8 on the device of each layer's states, by layer.

        Args:
            left_out: First tokens that are kept elsewhere, and are coded as the mean.
        """
        devices: dict[torch.device, list[int]] = {}
        for layer, (keys, _) in states.items():
            devices.setdefault(keys.device, []).append(layer)
        found: dict[int, torch.Tensor] = {}
        for device, layers in devices.items():
            on, integers, token_levels = self._on(device), [], []
            for layer in layers:
                program = on.packer.programs[layer]
                coefficients = on.bases[layer].coefficients(states[layer]).index_select(0, program.order).div_(self.quantizer.step)
                coefficients[:, :left_out] = 0
                if not bool(coefficients.isfinite().all()):
                    raise ConfigError.of(f"layers[{layer}]", "finite numbers", "infinities or NaN")
                integers.append(integers_of(coefficients, 1.0))
                token_levels.append(program.token_levels(coefficients))
            found |= zip(layers, on.packer.pack(layers, integers, token_levels), strict=True)
        return found

    def unpack(self, spans: Sequence[Span], dtype: torch.dtype = torch.float32) -> list[States]:
        """Keys and values of spans; anything but records is an `ArtifactError`.

        Args:
            spans: Of records from `pack`, on one device; of any layers.
        """
        if not spans:
            return []
        on, found = self._on(spans[0].data.device), []
        for span, (integers, levels) in zip(spans, on.packer.unpack(spans), strict=True):
            program, basis = on.packer.programs[span.layer], on.bases[span.layer]
            sizes = (integers + integers.sign() * program.shifts_of(on.shifts, levels)) * self.quantizer.step
            coefficients = sizes.new_zeros(basis.mean.numel(), sizes.shape[1]).index_copy_(0, program.order, sizes)
            found.append(basis.states(coefficients, dtype))
        return found

    def _on(self, device: torch.device) -> _OnDevice:
        held: dict[torch.device, _OnDevice] = self.__dict__.setdefault("_devices", {})
        if device not in held:
            programs = dict(zip(self.bases, self.quantizer.programs, strict=True))
            held[device] = _OnDevice(
                {layer: basis.to(device) for layer, basis in self.bases.items()},
                Packer({layer: program.to(device) for layer, program in programs.items()}, self.quantizer.tables.to(device)),
                self.quantizer.shifts.to(device),
            )
        return held[device]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_devices"}

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        tables, found = self.quantizer.tables, {"shifts": self.quantizer.shifts}
        found |= {f"tables.{name}": getattr(tables, name) for name in ("digits", "frequencies", "sizes")}
        for (layer, basis), program in zip(self.bases.items(), self.quantizer.programs, strict=True):
            parts = basis.tensors() | program.tensors()
            found |= {f"{layer}.{name}": tensor for name, tensor in parts.items()}
        return found

    def metadata(self) -> dict[str, Any]:
        """All else."""
        own = self.quantizer
        return {
            "shapes": {str(layer): list(basis.shape) for layer, basis in self.bases.items()},
            "step": own.step,
            "bits": own.bits,
            "loss": own.loss,
        }

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> PackedForm:
        """From `tensors` and `metadata`."""
        tables = Tables(*(tensors[f"tables.{name}"] for name in ("digits", "frequencies", "sizes")))
        bases, programs = {}, []
        for layer, shape in metadata["shapes"].items():
            own = {name.removeprefix(f"{layer}."): tensor for name, tensor in tensors.items() if name.startswith(f"{layer}.")}
            bases[int(layer)] = JointBasis.of(shape, own)
            programs.append(Program.of(own, bases[int(layer)].mean.numel()))
        numbers = (float(metadata[name]) for name in ("bits", "loss"))
        return cls(bases, StepQuantizer(float(metadata["step"]), tensors["shifts"], tables, tuple(programs), *numbers))


class _OnDevice(NamedTuple):
    """What packing needs, on one device."""

    bases: dict[int, JointBasis]
    packer: Packer
    shifts: torch.Tensor


def _elements(bases: Mapping[int, JointBasis]) -> int:
    return sum(basis.mean.numel() for basis in bases.values())

"""`Adapters`: maps of slots' keys and values, learned so that attention over them gives what attention over the whole prompt gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError, ConfigError, whole_number
from hf_kvcaches.warmstart.slots import LayerSlots, Slots, require_layers, turned

if TYPE_CHECKING:
    from hf_kvcaches.warmstart.compressor import SlotCompressor


class LayerSample(NamedTuple):
    """What one layer of one prompt tells of the maps. All in float32; keys and the query as seen from the prompt's end.

    Args:
        keys: Of the slots, (kv_heads, slots, head_dim).
        values: (kv_heads, slots, value_dim).
        bias: Logarithms of the slots' counts, (kv_heads, slots).
        live_keys: Of the tokens behind the slots, up to the last, (kv_heads, tail, head_dim).
        live_values: (kv_heads, tail, value_dim).
        query: Of the last token, scaled, (kv_heads, group, head_dim).
        output: What attention over the whole prompt gave it, (kv_heads, group, value_dim).
    """

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    live_keys: torch.Tensor
    live_values: torch.Tensor
    query: torch.Tensor
    output: torch.Tensor

    def attend(self, key_map: torch.Tensor, value_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two parts of the query's output, (kv_heads, group, value_dim): from mapped slots and from the tokens behind them.

        Args:
            key_map: (kv_heads, head_dim, head_dim).
            value_map: (kv_heads, value_dim, value_dim).
        """
        slots = self.query @ (self.keys @ key_map).mT + self.bias[:, None]
        weights = torch.cat([slots, self.query @ self.live_keys.mT], -1).softmax(-1)
        count = self.keys.shape[1]
        return weights[..., :count] @ self.values @ value_map, weights[..., count:] @ self.live_values


@dataclass(frozen=True, eq=False)
class AdapterSample:
    """What one prompt tells of the maps."""

    layers: tuple[LayerSample, ...]

    @classmethod
    def of(
        cls,
        compressor: SlotCompressor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        query: Sequence[torch.Tensor],
        geometries: Sequence[RotaryGeometry],
        tail: int = 1,
        scaling: Sequence[float] | None = None,
    ) -> AdapterSample:
        """Compresses a prompt and keeps what attention gave over all of it.

        Args:
            keys: For each layer (kv_heads, length, head_dim), rotated: of the whole prompt.
            values: For each layer (kv_heads, length, value_dim).
            query: For each layer (heads, head_dim), rotated and not scaled: of the last token.
            tail: How many of the last tokens are run behind the slots.
            scaling: What each layer multiplies logits with; None for `head_dim ** -0.5`.
        """
        if compressor.adapters is not None:
            raise ConfigError.of("compressor", "one without adapters", "one with adapters")
        require_layers("geometries", geometries, len(keys))
        length = keys[0].shape[1]
        tail = whole_number("tail", tail, 1, f"an integer of 1 to {length - 1}", most=length - 1)
        start = length - tail
        slots = compressor.compress([own[:, :start] for own in keys], [own[:, :start] for own in values], query, length, scaling)
        layers = []
        for index, (own, geometry) in enumerate(zip(slots.layers(), geometries, strict=True)):
            factor = keys[index].shape[-1] ** -0.5 if scaling is None else scaling[index]
            scaled = (query[index].float() * factor).unflatten(0, (own.keys.shape[0], -1))
            output = (scaled @ keys[index].float().mT).softmax(-1) @ values[index].float()
            seen = (turned(part.float(), -length, geometry) for part in (own.keys, keys[index][:, start:], scaled))
            slot_keys, live_keys, scaled = seen
            live_values = values[index][:, start:].float()
            layers.append(LayerSample(slot_keys, own.values.float(), own.counts.log(), live_keys, live_values, scaled, output))
        return cls(tuple(layers))


@dataclass(frozen=True, eq=False)
class Adapters:
    """For each layer and key head a map of slots' keys and one of their values, `k @ A`.

    "CP-KVP", section 2.2. **Departs from the paper**: keys are mapped as they are seen from the prompt's end (turned back by its length),
    so that a shift before the map and one behind it give the same, and prompts of all lengths share a map. Both maps are drawn towards
    the identity instead of towards 0, which would leave no keys at all. Exact tokens among the slots go through the maps, too.

    Args:
        keys: For each layer (kv_heads, head_dim, head_dim), float32.
        values: For each layer (kv_heads, value_dim, value_dim), float32.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def identity(cls, sample: AdapterSample) -> Adapters:
        """Maps that leave everything as it is."""
        return cls(*(tuple(_identities(layer[part]) for layer in sample.layers) for part in (0, 1)))

    @classmethod
    def ridge(cls, samples: Sequence[AdapterSample], gamma: float = 1.0) -> Adapters:
        """Maps of values in closed form; keys are left alone.

        Keys decide how much attention each slot gets. With that settled, an output is what the slots give, mapped, plus what the tokens
        behind them give by themselves: linear in the map. The maps minimise the squared distance to the outputs over the whole prompt,
        summed over samples and the query heads of a key head, plus `gamma * scale * |A - I|^2`, where `scale` is the sum of the squares
        of what the slots give, divided by `value_dim`.

        Args:
            samples: From several prompts, the more the better: with few, a small gamma learns them by heart.
            gamma: Above 0.
        """
        if not gamma > 0:
            raise ConfigError.of("gamma", "a number above 0", gamma)
        _require_samples(samples)
        plain = cls.identity(samples[0])
        fitted = []
        for layer, identity in enumerate(plain.values):
            own = [sample.layers[layer] for sample in samples]
            parts = [each.attend(plain.keys[layer], identity) for each in own]
            # The query heads of a key head are rows of one problem: (kv_heads, rows, value_dim).
            given = torch.cat([from_slots for from_slots, _ in parts], 1).double()
            missing = torch.cat([each.output - sum(part) for each, part in zip(own, parts, strict=True)], 1).double()
            gram = given.mT @ given
            scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
            wide = identity.double()
            change = torch.linalg.solve(gram + gamma * scale[:, None, None] * wide, given.mT @ missing)
            fitted.append((wide + change).float())
        return cls(plain.keys, tuple(fitted))

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Adapters:
        """Adapters from what `tensors` gave."""
        layers = range(len(tensors) // 2)
        if any(each.ndim != 3 or each.shape[1] != each.shape[2] for each in tensors.values()):
            raise ArtifactError(f"The stored adapters have the shapes {[tuple(each.shape) for each in tensors.values()]}.")
        try:
            return cls(tuple(tensors[f"keys.{layer}"] for layer in layers), tuple(tensors[f"values.{layer}"] for layer in layers))
        except KeyError as error:
            raise ArtifactError(f"The stored adapters lack {error}.") from error

    def tensors(self) -> dict[str, torch.Tensor]:
        """The maps by name, for storing."""
        return {f"{name}.{layer}": each for name in ("keys", "values") for layer, each in enumerate(getattr(self, name))}

    def apply(self, slots: Slots, geometries: Sequence[RotaryGeometry]) -> Slots:
        """The slots with mapped keys and values."""
        require_layers("slots", slots.keys, len(self.keys))
        require_layers("geometries", geometries, len(self.keys))
        layers: list[LayerSlots] = []
        for own, geometry, key_map, value_map in zip(slots.layers(), geometries, self.keys, self.values, strict=True):
            keys = turned(own.keys.float(), -slots.length, geometry) @ key_map.to(own.keys.device)
            keys = turned(keys, slots.length, geometry).to(own.keys.dtype)
            values = (own.values.float() @ value_map.to(own.values.device)).to(own.values.dtype)
            layers.append(own._replace(keys=keys, values=values))
        return Slots.from_layers(layers, slots.length)

    def error(self, samples: Sequence[AdapterSample]) -> float:
        """The mean squared distance of a head's output over slots from that over the whole prompt."""
        _require_samples(samples)
        with torch.no_grad():
            return float(_distance(samples, self.keys, self.values))


class AdapterTraining:
    """Learns adapters by gradient descent, with AdamW, on the paper's L_C; can be stopped and gone on with.

    Minimises the mean over samples, layers and heads of the squared distance between a head's output over mapped slots and that over the
    whole prompt, plus `weight * |A - I|^2` over all maps (the paper: `|A|^2`). AdamW's own decay is off: it draws towards 0.

    Args:
        samples: From several prompts. Whoever goes on with a training gives the same.
        seed: Decides in which order samples are seen.
    """

    def __init__(self, samples: Sequence[AdapterSample], *, lr: float = 1e-3, weight: float = 1e-4, seed: int = 1, batch: int = 8) -> None:
        _require_samples(samples)
        if not lr > 0:
            raise ConfigError.of("lr", "a number above 0", lr)
        if not weight >= 0:
            raise ConfigError.of("weight", "a number of at least 0", weight)
        batch = whole_number("batch", batch, 1)
        self._samples, self._weight, self._batch = list(samples), weight, min(batch, len(samples))
        start = Adapters.identity(samples[0])
        self._keys, self._values = ([each.requires_grad_() for each in part] for part in (start.keys, start.values))
        self._optimizer = torch.optim.AdamW([*self._keys, *self._values], lr=lr, weight_decay=0.0)
        self._generator = torch.Generator().manual_seed(seed)
        self._steps = 0

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self._steps

    @property
    def adapters(self) -> Adapters:
        """What was learned so far."""
        return Adapters(*(tuple(each.detach().clone() for each in part) for part in (self._keys, self._values)))

    def run(self, steps: int) -> None:
        """Takes steps."""
        for _ in range(steps):
            chosen = torch.randperm(len(self._samples), generator=self._generator)[: self._batch].tolist()
            with torch.enable_grad():
                loss = _distance([self._samples[index] for index in chosen], self._keys, self._values)
                for each in (*self._keys, *self._values):
                    loss = loss + self._weight * (each - _identities(each)).square().sum()
                self._optimizer.zero_grad(set_to_none=True)
                loss.backward()
            self._optimizer.step()
            self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """All that a new training of the same samples needs to go on; for `torch.save`."""
        return {
            "adapters": self.adapters.tensors(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "steps": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to where `state_dict` was taken."""
        given = Adapters.of(state["adapters"])
        require_layers("state", given.keys, len(self._keys))
        with torch.no_grad():
            for own, stored in zip((*self._keys, *self._values), (*given.keys, *given.values), strict=True):
                own.copy_(stored)
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        self._steps = int(state["steps"])


def fit_adapters(
    samples: Sequence[AdapterSample], steps: int, *, lr: float = 1e-3, weight: float = 1e-4, seed: int = 1, batch: int = 8
) -> Adapters:
    """Adapters from a training of that many steps; see `AdapterTraining`, which can also be stopped and gone on with.

    Args:
        seed: Decides in which order samples are seen.
    """
    training = AdapterTraining(samples, lr=lr, weight=weight, seed=seed, batch=batch)
    training.run(steps)
    return training.adapters


def _distance(samples: Sequence[AdapterSample], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    distances = []
    for sample in samples:
        for own, key_map, value_map in zip(sample.layers, keys, values, strict=True):
            from_slots, live = own.attend(key_map, value_map)
            distances.append((from_slots + live - own.output).square().sum(-1).mean())
    return torch.stack(distances).mean()


def _identities(rows: torch.Tensor) -> torch.Tensor:
    """For each head the identity, of the size of its rows."""
    return torch.eye(rows.shape[-1], device=rows.device).repeat(rows.shape[0], 1, 1)


def _require_samples(samples: Sequence[AdapterSample]) -> None:
    if not samples:
        raise ConfigError.of("samples", "at least one", "none")

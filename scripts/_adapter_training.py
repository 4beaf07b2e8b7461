"""How `Adapters` are made: in closed form, or by gradient descent on the paper's loss L_C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tqdm import trange

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, whole_number
from hf_kvcaches.warmstart.paper.adapters import Adapters
from hf_kvcaches.warmstart.paper.compressor import SlotCompressor
from hf_kvcaches.warmstart.paper.slots import require_layers, rotated


class LayerSample(NamedTuple):
    """One layer of one prompt, in float32; keys and the query relative to the prompt's end."""

    keys: torch.Tensor  # of the slots, (kv_heads, slots, head_dim)
    values: torch.Tensor  # (kv_heads, slots, value_dim)
    bias: torch.Tensor  # logarithms of the slots' counts, (kv_heads, slots)
    live_keys: torch.Tensor  # of the tokens behind the slots, including the last, (kv_heads, tail, head_dim)
    live_values: torch.Tensor  # (kv_heads, tail, value_dim)
    query: torch.Tensor  # of the last token, scaled, (kv_heads, group, head_dim)
    output: torch.Tensor  # its attention output over the whole prompt, (kv_heads, group, value_dim)

    def attend(self, key_map: torch.Tensor, value_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """the two summands of the output, (kv_heads, group, value_dim): from mapped slots, and from the tokens behind them."""
        slots = self.query @ (self.keys @ key_map).mT + self.bias[:, None]
        weights = torch.cat([slots, self.query @ self.live_keys.mT], -1).softmax(-1)
        count = self.keys.shape[1]
        return weights[..., :count] @ self.values @ value_map, weights[..., count:] @ self.live_values


Sample = tuple[LayerSample, ...]


def sample_of(
    compressor: SlotCompressor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    query: Sequence[torch.Tensor],
    geometries: Sequence[RotaryGeometry],
    tail: int = 1,
    scaling: Sequence[float] | None = None,
) -> Sample:
    """Compress a prompt but for its last `tail` tokens, and compute the attention outputs over all of it; arguments as of `compress`."""
    require_layers("geometries", geometries, len(keys))
    length = keys[0].shape[1]
    start = length - whole_number("tail", tail, 1, f"an integer of 1 to {length - 1}", most=length - 1)
    slots = compressor.compress([layer[:, :start] for layer in keys], [layer[:, :start] for layer in values], query, length, scaling)
    scaling = [layer.shape[-1] ** -0.5 for layer in keys] if scaling is None else scaling
    sample = []
    for layer, geometry, all_keys, all_values, states, factor in zip(slots.layers, geometries, keys, values, query, scaling, strict=True):
        scaled = (states.float() * factor).unflatten(0, (layer.keys.shape[0], -1))
        output = (scaled @ all_keys.float().mT).softmax(-1) @ all_values.float()
        slot_keys, live_keys, scaled = (rotated(rows.float(), -length, geometry) for rows in (layer.keys, all_keys[:, start:], scaled))
        live_values = all_values[:, start:].float()
        sample.append(LayerSample(slot_keys, layer.values.float(), layer.counts.log(), live_keys, live_values, scaled, output))
    return tuple(sample)


def identity_adapters(sample: Sample) -> Adapters:
    """maps that leave everything as it is."""
    return Adapters(tuple(_identities(layer.keys) for layer in sample), tuple(_identities(layer.values) for layer in sample))


def fit_values(samples: Sequence[Sample], gamma: float = 1.0) -> Adapters:
    """Fit maps of values in closed form, and leave keys alone.

    With fixed keys an output is the slots' summand, mapped, plus that of the tokens behind them: linear in the map. The maps minimise the
    squared distance to the outputs over the whole prompt, summed over samples and the query heads of a key head, plus
    `gamma * scale * |A - I|^2`, where `scale` is the sum of the squares of the slots' summands, divided by `value_dim`.
    """
    if not gamma > 0:
        raise ConfigError.of("gamma", "a number above 0", gamma)
    plain = identity_adapters(_checked(samples)[0])
    fitted = []
    for layers, key_map, identity in zip(zip(*samples, strict=True), plain.keys, plain.values, strict=True):
        summands = [layer.attend(key_map, identity) for layer in layers]
        # The query heads of a key head are rows of one problem: (kv_heads, rows, value_dim).
        inputs = torch.cat([from_slots for from_slots, _ in summands], 1).double()
        missing = torch.cat([layer.output - sum(pair) for layer, pair in zip(layers, summands, strict=True)], 1).double()
        gram = inputs.mT @ inputs
        scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
        change = torch.linalg.solve(gram + gamma * scale[:, None, None] * identity.double(), inputs.mT @ missing)
        fitted.append((identity.double() + change).float())
    return Adapters(plain.keys, tuple(fitted))


@torch.no_grad()
def loss_of(adapters: Adapters, samples: Sequence[Sample]) -> float:
    """L_C: the mean squared distance of a head's output over slots from that over the whole prompt."""
    return float(_loss(adapters, _checked(samples)))


def train_adapters(
    samples: Sequence[Sample], *, steps: int, lr: float = 1e-3, weight: float = 1e-4, seed: int = 1, batch: int = 8, progress: bool = False
) -> Adapters:
    """Train adapters with AdamW on the paper's L_C plus `weight * |A - I|^2` over all maps (the paper: `|A|^2`)."""
    maps = identity_adapters(_checked(samples)[0])
    parameters = [tensor.requires_grad_() for tensor in (*maps.keys, *maps.values)]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)  # its decay pulls towards 0
    generator = torch.Generator().manual_seed(seed)
    for _ in trange(steps, desc=f"seed {seed}", unit="step", disable=not progress):
        chosen = torch.randperm(len(samples), generator=generator)[:batch].tolist()
        with torch.enable_grad():
            loss = _loss(maps, [samples[index] for index in chosen])
            for tensor in parameters:
                loss = loss + weight * (tensor - _identities(tensor)).square().sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
        optimizer.step()
    return Adapters.of({name: tensor.detach().clone() for name, tensor in maps.tensors().items()})


def _loss(adapters: Adapters, samples: Sequence[Sample]) -> torch.Tensor:
    losses = []
    for sample in samples:
        for layer, key_map, value_map in zip(sample, adapters.keys, adapters.values, strict=True):
            from_slots, live = layer.attend(key_map, value_map)
            losses.append((from_slots + live - layer.output).square().sum(-1).mean())
    return torch.stack(losses).mean()


def _identities(rows: torch.Tensor) -> torch.Tensor:
    return torch.eye(rows.shape[-1], device=rows.device).repeat(rows.shape[0], 1, 1)


def _checked(samples: Sequence[Sample]) -> Sequence[Sample]:
    if not samples:
        raise ConfigError.of("samples", "at least one", "none")
    return samples

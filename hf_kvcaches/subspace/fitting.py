"""From what was measured of the layers to their bases: projections, ranks, gamma and thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from hf_kvcaches.core.allocation import allocate
from hf_kvcaches.core.metric import Sizes
from hf_kvcaches.errors import ConfigError, is_number, require_choice, whole_number
from hf_kvcaches.subspace.bases import LayerBases
from hf_kvcaches.subspace.measuring import LayerMeter
from hf_kvcaches.subspace.projections import Projection, in_metric, principal, rank_for_energy

Ranks = list[tuple[int, int]]

_OPTIONS = {
    "rotation": ("aware", "post"),
    "metric": ("attention", "loss", "plain"),
    "gamma": ("calibrated", "one", "paper"),
    "share": ("head", "layer"),
}


@dataclass(frozen=True)
class Choices:
    """What the user asked of the bases; described in `SubspaceBases.calibrate`. Checked when made."""

    rank: int | tuple[int, int] | None = None
    energy: float | None = None
    bytes_ratio: float | None = None
    rotation: Literal["aware", "post"] = "aware"
    metric: Literal["attention", "loss", "plain"] = "attention"
    gamma: Literal["calibrated", "one", "paper"] = "calibrated"
    share: Literal["head", "layer"] = "head"
    multiple_of: int = 4
    percentile: float = 95

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("rank", "energy", "bytes_ratio") if getattr(self, name) is not None}
        if len(given) != 1:
            raise ConfigError.of("rank, energy, bytes_ratio", "exactly one of them", given, "Try bytes_ratio=0.375.")
        for name, known in _OPTIONS.items():
            require_choice(name, getattr(self, name), known)
        for name in ("energy", "bytes_ratio"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value <= 1):
                hint = "It is a share of the energy, such as 0.98." if name == "energy" else "It is a share of the bytes, such as 0.375."
                raise ConfigError.of(name, "a number above 0 and up to 1", value, hint)
        if self.rank is not None:
            pair = self.rank if isinstance(self.rank, tuple | list) else (self.rank, self.rank)
            expected = "an integer of at least 1, or two: (keys, values)"
            if len(pair) != 2:
                raise ConfigError.of("rank", expected, self.rank)
            object.__setattr__(self, "rank", tuple(whole_number("rank", each, 1, expected) for each in pair))
        object.__setattr__(self, "multiple_of", whole_number("multiple_of", self.multiple_of, 1))
        if not (is_number(self.percentile) and 0 <= self.percentile <= 100):
            raise ConfigError.of("percentile", "a number of 0 to 100", self.percentile)

    @property
    def rule(self) -> dict[str, Any]:
        """How ranks are chosen: one argument and its value."""
        rules = {"rank": self.rank, "energy": self.energy, "bytes_ratio": self.bytes_ratio}
        return {name: value for name, value in rules.items() if value is not None}

    def check_sizes(self, layers: Sequence[Sizes]) -> None:
        """Refuses ranks that the model's heads don't have, and budgets too small for any."""
        if isinstance(self.rank, tuple):
            most = min(each.key_dim for each in layers), min(each.value_dim for each in layers)
            for rank, dim in zip(self.rank, most, strict=True):
                if rank > dim:
                    raise ConfigError.of("rank", f"1 to {most[0]} for keys and 1 to {most[1]} for values, the model's head size", self.rank)
        if self.bytes_ratio is not None:
            least = sum(each.kv_heads * sum(min(self.multiple_of, dim) for dim in (each.key_dim, each.value_dim)) for each in layers)
            full = _full(layers)
            if least > self.bytes_ratio * full:
                raise ConfigError.of(
                    "bytes_ratio",
                    f"at least {least / full:.3g}, which is rank {self.multiple_of} everywhere",
                    self.bytes_ratio,
                    "Lower multiple_of.",
                )


class _Spectra(NamedTuple):
    """Full-rank projections of a layer, one for each head or one for all; energies that can be compared over layers."""

    keys: Projection
    values: Projection


def fit(meters: Sequence[LayerMeter], choices: Choices) -> list[LayerBases]:
    """The bases of all measured layers.

    Args:
        meters: One for each layer, with the sums of all processes.
    """
    spectra = [_spectra(meter, choices) for meter in meters]
    ranks = _ranks(spectra, [_sizes(meter) for meter in meters], choices)
    return [_fit_layer(meter, own, chosen, choices) for meter, own, chosen in zip(meters, spectra, ranks, strict=True)]


def _spectra(meter: LayerMeter, choices: Choices) -> _Spectra:
    key_metric: torch.Tensor | None
    value_metric: torch.Tensor | None
    if choices.metric == "loss":
        (keys, key_metric), (values, value_metric) = meter.key_pull, meter.output_pull
    else:
        keys, values = meter.keys.mean, meter.value_moment
        key_metric, value_metric = (None, None) if meter.attention is None else meter.attention.metrics()
    if choices.share == "layer":
        keys, values = keys.mean(0, keepdim=True), values.mean(0, keepdim=True)
        if key_metric is not None and value_metric is not None:
            key_metric, value_metric = key_metric.sum(0, keepdim=True), value_metric.sum(0, keepdim=True)
    return _Spectra(_project(keys, key_metric), _project(values, value_metric))


def _project(gram: torch.Tensor, metric: torch.Tensor | None) -> Projection:
    dim = gram.shape[-1]
    if metric is None:
        return principal(gram, dim)
    # With a metric of mean 1 the coefficients are about as large as what they stand for, and fit into half precision.
    size = metric.diagonal(dim1=-2, dim2=-1).mean(-1)
    unit = metric / size.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]
    full = in_metric(gram, unit, dim)
    return full._replace(energies=full.energies * size[:, None])


def _ranks(spectra: Sequence[_Spectra], layers: Sequence[Sizes], choices: Choices) -> list[Ranks]:
    """For each layer, (key rank, value rank) of each basis."""
    dims = [(each.key_dim, each.value_dim) for each in layers]
    if isinstance(choices.rank, tuple):
        return [[choices.rank] * len(own.keys.energies) for own in spectra]
    step = choices.multiple_of
    if choices.energy is not None:
        chosen = []
        for own, both in zip(spectra, dims, strict=True):
            least = [rank_for_energy(part.energies, float(choices.energy)) for part in own]
            rounded = [(-(-each // step) * step).clamp_max(dim).tolist() for each, dim in zip(least, both, strict=True)]
            chosen.append(list(zip(*rounded, strict=True)))
        return chosen
    assert choices.bytes_ratio is not None
    losses, costs = [], []
    for own, sizes in zip(spectra, layers, strict=True):
        for part in own:
            # Energies of plain keys and values have units of their own; only their shares can be compared.
            whole = part.energies.sum(-1, keepdim=True) if choices.metric == "plain" else torch.ones_like(part.energies[:, :1])
            losses += list(part.energies / whole.clamp_min(torch.finfo(torch.float64).tiny))
            costs += [sizes.kv_heads / len(part.energies)] * len(part.energies)
    bought = iter(allocate(losses, choices.bytes_ratio * _full(layers), cost=costs, multiple_of=step))
    taken = [[[next(bought) for _ in part.energies] for part in own] for own in spectra]
    return [list(zip(*both, strict=True)) for both in taken]


def _fit_layer(meter: LayerMeter, spectra: _Spectra, ranks: Ranks, choices: Choices) -> LayerBases:
    heads = _sizes(meter).kv_heads
    keys = [_cut(spectra.keys, index, rank) for index, (rank, _) in enumerate(ranks)]
    values = [_cut(spectra.values, index, rank) for index, (_, rank) in enumerate(ranks)]
    if len(ranks) == 1:
        keys, values = keys * heads, values * heads
    key_projector, value_projector = (torch.stack([down @ up for up, down in each]) for each in (keys, values))
    if choices.gamma == "calibrated":
        gamma = _least_squares(meter, key_projector)
    elif choices.gamma == "paper":
        gamma = torch.tensor([(len(up) / up.shape[-1]) ** 0.5 for up, _ in keys], dtype=torch.float64)
    else:
        gamma = torch.ones(heads, dtype=torch.float64)
    residuals = _residuals(meter, key_projector, value_projector, float(choices.percentile))
    # Heads that share a basis share the tensors, too.
    stored = {id(pair): (_store(pair[0]), _store(pair[1])) for pair in (*keys, *values)}
    return LayerBases(
        key_encode=tuple(stored[id(each)][0] for each in keys),
        key_decode=tuple(stored[id(each)][1] for each in keys),
        value_encode=tuple(stored[id(each)][0] for each in values),
        value_decode=tuple(stored[id(each)][1] for each in values),
        gamma=_store(gamma),
        key_energies=_store(spectra.keys.energies.expand(heads, -1)),
        value_energies=_store(spectra.values.energies.expand(heads, -1)),
        key_residual=_store(residuals[0]),
        value_residual=_store(residuals[1]),
    )


def _cut(full: Projection, index: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    dim = full.encode.shape[-1]
    if rank == dim:
        # Nothing is left out, and this is the way without rounding.
        whole = torch.eye(dim, dtype=full.encode.dtype, device=full.encode.device)
        return whole, whole
    return full.encode[index, :rank], full.decode[index, :, :rank]


def _least_squares(meter: LayerMeter, projector: torch.Tensor) -> torch.Tensor:
    """The factors on estimated logits that bring them closest to the true ones, (kv_heads,)."""
    sizes = _sizes(meter)
    both = torch.zeros(2, sizes.kv_heads, dtype=torch.float64, device=projector.device)
    for tokens in meter.sample.values():
        keys = tokens.keys.double()
        estimate = meter.in_frame(keys[None], tokens.positions)[0] @ projector.mT
        if meter.geometry is not None:
            estimate = meter.geometry.rotate(estimate[None], tokens.positions)[0]
        queries = tokens.queries.double().unflatten(0, (sizes.kv_heads, -1)).flatten(1, 2)
        # Repeated for the heads of the group; a query meets the keys up to its own.
        visible = torch.ones(keys.shape[1], keys.shape[1], dtype=torch.bool, device=keys.device).tril()
        visible = visible.repeat(sizes.heads // sizes.kv_heads, 1)
        true, estimated = ((queries @ each.mT).masked_fill(~visible, 0) for each in (keys, estimate))
        both += torch.stack([(true * estimated).sum((1, 2)), estimated.square().sum((1, 2))])
    return torch.where(both[1] > 0, both[0] / both[1].clamp_min(torch.finfo(torch.float64).tiny), 1.0)


def _residuals(
    meter: LayerMeter, key_projector: torch.Tensor, value_projector: torch.Tensor, percentile: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The percentile of `|x - Px| / |x|` over the sample, (kv_heads,), of keys and of values."""
    keys = [meter.in_frame(tokens.keys.double()[None], tokens.positions)[0] for tokens in meter.sample.values()]
    values = [tokens.values.double() for tokens in meter.sample.values()]
    found = []
    for rows, projector in ((keys, key_projector), (values, value_projector)):
        all_rows = torch.cat(rows, 1)
        lost = torch.linalg.vector_norm(all_rows - all_rows @ projector.mT, dim=-1)
        norms = torch.linalg.vector_norm(all_rows, dim=-1)
        relative = torch.where(norms > 0, lost / norms, torch.zeros_like(lost))
        found.append(torch.quantile(relative, percentile / 100, dim=-1))
    return found[0], found[1]


def _store(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", torch.float32).clone(memory_format=torch.contiguous_format)


def _full(layers: Sequence[Sizes]) -> int:
    """Elements of exact keys and values that a token takes."""
    return sum(each.kv_heads * (each.key_dim + each.value_dim) for each in layers)


def _sizes(meter: LayerMeter) -> Sizes:
    assert meter.sizes is not None
    return meter.sizes

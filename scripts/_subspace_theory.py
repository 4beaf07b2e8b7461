"""How fast the spectra of keys and values fall, and whether the bounds tell how large errors are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from _subspace_variants import Workshop

from hf_kvcaches import AdaptiveSubspace, SubspaceCache
from hf_kvcaches.kernels.coefficients import TILE
from hf_kvcaches.subspace.bases import LayerBases
from hf_kvcaches.subspace.bounds import logit_error_bound, output_error_bound, residual_norm, residual_rows, value_radius
from hf_kvcaches.subspace.calibration import MeterCache
from hf_kvcaches.subspace.fitting import Choices
from hf_kvcaches.subspace.measuring import LayerMeter, Pick, Tokens

SPECTRA = {"keys before rotation": "aware", "keys after rotation": "post", "values": "aware"}
_MEASURES = ("logits", "output")


def spectra_rows(workshop: Workshop) -> list[dict[str, Any]]:
    """The share of the energy that the best subspace of each rank keeps, the mean over the heads of a layer."""
    found = []
    for what, rotation in SPECTRA.items():
        bases = workshop.bases({"rank": 1, "rotation": rotation, "metric": "plain"})
        for index, layer in enumerate(bases.layers):
            if layer is None:
                continue
            energies = (layer.value_energies if what == "values" else layer.key_energies).double()
            kept = (energies.cumsum(-1) / energies.sum(-1, keepdim=True)).mean(0)
            found += [{"layer": index, "what": what, "rank": rank, "energy": round(float(each), 6)} for rank, each in enumerate(kept, 1)]
    return found


def capture(model: Any, ids: torch.Tensor) -> dict[int, LayerMeter]:
    """Each layer's queries, keys and values of rows of text, as attention saw them: the meters' samples, by row."""
    cache = MeterCache(model, Choices(rank=1, metric="plain"), ids.shape[1])
    cache.picks = [Pick(row, row, torch.arange(ids.shape[1])) for row in range(len(ids))]
    with torch.no_grad():
        model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)
    return cache.meters


class _Frame:
    """Keys as the bases see them, and back."""

    def __init__(self, meter: LayerMeter, rotation: str) -> None:
        self.geometry = meter.geometry if rotation == "aware" else None

    def into(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return keys if self.geometry is None else self.geometry.unrotate(keys[None, None], positions)[0, 0]

    def back(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return keys if self.geometry is None else self.geometry.rotate(keys[None, None], positions)[0, 0]


def head_errors(
    meter: LayerMeter, tokens: Tokens, bases: LayerBases, rotation: str, head: int, at: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Measured errors of one key head's attention and the bounds on them, for the queries at some places, each (heads, places).

    No token is exact, as with a window of 0.
    """
    assert meter.sizes is not None
    frame, scaling = _Frame(meter, rotation), meter.sizes.scaling
    keys, values, positions = tokens.keys[head].double(), tokens.values[head].double(), tokens.positions.to(tokens.keys.device)
    group = meter.sizes.heads // meter.sizes.kv_heads
    queries = tokens.queries[head * group : (head + 1) * group].double()[:, at]
    maps = [each[head].double().to(keys.device) for each in (bases.key_encode, bases.key_decode, bases.value_encode, bases.value_decode)]
    gamma = float(bases.gamma[head])
    inner = frame.into(keys, positions)
    estimated = frame.back(gamma * (inner @ maps[0].mT @ maps[1].mT), positions)
    hidden = torch.arange(len(keys), device=keys.device) > at[:, None]
    true, guess = (scaling * queries @ each.mT for each in (keys, estimated))
    weights, guessed = (each.masked_fill(hidden, float("-inf")).softmax(-1) for each in (true, guess))
    output, near = weights @ values, guessed @ (values @ maps[2].mT @ maps[3].mT)
    lost = residual_rows(inner, maps[0], maps[1], gamma).cummax(0).values[at]
    lost_values = residual_rows(values, maps[2], maps[3]).cummax(0).values[at]
    norms = torch.linalg.vector_norm(queries, dim=-1)
    rows = logit_error_bound(lost, norms, scaling)
    operator = logit_error_bound(residual_norm(inner, maps[0], maps[1], gamma), norms, scaling)
    radius = value_radius(values)
    return {
        "logits": (true - guess).abs().masked_fill(hidden, 0).amax(-1),
        "output": torch.linalg.vector_norm(output - near, dim=-1),
        "logits bound": rows,
        "output bound": output_error_bound(rows, radius, lost_values),
        "logits operator": operator,
        "output operator": output_error_bound(operator, radius, residual_norm(values, maps[2], maps[3])),
    }


def bounds_rows(workshop: Workshop, ids: torch.Tensor, ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """For each layer: rank correlation of errors and bounds, over the queries of one rank and over heads of all ranks."""
    meters = capture(workshop.model, ids)
    at = torch.arange(ids.shape[1] // 4, ids.shape[1], max(1, ids.shape[1] // 48), device=workshop.model.device)
    for layer, meter in meters.items():
        pooled: list[dict[str, torch.Tensor]] = []
        for rank in ranks:
            bases = workshop.bases({"rank": rank})
            own = bases.layers[layer]
            assert own is not None
            points = [
                head_errors(meter, tokens, own, bases.settings.rotation, head, at)
                for tokens in meter.sample.values()
                for head in range(own.kv_heads)
            ]
            yield from _correlations(layer, str(rank), "queries", {name: torch.stack([p[name] for p in points]) for name in points[0]})
            pooled += [{name: each.mean() for name, each in point.items()} for point in points]
        yield from _correlations(layer, "all", "heads", {name: torch.stack([p[name] for p in pooled]) for name in pooled[0]})


@torch.no_grad()
def sketch_rows(workshop: Workshop, ids: torch.Tensor, ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """For each layer: rank correlation of what Frequent Directions guarantee and the errors of each row's last query.

    The guarantee is for what the basis in use loses of all keys (or values) in the sketch, and no bound on these errors.
    """
    warmup = min(256, ids.shape[1] // 2 // TILE * TILE)
    found: dict[int, list[dict[str, torch.Tensor]]] = {}
    for rank in ranks:
        adaptive = AdaptiveSubspace(rank=rank, sketch="fd", warmup=warmup)
        cache = SubspaceCache(workshop.model, adaptive=adaptive, sinks=0, recent=0, shadow=True)
        for piece in ids.to(workshop.model.device).split(128, 1):
            workshop.model(input_ids=piece, past_key_values=cache, use_cache=True)
        for index, layer in enumerate(cache.diagnostics().layers):
            if layer is None or layer.key_sketch_bound is None or layer.value_sketch_bound is None:
                continue
            assert layer.logit_error is not None
            assert layer.output_error is not None
            errors = [each.unflatten(1, (layer.key_sketch_bound.shape[1], -1)).amax(-1) for each in (layer.logit_error, layer.output_error)]
            named = {
                "logits": errors[0],
                "output": errors[1],
                "logits sketch": layer.key_sketch_bound,
                "output sketch": layer.value_sketch_bound,
            }
            found.setdefault(index, []).append({name: each.flatten() for name, each in named.items()})
    for index, own in found.items():
        points = {name: torch.cat([each[name] for each in own]) for name in own[0]}
        for what in _MEASURES:
            measured, told = points[what], points[f"{what} sketch"]
            numbers = {"points": len(measured), "spearman": round(spearman(measured, told), 4), "error": f"{float(measured.median()):.4g}"}
            yield {"layer": index, "rank": "all", "over": "heads", "what": what, "bound": "sketch", **numbers}


def _correlations(layer: int, rank: str, over: str, points: dict[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    for what in _MEASURES:
        measured = points[what].flatten()
        for kind in ("bound", "operator"):
            bound = points[f"{what} {kind}"].flatten()
            yield {
                "layer": layer,
                "rank": rank,
                "over": over,
                "what": what,
                "bound": "largest row" if kind == "bound" else "operator norm",
                "points": len(measured),
                "spearman": round(spearman(measured, bound), 4),
                "error": f"{float(measured.median()):.4g}",
                "share_of_bound": round(float((measured / bound.clamp_min(1e-300)).median()), 5),
                "above_bound": int((measured > bound * (1 + 1e-9) + 1e-9).sum()),
            }


def spearman(left: torch.Tensor, right: torch.Tensor) -> float:
    """The correlation of the ranks of two lists of numbers; equal ones share their mean rank."""
    ranks = torch.stack([_ranks(left), _ranks(right)])
    centred = ranks - ranks.mean(1, keepdim=True)
    scale = centred.square().sum(1).prod().sqrt()
    return float((centred[0] * centred[1]).sum() / scale) if scale else float("nan")


def _ranks(numbers: torch.Tensor) -> torch.Tensor:
    _, place, counts = torch.unique(numbers.double(), sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[place]

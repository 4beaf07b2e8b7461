"""How fast the spectra of keys and values fall, and whether the bounds tell how large errors are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from _subspace_variants import Workshop
from shared.numbers import spearman

from hf_kvcaches.subspace.bases import LayerBases
from hf_kvcaches.subspace.bounds import logit_error_bound, output_error_bound, value_radius
from hf_kvcaches.subspace.calibration import MeterCache
from hf_kvcaches.subspace.fitting import Choices
from hf_kvcaches.subspace.measuring import LayerMeter, MeasuredTokens, Pick

SPECTRA = {"keys before rotation": "aware", "keys after rotation": "post", "values": "aware"}
_MEASURES = ("logits", "output")


def residuals(vectors: torch.Tensor, encode: torch.Tensor, decode: torch.Tensor | None = None, gamma: float = 1.0) -> torch.Tensor:
    """What each token loses, `x - gamma decode encode x`, in float64; `decode` is the transpose of `encode` if None."""
    encode = encode.double()
    decode = encode.mT if decode is None else decode.double()
    return vectors.double() - gamma * (vectors.double() @ encode.mT @ decode.mT)


def residual_rows(*maps: Any, **options: Any) -> torch.Tensor:
    """The norm of what each token loses, (..., tokens); their largest is the best possible residual of the bounds."""
    return torch.linalg.vector_norm(residuals(*maps, **options), dim=-1)


def residual_norm(*maps: Any, **options: Any) -> torch.Tensor:
    """The operator norm of what all tokens lose together, (...)."""
    lost = residuals(*maps, **options)
    return torch.linalg.matrix_norm(lost, ord=2) if lost.numel() else lost.new_zeros(lost.shape[:-2])


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
    meter: LayerMeter, tokens: MeasuredTokens, bases: LayerBases, rotation: str, head: int, at: torch.Tensor
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

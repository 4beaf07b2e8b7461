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
from tests.reference.residuals import residual_norm

SPECTRA = {"keys before rotation": "aware", "keys after rotation": "post", "values": "aware"}


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


def head_errors(meter: LayerMeter, tokens: MeasuredTokens, bases: LayerBases, head: int, at: torch.Tensor) -> dict[str, torch.Tensor]:
    """Measured errors of one key head's attention and the bounds on them, for the queries at some places, each (heads, places).

    No token is exact, as with a window of 0.
    """
    assert meter.sizes is not None
    scaling, geometry = meter.sizes.scaling, meter.geometry
    keys, values, positions = tokens.keys[head].double(), tokens.values[head].double(), tokens.positions.to(tokens.keys.device)
    group = meter.sizes.heads // meter.sizes.kv_heads
    queries = tokens.queries[head * group : (head + 1) * group].double()[:, at]
    maps = [each[head].double().to(keys.device) for each in (bases.key_encode, bases.key_decode, bases.value_encode, bases.value_decode)]
    gamma = float(bases.gamma[head])
    inner = geometry.unrotate(keys[None, None], positions)[0, 0]
    estimated = geometry.rotate((gamma * (inner @ maps[0].mT @ maps[1].mT))[None, None], positions)[0, 0]
    hidden = torch.arange(len(keys), device=keys.device) > at[:, None]
    true, guess = (scaling * queries @ each.mT for each in (keys, estimated))
    weights, guessed = (each.masked_fill(hidden, float("-inf")).softmax(-1) for each in (true, guess))
    output, near = weights @ values, guessed @ (values @ maps[2].mT @ maps[3].mT)
    norms = torch.linalg.vector_norm(queries, dim=-1)
    bound = logit_error_bound(residual_norm(inner, maps[0], maps[1], gamma), norms, scaling)
    return {
        "logits": (true - guess).abs().masked_fill(hidden, 0).amax(-1),
        "output": torch.linalg.vector_norm(output - near, dim=-1),
        "logits bound": bound,
        "output bound": output_error_bound(bound, value_radius(values), residual_norm(values, maps[2], maps[3])),
    }


def bounds_rows(workshop: Workshop, ids: torch.Tensor, ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """For each layer: rank correlation of errors and bounds, over heads of all ranks."""
    at = torch.arange(ids.shape[1] // 4, ids.shape[1], max(1, ids.shape[1] // 48), device=workshop.model.device)
    for layer, meter in capture(workshop.model, ids).items():
        points = []
        for rank in ranks:
            bases = workshop.bases({"rank": rank}).layers[layer]
            assert bases is not None
            points += [head_errors(meter, tokens, bases, head, at) for tokens in meter.sample.values() for head in range(bases.kv_heads)]
        for what in ("logits", "output"):
            errors, bounds = (torch.stack([point[name] for point in points]) for name in (what, f"{what} bound"))
            above = int((errors > bounds * (1 + 1e-9) + 1e-9).sum())
            errors, bounds = errors.flatten(1).mean(1), bounds.flatten(1).mean(1)
            yield {
                "layer": layer,
                "what": what,
                "points": len(points),
                "spearman": round(spearman(errors, bounds), 4),
                "error": f"{float(errors.median()):.4g}",
                "share_of_bound": round(float((errors / bounds.clamp_min(1e-300)).median()), 5),
                "above_bound": above,
            }

"""What a `SubspaceCache` loses of a text, head by head: `SubspaceCache.diagnostics` reads it a second time with exact keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.evaluate.observer import Attended, WatchingCache
from hf_kvcaches.subspace.adaptive.layer import FollowingLayer
from hf_kvcaches.subspace.bounds import attention_error_bound, value_radius
from hf_kvcaches.subspace.coded import CodedLayer

_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, eq=False)
class LayerDiagnostics:
    """What one layer loses of the tokens that it keeps as codes; (batch, kv_heads) each, and of queries (batch, heads).

    Args:
        tokens: How many these are.
        key_residual: The length of all errors of keys together, as a share of the keys' own.
        value_residual: The same of values.
        key_operator_norm: The operator norm of these errors.
        value_operator_norm: The same of values.
        logit_error: The largest error of a logit of the last query.
        logit_bound: What `bounds.logit_error_bound` allows for.
        output_error: The length of the error of that query's attention to these tokens alone.
        output_bound: What `bounds.output_error_bound` allows for.
        key_bases: How many bases a head has used, where these follow the text.
        value_bases: The same of values.
    """

    tokens: int
    key_residual: torch.Tensor
    value_residual: torch.Tensor
    key_operator_norm: torch.Tensor
    value_operator_norm: torch.Tensor
    logit_error: torch.Tensor
    logit_bound: torch.Tensor
    output_error: torch.Tensor
    output_bound: torch.Tensor
    key_bases: torch.Tensor | None = None
    value_bases: torch.Tensor | None = None


@dataclass(frozen=True, eq=False, repr=False)
class SubspaceDiagnostics:
    """What a `SubspaceCache` loses; `str` is a table.

    Args:
        layers: For each layer of the model; None for those that keep no codes.
    """

    layers: tuple[LayerDiagnostics | None, ...]

    def __str__(self) -> str:
        own = [(index, layer) for index, layer in enumerate(self.layers) if layer is not None]
        names = [each.name for each in fields(LayerDiagnostics)[1:] if any(getattr(layer, each.name) is not None for _, layer in own)]
        rows = [["layer", "tokens", *(name.replace("_", " ") for name in names)]]
        rows += [[str(index), str(layer.tokens), *(_cell(getattr(layer, name)) for name in names)] for index, layer in own]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(["SubspaceDiagnostics: mean / largest over rows and heads", *lines])

    __repr__ = __str__


class _ExactCache(WatchingCache):
    """Keeps what a model attends with."""

    def __init__(self, model: Any) -> None:
        self.attended: dict[int, Attended] = {}
        super().__init__(model)

    def watch(self, attended: Attended) -> None:
        self.attended[attended.layer_idx] = attended._replace(query=attended.query[:, :, -1:])


@torch.no_grad()
def measure(layers: Sequence[Any], model: Any, input_ids: torch.Tensor) -> SubspaceDiagnostics:
    """What layers that have read a text as one prompt have lost of it.

    Args:
        layers: Of a cache.
        input_ids: The text, (batch, tokens).
    """
    watching = _ExactCache(model)
    base = compat.base_model(model)
    base(input_ids=input_ids, **compat.cache_kwargs(base, watching))
    found = [
        _of_layer(layer, watching.attended[index]) if isinstance(layer, CodedLayer) and index in watching.attended else None
        for index, layer in enumerate(layers)
    ]
    return SubspaceDiagnostics(tuple(found))


def _of_layer(layer: CodedLayer, exact: Attended) -> LayerDiagnostics:
    """Compares what a layer would read with what there was."""
    placement = layer.placement
    coded = slice(placement.first, placement.first + placement.coded)
    keys, values = (each[:, :, coded].double() for each in (exact.keys, exact.values))
    near_keys, near_values = (each.double() for each in layer.decoded())
    found: dict[str, Any] = {}
    lost = [keys - near_keys, values - near_values]
    for side, whole, left in zip(("key", "value"), (keys, values), lost, strict=True):
        found[f"{side}_residual"] = (left.square().sum((2, 3)) / whole.square().sum((2, 3)).clamp_min(_TINY)).sqrt()
        found[f"{side}_operator_norm"] = torch.linalg.eigvalsh(left.mT @ left)[..., -1].clamp_min(0).sqrt()
        if isinstance(layer, FollowingLayer):
            current = getattr(layer, f"{side}_current")
            found[f"{side}_bases"] = torch.zeros(whole.shape[:2]) if current is None else current + 1
    query = exact.query.double().unflatten(1, (keys.shape[1], -1)).squeeze(3)
    logits, near = (exact.scaling * query @ each.mT for each in (keys, near_keys))
    if (softcap := exact.options.get("softcap")) is not None:
        logits, near = (softcap * torch.tanh(each / softcap) for each in (logits, near))
    nothing = not placement.coded
    error = torch.zeros(query.shape[:3]) if nothing else (logits - near).abs().amax(-1)
    output = torch.linalg.vector_norm(logits.softmax(-1) @ values - near.softmax(-1) @ near_values, dim=-1)
    key_rows, value_rows = (torch.linalg.vector_norm(each, dim=-1)[:, :, None] for each in lost)
    radius = torch.zeros(keys.shape[:2]) if nothing else value_radius(values)
    bounds = attention_error_bound(key_rows, value_rows, torch.linalg.vector_norm(query, dim=-1), radius[:, :, None], exact.scaling)
    measured = {"logit_error": error, "logit_bound": bounds.logits, "output_error": output, "output_bound": bounds.output}
    found |= {name: each.flatten(1, 2) for name, each in measured.items()}
    return LayerDiagnostics(placement.coded, **{name: each.cpu() for name, each in found.items()})


def _cell(numbers: torch.Tensor | None) -> str:
    """Mean and largest of what was measured."""
    return "-" if numbers is None else f"{float(numbers.double().mean()):.3g} / {float(numbers.max()):.3g}"

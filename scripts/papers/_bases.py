"""Bases from calibration texts: the Static Subspace of *Online Subspace Projection for KV Caches*, or where its adaptive one begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from hf_kvcaches.codec.calibrate import measure
from hf_kvcaches.codec.moments import LayerStatistics, descending
from hf_kvcaches.codec.settings import Reading
from hf_kvcaches.subspace.paper.settings import Bases


def calibrate_bases(
    model: nn.Module, tokenizer: Any, texts: Iterable[str | Sequence[int]], *, rotation: Literal["aware", "post"] = "post", **reading: Any
) -> Bases:
    """Measure the main directions of each head, for `AdaptiveSubspace(rank=..., rotation=..., bases=..., chunk=None)`.

    Args:
        rotation: That of the `AdaptiveSubspace`.
        **reading: `block`, `batch_size`, `max_tokens` and `progress`; all else, too, is described in `KVCodec.calibrate`.
    """
    bases = {}
    for layer, sums in measure(model, tokenizer, texts, Reading(rotation=rotation, metric="plain", **reading)).sums.items():
        moment, dim = LayerStatistics.of(sums, "plain").in_shape(sums.shape._replace(group=1)).moment, sums.shape.key_dim
        bases[layer] = _singular(moment[:, :dim, :dim]), _singular(moment[:, dim:, dim:])
    return bases


def _singular(moment: torch.Tensor) -> torch.Tensor:
    """Return right singular vectors as rows, multiplied by their singular values, of a mean outer product, (heads, d, d)."""
    energies, directions = descending(moment)
    return energies.clamp_min(0.0).sqrt()[..., None] * directions

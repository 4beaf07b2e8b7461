"""Positions by axis: models that read images give an image's tokens a position on each axis, and text the same one on all.

Attention is called without these positions, so a cache layer can't tell the two apart.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.errors import UnsupportedError


def refuse_images(model: PreTrainedModel, cache: Cache, instead: str) -> None:
    """Refuses forward passes with this cache whose tokens have different positions on different axes, before they compute anything.

    Args:
        model: A model whose `RotaryGeometry` has `axes`.
        instead: What the user may do.
    """
    reference = weakref.ref(cache)

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids, given = kwargs.get("position_ids"), compat.cache_of(kwargs)
        if given is None or given is not reference() or ids is None or ids.ndim != 3 or torch.compiler.is_compiling():
            return
        axes = ids[-3:]  # Before the three there may be the index in the text.
        if not bool((axes == axes[:1]).all()):
            raise UnsupportedError(
                f"position_ids: image tokens have a position for each axis, and this cache moves tokens by one. {instead}"
            )

    before.only_observes = True  # type: ignore[attr-defined]
    handle = model.get_decoder().register_forward_pre_hook(before, with_kwargs=True)
    weakref.finalize(cache, handle.remove)

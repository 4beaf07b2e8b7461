"""Codecs of a tiny model, and tokens that are fed in chunks."""

from functools import cache
from typing import Any

import torch

from hf_kvcaches import KVCodec
from tests import tiny

# The bits of all directions, of a tenth of the bytes, and of none on some sides of a layer.
BITS = {"wide": 0.8, "few": 0.2, "fewest": 0.06}


@cache
def calibrated(rotation: str) -> KVCodec:
    texts = [tiny.ids(1, 96, seed=seed)[0].tolist() for seed in range(4)]
    return KVCodec.calibrate(tiny.llama(), None, texts, rotation=rotation, progress=False)


def pair(rotation: str = "aware", bits: str = "few") -> tuple[Any, KVCodec]:
    """A tiny grouped model in float32, and a codec for it."""
    return tiny.llama(), calibrated(rotation).at(BITS[bits])


def run(model: Any, given: Any, text: torch.Tensor, chunks: list[int], mask: torch.Tensor | None = None, start: int = 0) -> torch.Tensor:
    """Logits of the tokens from `start` on, fed in so many at a time."""
    logits = []
    with torch.no_grad():
        for tokens in chunks:
            stop, options = start + tokens, {}
            if mask is not None:
                options["attention_mask"] = mask[:, :stop]
                options["position_ids"] = (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:]
            logits.append(model(text[:, start:stop], past_key_values=given, **options).logits)
            start = stop
    return torch.cat(logits, 1)


def padded_anywhere() -> torch.Tensor:
    mask = torch.ones(4, 60, dtype=torch.long)
    mask[0, :11] = 0
    mask[1, 28:33] = 0
    mask[2, 3:50:4] = 0
    mask[2, 40:] = 0
    return mask

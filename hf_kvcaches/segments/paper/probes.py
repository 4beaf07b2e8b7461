"""The paper's online probe, section 3.4: are the stored keys of a segment's first tokens near those of the new context?"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.errors import whole_number
from hf_kvcaches.reuse.layer import PlainCache
from hf_kvcaches.reuse.partial import run_layers
from hf_kvcaches.reuse.policy import Admission, Match

# How many of a match's first tokens are compared.
TOKENS = 4


class ProbeRule:
    """A rule for `SegmentReuseCache(admit=...)`: reuse where the keys of a match's first tokens agree with computed ones.

    The lowest layers run over the prompt up to the match, which costs `(layer + 1) / layers` of the prefill before it: it tells whether
    a probe would have been right, and saves nothing where matches are far from the start.

    **Departs from the paper**: keys are compared by their cosine, and not the attention scores of a query over them.

    Args:
        model: The cache's.
        store: The cache's, whose codes are no keys: with a codec nothing can be compared.
        layer: Where keys are compared; those of layer 0 don't depend on the tokens before.
        threshold: The least mean cosine.
        repair: Share of an admitted match that is recomputed.
    """

    def __init__(self, model: PreTrainedModel, store: Any, layer: int = 1, threshold: float = 0.98, repair: float = 0.15) -> None:
        self.model, self.store, self.threshold, self.repair = model, store, threshold, repair
        self.layer = whole_number("layer", layer, 1, hint="The keys of layer 0 don't depend on the tokens before.")
        self.scores: list[float] = []

    @torch.no_grad()
    def __call__(self, match: Match) -> Admission:
        score = self.score(match)
        self.scores.append(score)
        if not score >= self.threshold:
            return Admission(reason=f"Its keys have a cosine of {score:.3f}, below {self.threshold:g}.")
        return Admission("probed", round(self.repair * len(match)))

    def score(self, match: Match) -> float:
        """Return the mean cosine of stored and computed keys; 0 where the stored ones can't be read."""
        piece = match.pieces[0]
        stop = match.start + min(TOKENS, piece.stop - piece.start)
        ids = torch.from_numpy(match.ids[:stop].astype("int64"))[None].to(compat.input_device(self.model))
        fresh = PlainCache(self.model)
        run_layers(self.model, 0, self.layer + 1, ids, fresh, torch.arange(stop, device=ids.device))
        computed = fresh.layers[self.layer].keys[0, :, match.start : stop].float().cpu()
        blob = self.store.load({piece.record.key: piece.record}).get(piece.record.key)
        if blob is None or piece.record.form["quantization"] is not None:
            return 0.0
        pile = next(number for number, members in enumerate(piece.record.form["piles"]) if self.layer in members)
        place = piece.record.form["piles"][pile].index(self.layer)
        stored = blob[f"keys.{pile}"][place, :, piece.offset : piece.offset + stop - match.start].float().cpu()
        geometry = fresh.rotation.layers[self.layer]
        if geometry.kind == "rope":
            stored = geometry.shift(stored[None], match.start - piece.position)[0]
        return float(torch.nn.functional.cosine_similarity(stored, computed, dim=-1).mean())

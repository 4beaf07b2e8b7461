"""What only the paper has: near-identical segments by MinHash over shingles of words (3.1), and the online probe of keys (3.4)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.errors import require, whole_number
from hf_kvcaches.reuse.index import Ids, Match, Piece, Record, TokenIndex
from hf_kvcaches.reuse.layer import PlainCache
from hf_kvcaches.reuse.partial import run_layers
from hf_kvcaches.reuse.plan import PROBING, PromptRow
from hf_kvcaches.reuse.policy import Admission
from hf_kvcaches.segments.cache import SegmentReuseCache

# Numbers in a signature; bands, and numbers in each: segments with a Jaccard similarity of 0.5 are a hit more often than not.
_PERMUTATIONS, _BANDS, _WIDTH = 64, 14, 4
# How many consecutive words form a shingle, and how many similar segments are compared token by token.
_SHINGLE, _COMPARED = 8, 3
_SHORTEST = 12  # the least number of tokens of a span that is reused from a near-identical segment
_PROBED = 4  # how many of a match's first tokens the probe compares
_WITH_DIGIT = re.compile(r"\b(?=\w*\d)[\w.:/+-]+")


def canonical(text: str) -> str:
    """Return a text in the form in which texts are compared: lower case, single spaces, all words with a digit equal."""
    return " ".join(_WITH_DIGIT.sub("0", text.lower()).split())


def signature_of(text: str) -> Any:
    """Return the MinHash of a text's shingles."""
    words = canonical(text).split(" ")
    shingles = {" ".join(words[start : start + _SHINGLE]) for start in range(max(1, len(words) - _SHINGLE + 1))}
    minhash = require("datasketch", "retrieval", "Looking for near-identical segments").MinHash(_PERMUTATIONS)
    minhash.update_batch([shingle.encode("utf-8", "surrogatepass") for shingle in sorted(shingles)])
    return minhash


class NearReuseCache(SegmentReuseCache):
    """A `SegmentReuseCache` that also looks for segments that differ from those of a prompt in a few words.

    Between verbatim runs, the prompt's own segments are compared with the signatures of all stored ones, which are made in each look-up.
    Only spans of equal tokens are reused.
    """

    def runs(self, index: TokenIndex, row: PromptRow, start: int) -> list[Match]:
        verbatim, ids = super().runs(index, row, start), row.ids[:-PROBING]
        datasketch = require("datasketch", "retrieval", "Looking for near-identical segments")
        lsh: Any = datasketch.MinHashLSH(num_perm=_PERMUTATIONS, params=(_BANDS, _WIDTH))
        fresh = {key: record for key, record in index.records.items() if record.fresh}
        signatures = {key: signature_of(self.discovery.text(record.ids.tolist())) for key, record in fresh.items()}
        for key, signature in signatures.items():
            lsh.insert(key, signature)
        found = list(verbatim)
        own = self.caller_spans[row.number] if self.caller_spans else []
        for first, last in self.discovery.spans(ids.tolist(), [(first, min(last, len(ids))) for first, last in own]):
            gaps = [gap for gap in _gaps(verbatim, max(first, start), last) if gap[1] - gap[0] >= _SHORTEST]
            if not gaps:
                continue
            signature = signature_of(self.discovery.text(ids[first:last].tolist()))
            near = sorted(lsh.query(signature), key=lambda key: (-signature.jaccard(signatures[key]), key))[:_COMPARED]
            for gap in gaps:
                candidates = [_aligned(ids, *gap, fresh[key]) for key in near]
                found += max(candidates, key=lambda candidate: sum(map(len, candidate)), default=[])
        return sorted(found, key=lambda match: match.start)


def _gaps(matches: Sequence[Match], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the spans from `start` to `stop` that no match covers."""
    for match in matches:
        if match.stop > start and match.start < stop:
            yield start, min(stop, match.start)
            start = max(start, match.stop)
    yield start, stop


def _aligned(ids: Ids, start: int, stop: int, record: Record) -> list[Match]:
    """Return the runs that a gap shares with a segment, token by token."""
    blocks = difflib.SequenceMatcher(None, record.ids.tolist(), ids[start:stop].tolist(), autojunk=False).get_matching_blocks()
    pieces = [Piece(start + block.b, start + block.b + block.size, record, block.a) for block in blocks if block.size >= _SHORTEST]
    return [Match((piece,), ids) for piece in pieces]


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
        stop = match.start + min(_PROBED, piece.stop - piece.start)
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

"""Near-identical segments, in which a date, an id or a word differs: MinHash over shingles of words, section 3.1 of the paper."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hf_kvcaches.errors import require
from hf_kvcaches.reuse.index import Ids, Match, Piece, Record, TokenIndex
from hf_kvcaches.reuse.plan import PROBING, PromptRow
from hf_kvcaches.segments.cache import SegmentReuseCache

# Numbers in a signature; bands, and numbers in each: segments with a Jaccard similarity of 0.5 are a hit more often than not.
_PERMUTATIONS, _BANDS, _WIDTH = 64, 14, 4
# How many consecutive words form a shingle, and how many similar segments are compared token by token.
_SHINGLE, _COMPARED = 8, 3
# The least number of tokens of a span that is reused from a near-identical segment.
_SHORTEST = 12
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

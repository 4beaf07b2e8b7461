"""MinHash signatures of segments, by which near-identical ones are found: those in which a date or an id differs."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_kvcaches.errors import require

Signature = npt.NDArray[np.uint32]

# Of datasketch's permutations: signatures of 32-bit numbers.
_SCHEME = "affine32"
# Numbers in a signature.
PERMUTATIONS = 64
# Bands and numbers in each: segments of a Jaccard similarity of 0.5 are found more likely than not.
BANDS, WIDTH = 14, 4
# Consecutive words that are one member of a segment's set.
SHINGLE = 8
# Timestamps, clock times, UUIDs and other words with digits in them.
_CHANGING = re.compile(r"\b(?=\w*\d)[\w.:/+-]+")


def canonical(text: str) -> str:
    """The text as it is compared, never as it is cached: lower case, single spaces, every word with a digit the same."""
    return " ".join(_CHANGING.sub("0", text.lower()).split())


def signature_of(text: str) -> Signature:
    """The MinHash of a text's shingles of words, (PERMUTATIONS,)."""
    words = canonical(text).split(" ")
    shingles = {" ".join(words[start : start + SHINGLE]) for start in range(max(1, len(words) - SHINGLE + 1))}
    minhash = _datasketch().MinHash(PERMUTATIONS, scheme=_SCHEME)
    minhash.update_batch([shingle.encode("utf-8", "surrogatepass") for shingle in sorted(shingles)])
    signature: Signature = minhash.hashvalues
    return signature


class SignatureIndex:
    """Keys by their signatures, on datasketch's locality-sensitive hashing in memory."""

    def __init__(self) -> None:
        self._lsh: Any = _datasketch().MinHashLSH(num_perm=PERMUTATIONS, params=(BANDS, WIDTH))

    def add(self, key: str, signature: Signature) -> None:
        """Adds a key that is not there."""
        self._lsh.insert(key, _minhash(signature))

    def remove(self, key: str) -> None:
        """Removes a key; an unknown one is ignored."""
        if key in self._lsh:
            self._lsh.remove(key)

    def near(self, signature: Signature) -> list[str]:
        """The keys whose signatures share a band with this one, in no order."""
        found: list[str] = self._lsh.query(_minhash(signature))
        return found


def require_signatures() -> None:
    """Raises a `MissingDependencyError` unless near-identical segments can be looked for."""
    _datasketch()


def _datasketch() -> Any:
    return require("datasketch", "retrieval", "Looking for near-identical segments")


def _minhash(signature: Signature) -> Any:
    return _datasketch().MinHash(PERMUTATIONS, scheme=_SCHEME, hashvalues=signature)

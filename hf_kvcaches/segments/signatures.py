"""MinHash signatures, by which near-identical segments are looked up."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_kvcaches.errors import require

Signature = npt.NDArray[np.uint32]

# datasketch's scheme of permutations: signatures of 32-bit numbers.
_SCHEME = "affine32"
# Numbers in a signature.
PERMUTATIONS = 64
# Bands, and numbers in each: segments with a Jaccard similarity of 0.5 are a hit more often than not.
BANDS, WIDTH = 14, 4
# How many consecutive words form a shingle, a member of a segment's set.
SHINGLE = 8
# Timestamps, UUIDs and other words with digits.
_WITH_DIGIT = re.compile(r"\b(?=\w*\d)[\w.:/+-]+")


def canonical(text: str) -> str:
    """Return a text in the form in which texts are compared: lower case, single spaces, all words with a digit equal."""
    return " ".join(_WITH_DIGIT.sub("0", text.lower()).split())


def signature_of(text: str) -> Signature:
    """Return the MinHash of a text's shingles, (PERMUTATIONS,)."""
    words = canonical(text).split(" ")
    shingles = {" ".join(words[start : start + SHINGLE]) for start in range(max(1, len(words) - SHINGLE + 1))}
    minhash = _datasketch().MinHash(PERMUTATIONS, scheme=_SCHEME)
    minhash.update_batch([shingle.encode("utf-8", "surrogatepass") for shingle in sorted(shingles)])
    signature: Signature = minhash.hashvalues
    return signature


class SignatureIndex:
    """Keys by their signatures, in datasketch's in-memory index for locality-sensitive hashing."""

    def __init__(self) -> None:
        self._lsh: Any = _datasketch().MinHashLSH(num_perm=PERMUTATIONS, params=(BANDS, WIDTH))

    def add(self, key: str, signature: Signature) -> None:
        """Add a key that is not there."""
        self._lsh.insert(key, _minhash(signature))

    def remove(self, key: str) -> None:
        """Remove a key, if it is there."""
        if key in self._lsh:
            self._lsh.remove(key)

    def near(self, signature: Signature) -> list[str]:
        """Return the keys whose signatures share a band with this one, in no order."""
        keys: list[str] = self._lsh.query(_minhash(signature))
        return keys


def require_signatures() -> None:
    """Raise a `MissingDependencyError` unless near-identical segments can be looked up."""
    _datasketch()


def _datasketch() -> Any:
    return require("datasketch", "retrieval", "Looking for near-identical segments")


def _minhash(signature: Signature) -> Any:
    return _datasketch().MinHash(PERMUTATIONS, scheme=_SCHEME, hashvalues=signature)

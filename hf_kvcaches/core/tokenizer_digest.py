"""The digest of a tokenizer for what is stored by token id."""

from __future__ import annotations

import hashlib
import json
import weakref
from array import array
from typing import Any

from hf_kvcaches.core.model_parts import digest_of_part, tokenizer_part

# The last digest of each tokenizer, with the state that it belongs to.
_digests: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


def digest_of_tokenizer(tokenizer: Any) -> str:
    """Return the digest of a tokenizer or processor: its whole vocabulary, special tokens and chat template.

    It is computed once for each tokenizer object, and again after tokens, special tokens or the chat template have changed. How a text is
    cut into tokens (normalizer, merges) is left out: keys and values are stored by token id, and another cut looks up other ids. To
    serialise 500,000 merges takes longer than to read the vocabulary.
    """
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None:
        return digest_of_part(tokenizer_part(tokenizer))
    state = (len(inner), inner.chat_template, inner.special_tokens_map)
    known = _digests.get(inner)
    if known is None or known[0] != state:
        content = [_vocabulary_digest(backend), *state]
        known = _digests[inner] = (state, hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest())
    return known[1]


def _vocabulary_digest(backend: Any) -> str:
    ids = list(range(backend.get_vocab_size()))
    tokens = list(map(backend.id_to_token, ids))
    if None in tokens:  # ids with gaps
        tokens, ids = map(list, zip(*sorted(backend.get_vocab().items(), key=lambda item: item[1]), strict=True))
    digest = hashlib.sha256(array("Q", ids).tobytes())
    # Lengths tell where one token ends and the next begins.
    digest.update(array("Q", map(len, tokens)).tobytes())
    digest.update("".join(tokens).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()

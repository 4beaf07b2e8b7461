"""The scope of segments: the model, adapters, tokenizer and format that they are bound to."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

from transformers import PreTrainedModel

from hf_kvcaches.core.identity import Identity
from hf_kvcaches.core.tokenizer_digest import digest_of_tokenizer
from hf_kvcaches.reuse.layout import Quantization, name_of
from hf_kvcaches.segments.discovery import Discovery

# The version of the format of stored segments.
FORMAT = 4


def scope_of(identity: Identity, model: PreTrainedModel, tokenizer: Any, quantization: Quantization) -> str:
    """Return a digest of everything that must be equal for a stored segment to be reused."""
    words = "" if tokenizer is None else digest_of_tokenizer(tokenizer)
    parts = (str(FORMAT), identity.digest, words, str(name_of(quantization)), str(model.dtype))
    return hashlib.blake2b("|".join(parts).encode(), digest_size=16).hexdigest()


def other_scopes(identity: Identity, model: PreTrainedModel, tokenizer: Any, quantization: Quantization) -> dict[str, str]:
    """Return what differs, as a sentence, by scopes of the same model that differ in one thing; by "" what can't be told of a scope."""
    scopes = {}
    if tokenizer is None:
        scopes[""] = (
            "This cache has no tokenizer, and segments stored with one are not its own: pass the tokenizer to all caches, or to none."
        )
    else:
        scope = scope_of(identity, model, None, quantization)
        scopes[scope] = "It has segments of this model that were stored without a tokenizer: pass the tokenizer to all caches, or to none."
    for other in (None, "int8", "int4"):
        if other != quantization:
            sentence = f"It has segments of this model that were stored with quantization={other!r}."
            scopes[scope_of(identity, model, tokenizer, other)] = sentence
    return scopes


_discoveries: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], Discovery]] = weakref.WeakKeyDictionary()
_without_tokenizer: dict[tuple[str, ...], Discovery] = {}


def discovery_for(tokenizer: Any, separators: tuple[str, ...]) -> Discovery:
    """Return the discovery of a tokenizer, which is shared because it caches the text of tokens."""
    discoveries = _without_tokenizer if tokenizer is None else _discoveries.setdefault(tokenizer, {})
    if separators not in discoveries:
        discoveries[separators] = Discovery(tokenizer, separators=separators)
    return discoveries[separators]

"""What segments are bound to: a model with its adapters and tokenizer."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

from transformers import PreTrainedModel

from hf_kvcaches.core.fingerprint import digest_of_tokenizer
from hf_kvcaches.core.identity import Identity, require_identity
from hf_kvcaches.core.splicing.packing import Quantization, name_of
from hf_kvcaches.segments.discovery import Discovery
from hf_kvcaches.segments.policy import SegmentPolicy

# Tokens of a stored segment: each one costs time to look up and to load, and what is alike inside of them is found anyway.
SHORTEST, LONGEST = 64, 128
# The format of what is stored; raised when older segments can't be read any more.
FORMAT = 3


def check_policy(model: PreTrainedModel, policy: SegmentPolicy) -> None:
    """Refuses a policy that was calibrated for another model. One without a fingerprint fits all models."""
    if policy.fingerprint is not None:
        policy.fingerprint.require_model(model, "The policy", here=require_identity(model, "The policy"))


_tokenizers: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()
_discoveries: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], Discovery]] = weakref.WeakKeyDictionary()


def scope_of(identity: Identity, model: PreTrainedModel, tokenizer: Any, quantization: Quantization, depth: int | None) -> str:
    """A digest of all that must be the same for a stored segment to be of use."""
    parts = (str(FORMAT), identity.digest, _tokenizer_name(tokenizer), str(name_of(quantization)), str(depth), str(model.dtype))
    return hashlib.blake2b("|".join(parts).encode(), digest_size=16).hexdigest()


def _tokenizer_name(tokenizer: Any) -> str:
    """Reading a tokenizer takes longer than a short prompt, so it is read again only where it has visibly changed."""
    if tokenizer is None:
        return ""
    state = (len(tokenizer), tokenizer.chat_template, tokenizer.special_tokens_map) if hasattr(tokenizer, "__len__") else None
    entry = _tokenizers.get(tokenizer)
    if state is None or entry is None or entry[0] != state:
        entry = _tokenizers[tokenizer] = (state, digest_of_tokenizer(tokenizer))
    return entry[1]


_without_tokenizer: dict[tuple[str, ...], Discovery] = {}


def discovery_for(tokenizer: Any, separators: tuple[str, ...]) -> Discovery:
    """One for each tokenizer, because it caches the text of tokens."""
    discoveries = _without_tokenizer if tokenizer is None else _discoveries.setdefault(tokenizer, {})
    if separators not in discoveries:
        discoveries[separators] = Discovery(tokenizer, separators=separators, shortest=SHORTEST, longest=LONGEST)
    return discoveries[separators]

"""The digest of a tokenizer: under it what depends on texts is stored."""

from __future__ import annotations

import weakref
from typing import Any

from hf_kvcaches.errors import ConfigError, require_tokenizer
from hf_kvcaches.kernels.checksum import hash_of

_digests: weakref.WeakKeyDictionary[Any, tuple[list[str], str]] = weakref.WeakKeyDictionary()


def tokenizer_parts(tokenizer: Any) -> dict[str, str]:
    """Return the digests of vocabulary, special tokens and chat template. How a text is cut is left out: all is stored by token id."""
    require_tokenizer(tokenizer)
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(inner, "get_vocab"):
        hint = "Pass what AutoTokenizer.from_pretrained returned."
        raise ConfigError.of("tokenizer", "a transformers tokenizer or processor", tokenizer, hint)
    special = {key: str(value) for key, value in inner.special_tokens_map.items()}
    parts = {"vocabulary": sorted(inner.get_vocab().items()), "special tokens": special, "chat template": inner.chat_template}
    return {name: hash_of(part) for name, part in parts.items()}


def digest_of_tokenizer(tokenizer: Any) -> str:
    """Return the digest of a tokenizer or processor, computed anew when tokens, special tokens or the template have changed."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    state = [str(getattr(inner, name, None)) for name in ("vocab_size", "added_tokens_decoder", "special_tokens_map", "chat_template")]
    if inner not in _digests or _digests[inner][0] != state:
        _digests[inner] = state, hash_of(tokenizer_parts(tokenizer))
    return _digests[inner][1]

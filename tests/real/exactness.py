"""Caches in settings that lose nothing, and how near to `DynamicCache` their logits must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from hf_kvcaches import EquipCache, GrowingCache, KVCache, SegmentReuseCache, SegmentStore, SubspaceCache, WarmStartCache, WarmStartLibrary
from hf_kvcaches.compat import GENERATE_CACHE

# On logits of float32, absolute: arithmetic in another order, and codes of 24 bits.
TOLERANCE = 2e-2
NEW_TOKENS = 8


@dataclass(frozen=True)
class Written:
    """What a model wrote greedily.

    Args:
        tokens: (rows, new tokens).
        logits: (rows, new tokens, vocabulary).
    """

    tokens: torch.Tensor
    logits: torch.Tensor


def segments(real: Any) -> Callable[[], KVCache]:
    """Caches that share a store of segments, which are kept as they are."""
    store = SegmentStore("memory", quantization=None)
    return lambda: SegmentReuseCache(real.model, store, real.tokenizer)


def warm_starts(real: Any) -> Callable[[], KVCache]:
    """Caches that share a library, which remembers prompts as they are and serves the same prompt or a common prefix."""
    library = WarmStartLibrary(real.model, real.tokenizer)
    return lambda: WarmStartCache(real.model, library, strategy="exact", remember=True)


# Each returns what makes a new cache for each request; what caches share is made once.
CACHES: dict[str, Callable[[Any], Callable[[], KVCache]]] = {
    "growing": lambda real: lambda: GrowingCache(real.model),
    "equip": lambda real: lambda: EquipCache(real.model, "streaming", budget=4096),
    "subspace": lambda real: lambda: SubspaceCache(real.model, real.lossless_codec),
    "segments": segments,
    "warmstart": warm_starts,
}


def full_cache(real: Any) -> KVCache:
    return DynamicCache(config=real.model.config)


def write(real: Any, inputs: Any, cache: Any = None, **options: Any) -> Written:
    """Generate greedily.

    Args:
        inputs: Of the tokenizer.
        cache: None for none.
        **options: For `generate`.
    """
    named = {} if cache is None else {GENERATE_CACHE: cache}
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = real.model.generate(**inputs, **settings | named | options)
    logits = torch.stack(output.logits, 1)
    return Written(output.sequences[:, -logits.shape[1] :], logits)


def encode(real: Any, texts: Sequence[str]) -> Any:
    """Rows padded on the left."""
    return real.tokenizer(list(texts), return_tensors="pt", padding=len(texts) > 1, return_token_type_ids=False)


def assert_same(actual: Written, expected: Written) -> None:
    """Compare the logits of each row up to the first token that differs, which must be one of a near tie."""
    for row, (mine, theirs) in enumerate(zip(actual.tokens.tolist(), expected.tokens.tolist(), strict=True)):
        same = next(
            (index for index, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), min(len(mine), len(theirs))
        )
        compared = slice(0, same + 1)
        distance = float((actual.logits[row, compared] - expected.logits[row, compared]).abs().max())
        assert distance <= TOLERANCE, f"row {row}: logits off by {distance:.1e}"
        if same < len(theirs):
            best = expected.logits[row, same].topk(2).values
            assert best[0] - best[1] <= 2 * TOLERANCE, f"row {row}: token {same} is another one, without a near tie"

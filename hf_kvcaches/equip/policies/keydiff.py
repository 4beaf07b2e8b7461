"""KeyDiff: keys that differ from the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from hf_kvcaches.equip.policies.base import Policy, count
from hf_kvcaches.equip.policies.tokens import Tokens


@dataclass(frozen=True)
class KeyDiffPolicy(Policy, built_in=True):
    """Keeps the tokens with the keys least similar to the mean direction of all keys.

    KeyDiff (Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference, arXiv 2504.15364): similar keys can replace each
    other. No attention is needed, and the score does not depend on the question.

    **Departs from the paper**: prompts are scored as a whole and not in blocks, decoded tokens `interval` at a time.

    Args:
        interval: Decode steps between two scorings.
    """

    name = "keydiff"
    interval: int = count(64, kw_only=True)

    def score(self, tokens: Tokens) -> torch.Tensor:
        keys = functional.normalize(tokens.keys.detach().float(), dim=-1)
        anchor = (keys * tokens.real[..., None]).sum(2, keepdim=True)
        return -functional.cosine_similarity(keys, anchor, dim=-1)

"""KeyDiff: keys that differ from the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from hf_kvcaches.equip.policies.base import PeriodicPolicy
from hf_kvcaches.equip.tokens import Tokens


@dataclass(frozen=True)
class KeyDiffPolicy(PeriodicPolicy):
    """Keeps the tokens whose keys point least where all keys point.

    KeyDiff (Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference, arXiv 2504.15364): keys that resemble each other hold
    each other's place. No attention is needed, and nothing is known of what is asked.

    **Departs from the paper**: scores in the paper's blocks only where the prompt is fed in chunks; decoded tokens are scored together.
    """

    name = "keydiff"

    def score(self, tokens: Tokens) -> torch.Tensor:
        keys = functional.normalize(tokens.keys.detach().float(), dim=-1)
        real = (tokens.positions >= 0).float()[..., None]
        anchor = (keys * real).sum(2, keepdim=True)
        return -functional.cosine_similarity(keys, anchor, dim=-1)

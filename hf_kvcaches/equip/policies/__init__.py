"""Policies: which tokens a pruned cache keeps."""

from hf_kvcaches.equip.policies.base import Policy, PressPolicy, policy_from_settings, resolve_policy
from hf_kvcaches.equip.policies.future import FuturePolicy, KVZipPolicy
from hf_kvcaches.equip.policies.published import (
    CompactorPolicy,
    ExpectedAttentionPolicy,
    H2OPolicy,
    KeyDiffPolicy,
    SnapKVPolicy,
    StreamingPolicy,
    TOVAPolicy,
)

__all__ = [
    "CompactorPolicy",
    "ExpectedAttentionPolicy",
    "FuturePolicy",
    "H2OPolicy",
    "KVZipPolicy",
    "KeyDiffPolicy",
    "Policy",
    "PressPolicy",
    "SnapKVPolicy",
    "StreamingPolicy",
    "TOVAPolicy",
    "policy_from_settings",
    "resolve_policy",
]

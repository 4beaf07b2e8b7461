"""Policies: which tokens a pruned cache keeps."""

from hf_kvcaches.equip.policies.base import Policy, policy_from_settings, resolve_policy
from hf_kvcaches.equip.policies.future import FuturePolicy, KVZipPolicy
from hf_kvcaches.equip.policies.queries import CompactorPolicy, ExpectedAttentionPolicy
from hf_kvcaches.equip.policies.simple import H2OPolicy, KeyDiffPolicy, PressPolicy, SnapKVPolicy, StreamingPolicy, TOVAPolicy

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

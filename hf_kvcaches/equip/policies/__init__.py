"""Policies: which tokens a pruned cache keeps."""

from __future__ import annotations

from hf_kvcaches.equip.policies.base import BUILT_IN, Policy, policy_from_settings, resolve_policy
from hf_kvcaches.equip.policies.compactor import CompactorPolicy
from hf_kvcaches.equip.policies.expected_attention import ExpectedAttentionPolicy
from hf_kvcaches.equip.policies.future import FuturePolicy
from hf_kvcaches.equip.policies.h2o import H2OPolicy
from hf_kvcaches.equip.policies.keydiff import KeyDiffPolicy
from hf_kvcaches.equip.policies.kvzip import KVZipPolicy
from hf_kvcaches.equip.policies.press import PressPolicy
from hf_kvcaches.equip.policies.snapkv import SnapKVPolicy
from hf_kvcaches.equip.policies.streaming import StreamingPolicy
from hf_kvcaches.equip.policies.tova import TOVAPolicy

__all__ = [
    "BUILT_IN",
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

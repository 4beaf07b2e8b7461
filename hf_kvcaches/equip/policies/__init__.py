"""Policies: which tokens a pruned cache keeps."""

from __future__ import annotations

from hf_kvcaches.equip.policies.base import BUILT_IN, PeriodicPolicy, Policy, policy_from_settings, resolve_policy
from hf_kvcaches.equip.policies.block import BlockPolicy
from hf_kvcaches.equip.policies.chunk import ChunkPolicy
from hf_kvcaches.equip.policies.compactor import CompactorPolicy
from hf_kvcaches.equip.policies.critical import CriticalPolicy
from hf_kvcaches.equip.policies.cur import CURPolicy
from hf_kvcaches.equip.policies.expected_attention import ExpectedAttentionPolicy
from hf_kvcaches.equip.policies.h2o import H2OPolicy
from hf_kvcaches.equip.policies.keydiff import KeyDiffPolicy
from hf_kvcaches.equip.policies.knorm import KeyNormPolicy
from hf_kvcaches.equip.policies.kvzip import KVZipPolicy
from hf_kvcaches.equip.policies.lagkv import LagKVPolicy
from hf_kvcaches.equip.policies.leverage import LeveragePolicy
from hf_kvcaches.equip.policies.press import PressPolicy
from hf_kvcaches.equip.policies.random import RandomPolicy
from hf_kvcaches.equip.policies.snapkv import SnapKVPolicy
from hf_kvcaches.equip.policies.streaming import StreamingPolicy
from hf_kvcaches.equip.policies.tova import TOVAPolicy

__all__ = [
    "BUILT_IN",
    "BlockPolicy",
    "CURPolicy",
    "ChunkPolicy",
    "CompactorPolicy",
    "CriticalPolicy",
    "ExpectedAttentionPolicy",
    "H2OPolicy",
    "KVZipPolicy",
    "KeyDiffPolicy",
    "KeyNormPolicy",
    "LagKVPolicy",
    "LeveragePolicy",
    "PeriodicPolicy",
    "Policy",
    "PressPolicy",
    "RandomPolicy",
    "SnapKVPolicy",
    "StreamingPolicy",
    "TOVAPolicy",
    "policy_from_settings",
    "resolve_policy",
]

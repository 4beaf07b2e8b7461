"""Policies: which tokens a pruned cache keeps."""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches.equip.policies.base import BUILT_IN, PeriodicPolicy, Policy
from hf_kvcaches.equip.policies.compactor import CompactorPolicy
from hf_kvcaches.equip.policies.cur import CURPolicy
from hf_kvcaches.equip.policies.expected_attention import ExpectedAttentionPolicy
from hf_kvcaches.equip.policies.h2o import H2OPolicy
from hf_kvcaches.equip.policies.keydiff import KeyDiffPolicy
from hf_kvcaches.equip.policies.knorm import KeyNormPolicy
from hf_kvcaches.equip.policies.lagkv import LagKVPolicy
from hf_kvcaches.equip.policies.leverage import LeveragePolicy
from hf_kvcaches.equip.policies.random import RandomPolicy
from hf_kvcaches.equip.policies.snapkv import SnapKVPolicy
from hf_kvcaches.equip.policies.streaming import StreamingPolicy
from hf_kvcaches.equip.policies.tova import TOVAPolicy
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_choice

__all__ = [
    "BUILT_IN",
    "CURPolicy",
    "CompactorPolicy",
    "ExpectedAttentionPolicy",
    "H2OPolicy",
    "KeyDiffPolicy",
    "KeyNormPolicy",
    "LagKVPolicy",
    "LeveragePolicy",
    "PeriodicPolicy",
    "Policy",
    "RandomPolicy",
    "SnapKVPolicy",
    "StreamingPolicy",
    "TOVAPolicy",
    "policy_from_settings",
    "resolve_policy",
]

_POLICIES: tuple[type[Policy], ...] = (
    StreamingPolicy,
    LeveragePolicy,
    CompactorPolicy,
    CURPolicy,
    KeyDiffPolicy,
    ExpectedAttentionPolicy,
    H2OPolicy,
    TOVAPolicy,
    SnapKVPolicy,
    LagKVPolicy,
    KeyNormPolicy,
    RandomPolicy,
)
BUILT_IN.update({policy.name: policy for policy in _POLICIES})


def resolve_policy(policy: str | Policy) -> Policy:
    """The policy of that name with its usual parameters, or the policy itself."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        swapped = "It is a model: model and policy seem to be swapped." if isinstance(policy, torch.nn.Module) else ""
        hint = "Pass an object, not its class." if isinstance(policy, type) and issubclass(policy, Policy) else swapped
        raise ConfigError.of("policy", "the name of a policy, or a Policy object", policy, hint)
    require_choice("policy", policy, BUILT_IN, also=", or a Policy object")
    return BUILT_IN[policy]()


def policy_from_settings(settings: dict[str, Any]) -> Policy:
    """The policy that `Policy.settings` described."""
    parameters = dict(settings)
    name = parameters.pop("policy", None)
    if name not in BUILT_IN:
        known = ", ".join(BUILT_IN)
        why = f"policy: {name!r} is none of this package's ({known}), and a file does not bring the code of another."
        raise UnsupportedError(f"{why} Keep such a cache in memory.")
    return BUILT_IN[name](**parameters)

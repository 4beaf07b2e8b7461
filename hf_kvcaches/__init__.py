"""KV-cache methods as drop-in caches for transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_kvcaches.version import __version__ as __version__

if TYPE_CHECKING:
    from hf_kvcaches.codec.codec import KVCodec
    from hf_kvcaches.core.attention import disable, enable
    from hf_kvcaches.core.cache import KVCache
    from hf_kvcaches.core.fingerprint import ModelFingerprint, set_fingerprint
    from hf_kvcaches.core.growing import GrowingCache
    from hf_kvcaches.core.layers import KVLayer
    from hf_kvcaches.core.per_call import per_call
    from hf_kvcaches.core.report import CacheReport
    from hf_kvcaches.core.rope import RotaryGeometry
    from hf_kvcaches.equip.budgets import pyramid_budgets
    from hf_kvcaches.equip.cache import EquipCache
    from hf_kvcaches.equip.pages import PagePool
    from hf_kvcaches.equip.policies import (
        CompactorPolicy,
        CURPolicy,
        ExpectedAttentionPolicy,
        H2OPolicy,
        KeyDiffPolicy,
        KeyNormPolicy,
        LagKVPolicy,
        LeveragePolicy,
        Policy,
        RandomPolicy,
        SnapKVPolicy,
        StreamingPolicy,
        TOVAPolicy,
    )
    from hf_kvcaches.equip.query_statistics import QueryStatistics
    from hf_kvcaches.equip.retrieval_heads import RetrievalHeads
    from hf_kvcaches.errors import (
        ArtifactError,
        ConfigError,
        FingerprintMismatch,
        KVCacheError,
        MissingDependencyError,
        PoolExhausted,
        UnsupportedError,
    )
    from hf_kvcaches.evaluate.verify import VerifyReport, verify
    from hf_kvcaches.segments.cache import SegmentReuseCache
    from hf_kvcaches.segments.policy import SegmentPolicy
    from hf_kvcaches.segments.store import SegmentStore
    from hf_kvcaches.subspace.adaptive.settings import AdaptiveSubspace
    from hf_kvcaches.subspace.cache import SubspaceCache
    from hf_kvcaches.translate.cache import TranslatedCache
    from hf_kvcaches.translate.codes import ArrivingCodes, SemanticCodes
    from hf_kvcaches.translate.config import TranslatorConfig
    from hf_kvcaches.translate.translator import CacheTranslator
    from hf_kvcaches.warmstart.cache import WarmStartCache
    from hf_kvcaches.warmstart.gate import WarmStartGate
    from hf_kvcaches.warmstart.library import WarmStartLibrary
    from hf_kvcaches.warmstart.summaries.adapters import TrainedAdapters
    from hf_kvcaches.warmstart.summaries.projector import SlotProjector

# Public name -> the module that has it. Nothing is imported before it is asked for.
_HOMES = {
    "enable": "core.attention",
    "disable": "core.attention",
    "KVCache": "core.cache",
    "KVCodec": "codec.codec",
    "KVLayer": "core.layers",
    "per_call": "core.per_call",
    "CacheReport": "core.report",
    "GrowingCache": "core.growing",
    "ModelFingerprint": "core.fingerprint",
    "set_fingerprint": "core.fingerprint",
    "RotaryGeometry": "core.rope",
    "verify": "evaluate.verify",
    "VerifyReport": "evaluate.verify",
    "EquipCache": "equip.cache",
    "PagePool": "equip.pages",
    "pyramid_budgets": "equip.budgets",
    "Policy": "equip.policies",
    "StreamingPolicy": "equip.policies",
    "LeveragePolicy": "equip.policies",
    "CompactorPolicy": "equip.policies",
    "CURPolicy": "equip.policies",
    "KeyDiffPolicy": "equip.policies",
    "ExpectedAttentionPolicy": "equip.policies",
    "H2OPolicy": "equip.policies",
    "TOVAPolicy": "equip.policies",
    "SnapKVPolicy": "equip.policies",
    "LagKVPolicy": "equip.policies",
    "KeyNormPolicy": "equip.policies",
    "RandomPolicy": "equip.policies",
    "QueryStatistics": "equip.query_statistics",
    "RetrievalHeads": "equip.retrieval_heads",
    "SegmentPolicy": "segments.policy",
    "SegmentReuseCache": "segments.cache",
    "SegmentStore": "segments.store",
    "AdaptiveSubspace": "subspace.adaptive.settings",
    "SubspaceCache": "subspace.cache",
    "ArrivingCodes": "translate.codes",
    "CacheTranslator": "translate.translator",
    "SemanticCodes": "translate.codes",
    "TranslatedCache": "translate.cache",
    "TranslatorConfig": "translate.config",
    "SlotProjector": "warmstart.summaries.projector",
    "TrainedAdapters": "warmstart.summaries.adapters",
    "WarmStartCache": "warmstart.cache",
    "WarmStartGate": "warmstart.gate",
    "WarmStartLibrary": "warmstart.library",
    "KVCacheError": "errors",
    "ConfigError": "errors",
    "UnsupportedError": "errors",
    "FingerprintMismatch": "errors",
    "ArtifactError": "errors",
    "MissingDependencyError": "errors",
    "PoolExhausted": "errors",
}

__all__ = [
    "AdaptiveSubspace",
    "ArrivingCodes",
    "ArtifactError",
    "CURPolicy",
    "CacheReport",
    "CacheTranslator",
    "CompactorPolicy",
    "ConfigError",
    "EquipCache",
    "ExpectedAttentionPolicy",
    "FingerprintMismatch",
    "GrowingCache",
    "H2OPolicy",
    "KVCache",
    "KVCacheError",
    "KVCodec",
    "KVLayer",
    "KeyDiffPolicy",
    "KeyNormPolicy",
    "LagKVPolicy",
    "LeveragePolicy",
    "MissingDependencyError",
    "ModelFingerprint",
    "PagePool",
    "Policy",
    "PoolExhausted",
    "QueryStatistics",
    "RandomPolicy",
    "RetrievalHeads",
    "RotaryGeometry",
    "SegmentPolicy",
    "SegmentReuseCache",
    "SegmentStore",
    "SemanticCodes",
    "SlotProjector",
    "SnapKVPolicy",
    "StreamingPolicy",
    "SubspaceCache",
    "TOVAPolicy",
    "TrainedAdapters",
    "TranslatedCache",
    "TranslatorConfig",
    "UnsupportedError",
    "VerifyReport",
    "WarmStartCache",
    "WarmStartGate",
    "WarmStartLibrary",
    "disable",
    "enable",
    "per_call",
    "pyramid_budgets",
    "set_fingerprint",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

"""KV-cache methods as drop-in caches for transformers."""

from __future__ import annotations

import importlib
from typing import Any

from hf_kvcaches.version import __version__ as __version__

# Module -> the public names that it has. Nothing is imported before it is asked for. `__init__.pyi` says the same to type checkers.
_PUBLIC = {
    "core.view": "enable disable",
    "core.cache": "KVCache per_call",
    "codec.codec": "KVCodec",
    "core.layers": "KVLayer",
    "core.report": "CacheReport",
    "core.holder": "GrowingCache",
    "core.fingerprint": "ModelFingerprint set_fingerprint",
    "core.rope": "RotaryGeometry",
    "evaluate.verify": "verify VerifyReport",
    "equip.cache": "EquipCache",
    "equip.pages": "PagePool",
    "equip.budgets": "pyramid_budgets",
    "equip.policies": "Policy FuturePolicy KVZipPolicy StreamingPolicy H2OPolicy TOVAPolicy SnapKVPolicy CompactorPolicy "
    "ExpectedAttentionPolicy KeyDiffPolicy",
    "equip.calibrated": "HeadBudgets KeepProbe QueryStatistics",
    "reuse.policy": "SegmentPolicy",
    "segments.cache": "SegmentReuseCache",
    "segments.store": "SegmentStore",
    "subspace.paper.settings": "AdaptiveSubspace",
    "subspace.cache": "SubspaceCache",
    "translate.codes": "ArrivingCodes SemanticCodes",
    "translate.translator": "CacheTranslator",
    "translate.cache": "TranslatedCache",
    "translate.fit": "TranslatorConfig",
    "warmstart.paper.maps": "SlotProjector TrainedAdapters",
    "warmstart.cache": "WarmStartCache",
    "warmstart.gate": "WarmStartGate",
    "warmstart.library": "WarmStartLibrary",
    "errors": "KVCacheError ConfigError UnsupportedError FingerprintMismatch ArtifactError MissingDependencyError PoolExhausted",
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

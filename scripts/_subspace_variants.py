"""Which caches `eval_subspace.py` compares, one line each, and what it makes them from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from transformers import Cache, DynamicCache

from hf_kvcaches.core.report import measured_bytes
from hf_kvcaches.subspace.adaptive import AdaptiveSubspace
from hf_kvcaches.subspace.bases import SubspaceBases
from hf_kvcaches.subspace.cache import SubspaceCache

FULL = "full cache"
Window = tuple[int, int]
NONE: Window = (0, 0)
ENDS: Window = (4, 64)
NAMES = "variant mode rotation metric gamma share rule coefficients sinks recent bytes_ratio".split()


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to keep a text."""

    name: str  # what tables call it
    mode: Literal["full", "static", "adaptive"]  # which of the caches
    options: Mapping[str, Any] = field(default_factory=dict)  # of `SubspaceBases.calibrate`, or of `AdaptiveSubspace`
    windows: tuple[Window, ...] = (NONE,)  # with which (sinks, recent) it is measured
    coefficients: Literal["int8"] | None = None  # of `SubspaceCache`
    quick: bool = False  # whether `--quick` takes it along


def _static(name: str, *windows: Window, int8: bool = False, quick: bool = False, **bases: Any) -> Variant:
    return Variant(name, "static", bases, windows or (NONE,), "int8" if int8 else None, quick)


def _adaptive(name: str, *windows: Window, int8: bool = False, quick: bool = False, **options: Any) -> Variant:
    return Variant(name, "adaptive", options, windows or (NONE,), "int8" if int8 else None, quick)


# Ratios of 0.34, and of 0.33 in 8 bits, are those that stay below 0.375 and 0.20 with bases, scales, window and reserve.
VARIANTS = (
    Variant(FULL, "full", quick=True),
    _static("aware 0.125", NONE, ENDS, bytes_ratio=0.125),
    _static("aware 0.1875", NONE, ENDS, bytes_ratio=0.1875),
    _static("aware 0.25", NONE, ENDS, bytes_ratio=0.25),
    _static("aware 0.34", NONE, ENDS, bytes_ratio=0.34, quick=True),
    _static("aware 0.375", NONE, ENDS, bytes_ratio=0.375),
    _static("aware 0.5", NONE, ENDS, bytes_ratio=0.5),
    _static("aware 0.25 int8", ENDS, bytes_ratio=0.25, int8=True),
    _static("aware 0.33 int8", NONE, ENDS, bytes_ratio=0.33, int8=True, quick=True),
    _static("aware 0.5 int8", ENDS, bytes_ratio=0.5, int8=True),
    _static("aware 0.66 int8", bytes_ratio=0.66, int8=True),
    _static("aware 0.1875 loss metric", NONE, ENDS, bytes_ratio=0.1875, metric="loss"),
    _static("aware 0.25 loss metric", NONE, ENDS, bytes_ratio=0.25, metric="loss"),
    _static("aware 0.34 loss metric", NONE, ENDS, bytes_ratio=0.34, metric="loss"),
    _static("aware 0.35 loss metric", bytes_ratio=0.35, metric="loss"),
    _static("aware 0.375 loss metric", NONE, ENDS, bytes_ratio=0.375, metric="loss"),
    _static("aware 0.33 int8 loss metric", NONE, ENDS, bytes_ratio=0.33, int8=True, metric="loss"),
    _static("aware 0.34 plain metric", bytes_ratio=0.34, metric="plain"),
    _static("aware 0.34 gamma one", bytes_ratio=0.34, gamma="one"),
    _static("aware 0.34 gamma paper", bytes_ratio=0.34, gamma="paper"),
    _static("aware 0.34 shared by layer", bytes_ratio=0.34, share="layer"),
    _static("aware 16, 16", rank=(16, 16)),
    _static("aware 16, 32", rank=(16, 32)),
    _static("aware 32, 32", rank=(32, 32)),
    _static("post 0.25", bytes_ratio=0.25, rotation="post"),
    _static("post 0.34", NONE, ENDS, bytes_ratio=0.34, rotation="post", quick=True),
    _static("post 0.5", bytes_ratio=0.5, rotation="post"),
    _static("paper 16, 16", rank=(16, 16), rotation="post", metric="plain", gamma="paper"),
    _static("paper 32, 32", rank=(32, 32), rotation="post", metric="plain", gamma="paper"),
    # 0.30 and 0.29 have the bytes of static 0.34 without and with a window, sketches included.
    _adaptive("adaptive 0.34", NONE, ENDS, bytes_ratio=0.34),
    _adaptive("adaptive 0.30", bytes_ratio=0.30),
    _adaptive("adaptive 0.29", ENDS, bytes_ratio=0.29),
    _adaptive("adaptive 0.25 int8", ENDS, bytes_ratio=0.25, int8=True),
    _adaptive("adaptive 32, 32", rank=(32, 32)),
    _adaptive("adaptive 0.34 lookahead 64", bytes_ratio=0.34, lookahead=64),
    _adaptive("adaptive 0.34 fd", bytes_ratio=0.34, sketch="fd"),
    _adaptive("adaptive 0.34 decay 0.5", bytes_ratio=0.34, decay=0.5),
    _adaptive("adaptive 0.34 plain metric", bytes_ratio=0.34, metric="plain"),
    _adaptive("adaptive post 0.34", bytes_ratio=0.34, rotation="post"),
)
MODES = ("static", "adaptive")  # what there are bars for


@dataclass(frozen=True)
class Run:
    """A variant with one window."""

    variant: Variant
    window: Window

    def __str__(self) -> str:
        return self.variant.name if self.variant.mode == "full" else f"{self.variant.name} [{self.window[0]}+{self.window[1]}]"


def runs_of(names: Sequence[str] | None, quick: bool) -> list[Run]:
    """All runs, or those of the named variants; the full cache is always the first."""
    chosen = [each for each in VARIANTS if each.mode == "full" or (each.name in names if names else each.quick or not quick)]
    return [Run(each, window) for each in chosen for window in each.windows]


class Workshop:
    """Makes caches for a model, and calibrates each kind of bases once."""

    def __init__(self, model: Any, texts: Sequence[list[int]], block: int, bytes_tokens: int) -> None:
        self.model, self.texts, self.block, self.bytes_tokens = model, texts, block, bytes_tokens
        self._bases: dict[tuple[Any, ...], SubspaceBases] = {}
        self._sizes: dict[Run, int] = {}
        self._half: Any = None

    def bases(self, options: Mapping[str, Any]) -> SubspaceBases:
        key = tuple(sorted(options.items()))
        if key not in self._bases:
            self._bases[key] = SubspaceBases.calibrate(
                self.model, None, self.texts, block=self.block, batch_size=4, progress=False, **options
            )
        return self._bases[key]

    def make(self, run: Run, model: Any = None) -> Cache:
        """An empty cache; for a copy of the model if one is given."""
        variant, (sinks, recent) = run.variant, run.window
        if variant.mode == "full":
            return DynamicCache(config=self.model.config)
        if variant.mode == "adaptive":
            adaptive = AdaptiveSubspace(**variant.options)
            return SubspaceCache(model or self.model, adaptive=adaptive, sinks=sinks, recent=recent, coefficients=variant.coefficients)
        bases = self.bases(variant.options)
        if model is not None:
            bases = replace(bases, fingerprint=None)  # another dtype is another fingerprint
        return SubspaceCache(model or self.model, bases, sinks=sinks, recent=recent, coefficients=variant.coefficients)

    def bytes_ratio(self, run: Run) -> float:
        """The bytes of all tensors of the cache, bases and scales included, over those of the full cache, in half precision."""
        whole = self._bytes(Run(VARIANTS[0], NONE))
        return self._bytes(run) / whole

    def _bytes(self, run: Run) -> int:
        if run not in self._sizes:
            model = self._in_half()
            cache = self.make(run, model)
            ids = torch.tensor([(self.texts[0] * (self.bytes_tokens // len(self.texts[0]) + 1))[: self.bytes_tokens]])
            with torch.no_grad():
                model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
            if run.variant.mode == "full":
                tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
            else:
                tensors = list(cache.owned_tensors().values())
            self._sizes[run] = measured_bytes(tensors)
        return self._sizes[run]

    def _in_half(self) -> Any:
        # Bytes do not depend on the weights, so that these need not be copied.
        if self._half is None:
            half = self.model.dtype.itemsize == 2
            self._half = self.model if half else type(self.model)(self.model.config).to(self.model.device, torch.bfloat16).eval()
        return self._half

    def columns(self, run: Run) -> dict[str, Any]:
        """What the files say of a run."""
        variant = run.variant
        if variant.mode == "full":
            return {"variant": variant.name, "mode": "full", "bytes_ratio": 1.0}
        gamma = "calibrated" if variant.mode == "static" else "one"
        options = {"rotation": "aware", "metric": "attention", "gamma": gamma, "share": "head", **variant.options}
        rule = next(f"{name}={variant.options[name]}" for name in ("rank", "energy", "bytes_ratio") if name in variant.options)
        return {
            "variant": variant.name,
            "mode": variant.mode,
            **{name: options[name] for name in ("rotation", "metric", "gamma", "share")},
            "rule": rule,
            "coefficients": variant.coefficients or "",
            "sinks": run.window[0],
            "recent": run.window[1],
            "bytes_ratio": round(self.bytes_ratio(run), 5),
        }

"""`SubspaceCache`: attention over coefficients in low-dimensional subspaces."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, Self

import torch

from hf_kvcaches.core.answerable import require_all_heads
from hf_kvcaches.core.answering import AnsweringCache
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_choice, require_instance, whole_number
from hf_kvcaches.kernels.launch import BACKENDS
from hf_kvcaches.subspace.adaptive import AdaptiveSubspace
from hf_kvcaches.subspace.adaptive_layer import NEEDS_QUERIES, AdaptiveLayer
from hf_kvcaches.subspace.bases import SubspaceBases
from hf_kvcaches.subspace.diagnostics import SubspaceDiagnostics, measure
from hf_kvcaches.subspace.layer import SubspaceLayer
from hf_kvcaches.subspace.maps import LayerSource
from hf_kvcaches.subspace.static import StaticLayer
from hf_kvcaches.subspace.store import StoreSettings
from hf_kvcaches.subspace.warming import SharedBudget


class SubspaceCache(AnsweringCache):
    """Keeps a few coefficients of each key and value, in bases that were calibrated for each head or follow the text, and attends to these.

    Online Subspace Projection for KV Caches: Training-Free Low-Rank Attention at Inference Time. Logits are products of the coefficients
    with the projected query; the weighted sum of value coefficients is taken back to the head's dimensions once.

    **Departs from the paper**: bases are those of keys before rotation unless calibrated otherwise, fitted where attention feels the
    error, with ranks of their own for each head; the first `sinks` and the last `recent` tokens are exact (both may be 0). A prompt attends
    exactly to itself.

    **Refuses**: models that do not ask this package's attention; ready masks that differ by head; position biases; taking back tokens that
    were not recorded (`activate_past_recording`) once the window has moved on; `torch.compile` (`is_compileable` is False).

    **Memory per token**: the sum of all heads' ranks, for keys and for values, times bytes per element (1 with `coefficients="int8"`, and a
    scale for 16 tokens of a head); a fixed number of exact tokens and the bases, which caches of one model share, besides. Adaptive bases
    and their sketches belong to a row.

    Args:
        model: A transformers model.
        bases: Made for it by `SubspaceBases.calibrate`.
        adaptive: In place of `bases`: find them in the text.
        sinks: First tokens of each row that stay exact.
        recent: Newest tokens that stay exact.
        coefficients: "int8" for 8 bits with a scale for each tile; None for the model's own precision.
        bases_dtype: Of the bases; None for the model's own.
        backend: Of the kernels: "auto", "torch", "triton" or "reference".
        shadow: Keep all tokens exactly, too, so that `diagnostics` can measure errors. That takes more memory than a full cache.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    needs_attention = True

    def __init__(
        self,
        model: Any,
        bases: SubspaceBases | None = None,
        *,
        adaptive: AdaptiveSubspace | None = None,
        sinks: int = 4,
        recent: int = 64,
        coefficients: Literal["int8"] | None = None,
        bases_dtype: torch.dtype | None = None,
        backend: Literal["auto", "torch", "triton", "reference"] = "auto",
        shadow: bool = False,
        offloading: bool = False,
    ) -> None:
        if (bases is None) == (adaptive is None):
            got = "none" if bases is None else "both"
            raise ConfigError.of("bases, adaptive", "one of them", got, "SubspaceBases.calibrate makes bases for a model.")
        if bases is not None:
            hint = "SubspaceBases.calibrate makes one for a model."
            require_instance("bases", bases, SubspaceBases, {"model": model, "adaptive": adaptive}, hint)
        if adaptive is not None:
            require_instance("adaptive", adaptive, AdaptiveSubspace, {"model": model}, "Try AdaptiveSubspace(rank=(16, 32)).")
        sinks = whole_number("sinks", sinks, 0, "a number of tokens, 0 or more")
        recent = whole_number("recent", recent, 0, "a number of tokens, 0 or more")
        require_choice("coefficients", coefficients, (None, "int8"))
        require_choice("backend", backend, BACKENDS)
        if bases_dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ConfigError.of("bases_dtype", "None, or torch.float16, bfloat16, float32 or float64", bases_dtype)
        if adaptive is None or adaptive.rank is None or adaptive.metric != "plain":
            instead = "Use AdaptiveSubspace with rank= and metric='plain', or EquipCache."
            require_all_heads(model, "SubspaceCache with these settings", instead)
        self.bases, self.adaptive = bases, adaptive
        self._settings = StoreSettings(sinks, recent, coefficients, bases_dtype, backend, bool(shadow))
        self._budget: SharedBudget | None = None
        super().__init__(model, offloading=offloading)
        if bases is not None:
            bases.require_model(model)

    def make_layer(self, layer_idx: int) -> SubspaceLayer:
        if self.adaptive is not None:
            self._check_rank(layer_idx)
            geometry = self._geometry(layer_idx, self.adaptive.rotation, "adaptive", "Use rotation='post'.")
            if self._budget is None:
                self._budget = SharedBudget(self.adaptive)
            return AdaptiveLayer(self._settings, self.adaptive, geometry, self.passes, self.config, self._budget)
        assert self.bases is not None
        own = self.bases.layers[layer_idx] if layer_idx < len(self.bases.layers) else None
        if own is None:
            raise ConfigError.of("bases", f"bases for layer {layer_idx}", f"{len(self.bases.layers)} layers", "Calibrate with this model.")
        geometry = self._geometry(layer_idx, self.bases.settings.rotation, "bases", "Calibrate with rotation='post'.")
        return StaticLayer(self._settings, self._source(layer_idx, own), geometry, self.passes, self.config)

    def _check_rank(self, layer_idx: int) -> None:
        """Refuses ranks above the size of a head, as far as the config tells it."""
        sizes, rank = head_sizes(self.config, layer_idx), self.adaptive.rank if self.adaptive is not None else None
        if isinstance(rank, tuple) and sizes is not None and (rank[0] > sizes[0] or rank[1] > sizes[1]):
            raise ConfigError.of("rank", f"1 to {sizes[0]} for keys and 1 to {sizes[1]} for values, the model's head size", rank)

    def _geometry(self, layer_idx: int, rotation: str, argument: str, hint: str) -> RotaryGeometry | None:
        """How a layer's keys are rotated where bases are for keys before that, else None."""
        if rotation != "aware":
            return None
        geometry = RotaryGeometry.from_config(self.config, layer_idx=layer_idx)
        if geometry.kind in ("learned", "none"):
            return None
        if geometry.kind != "rope" or geometry.refusal is not None:
            why = geometry.refusal or f"its config does not say how its keys carry positions (kind {geometry.kind!r})"
            raise UnsupportedError(f"{argument}: {why}. {hint}")
        return geometry

    def adopt_refused(self, window: int = 0) -> str:
        return "" if self.adaptive is None or self.adaptive.metric == "plain" else NEEDS_QUERIES

    def diagnostics(self) -> SubspaceDiagnostics:
        """What is lost by keeping only coefficients, of each layer and head: see `LayerDiagnostics` for what is measured where.

        Fields are tensors; printed, it is a table.
        """
        return SubspaceDiagnostics(tuple(measure(layer) if isinstance(layer, SubspaceLayer) else None for layer in self.layers))

    def settings(self) -> dict[str, Any]:
        own = self._settings
        dtype = None if own.bases_dtype is None else str(own.bases_dtype).removeprefix("torch.")
        options = {"sinks": own.sinks, "recent": own.recent, "coefficients": own.coefficients, "backend": own.backend, "shadow": own.shadow}
        made_from = {"adaptive": asdict(self.adaptive)} if self.bases is None and self.adaptive is not None else {}
        if self.bases is not None:
            made_from = {"bases": self.bases.metadata()}
        return options | {"bases_dtype": dtype} | made_from

    def shared_state(self) -> dict[str, torch.Tensor]:
        return {} if self.bases is None else self.bases.tensors()

    @classmethod
    def rebuild(cls, model: Any, settings: dict[str, Any], shared: dict[str, torch.Tensor]) -> Self:
        options = dict(settings)
        dtype = options.pop("bases_dtype")
        if "adaptive" in options:
            options["adaptive"] = AdaptiveSubspace(**options["adaptive"])
        else:
            options["bases"] = SubspaceBases.restore(shared, options["bases"])
        return cls(model, bases_dtype=None if dtype is None else getattr(torch, dtype), **options)

    def _source(self, layer_idx: int, own: Any) -> LayerSource:
        # Caches of one model share the bases on its device.
        assert self.bases is not None
        shared: dict[int, LayerSource] = self.bases.__dict__.setdefault("_sources", {})
        return shared.setdefault(layer_idx, LayerSource(own))

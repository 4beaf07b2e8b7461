"""`SegmentPolicy`: when a segment may be reused behind another text, measured for a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.hub import Artifact, markdown_table
from hf_kvcaches.errors import ConfigError, is_number, whole_number

RepairBy = Literal["first", "deviation"]

_RANGES = (
    ("similarity", 0.0, 1.01, "0 repairs everything without a probe, 1.01 nothing."),
    ("probe", -1.0, 1.01, "-1 lets every probed segment pass, 1.01 none."),
    ("probing", 0.0, 1.0, "0.02 lets probes cost a fiftieth of a prefill."),
    ("repair", 0.0, 1.0, "0.15 runs three tokens of twenty again."),
    ("repair_depth", 0.0, 1.0, "0.5 runs them through the lower half of the layers, 1 through all."),
)


@dataclass(frozen=True)
class SegmentPolicy(Artifact):
    """When segments are reused behind another text: guards, thresholds and the share of tokens to repair.

    Without calibration the guards are the paper's, scaled to the model's depth, and the other thresholds are strict guesses.

    Args:
        guard: Pairs (share of the layers, tokens): that share of the lowest layers is reused unrepaired for tokens behind that many equal
            tokens. Layers above the last pair require all tokens before to be equal.
        similarity: The least Jaccard similarity of the shingles of a segment's surroundings for it to be repaired without a probe.
        probe: The least cosine between the attention scores over cached and over fresh keys for a probed segment to be reused.
        check_layer: The layer at which keys are compared, for probes and for `repair_by="deviation"`.
        probing: The most that all probes of a prompt may cost, as a share of its prefill; the longest segments are probed.
        repair: Share of a segment's tokens that are recomputed in the new context.
        repair_depth: Share of the layers that recompute these tokens: the lowest ones. The others reuse them.
        repair_by: Which tokens: the `"first"` ones, or those whose keys deviate most at `check_layer` (`"deviation"`).
        shortest: The least number of tokens of a span that is reused behind another text.
        aligned: The least number of tokens of a span that is reused from a near-identical segment.
        bound: The bound on the mean KL divergence that calibration kept, in nats; None without calibration.
        measured: One dict of settings and measurements for each setting that was tried.
    """

    artifact_type: ClassVar[str] = "segment-policy"
    format_version: ClassVar[int] = 1

    guard: tuple[tuple[float, int], ...] = ((0.03125, 128), (0.25, 512))
    similarity: float = 0.9
    probe: float = 0.98
    check_layer: int = 1
    probing: float = 0.02
    repair: float = 0.15
    repair_depth: float = 1.0
    repair_by: RepairBy = "first"
    shortest: int = 16
    aligned: int = 12
    bound: float | None = None
    measured: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name, low, high, hint in _RANGES:
            value = getattr(self, name)
            if not is_number(value) or not low <= value <= high:
                raise ConfigError.of(name, f"a number from {low} to {high}", value, hint)
        counted = "It counts tokens."
        hints = {"check_layer": "The keys of layer 0 don't depend on the tokens before.", "shortest": counted, "aligned": counted}
        for name, hint in hints.items():
            value = getattr(self, name)
            object.__setattr__(self, name, whole_number(name, value, 1, hint=hint))
        if self.repair_by not in ("first", "deviation"):
            raise ConfigError.of("repair_by", "'first' or 'deviation'", self.repair_by, "'first' compares no keys.")
        if self.bound is not None and not (is_number(self.bound) and self.bound >= 0):
            raise ConfigError.of("bound", "a number of nats of at least 0, or None", self.bound, "Calibration sets it.")
        object.__setattr__(self, "guard", _guard(self.guard))
        object.__setattr__(self, "measured", tuple(self.measured))

    def safe_depth(self, same: int, layers: int) -> int:
        """Return how many of the lowest of `layers` layers may be reused unrepaired behind `same` equal tokens."""
        shares = [share for share, tokens in self.guard if same >= tokens]
        return int(max(shares, default=0.0) * layers + 1e-9)

    def window(self, depth: int, layers: int) -> int | None:
        """Return how many tokens before must be equal for the `depth` lowest layers to be reused unrepaired; None: all."""
        if depth <= 0:
            return 0
        return min((tokens for share, tokens in self.guard if int(share * layers + 1e-9) >= depth), default=None)

    def tensors(self) -> dict[str, Tensor]:
        return {"guard": torch.tensor(self.guard, dtype=torch.float64).reshape(-1, 2)}

    def metadata(self) -> dict[str, Any]:
        names = ("similarity", "probe", "check_layer", "probing", "repair", "repair_depth", "repair_by", "shortest", "aligned", "bound")
        return {name: getattr(self, name) for name in names} | {"measured": list(self.measured)}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Self:
        guard = tuple((share, int(tokens)) for share, tokens in tensors["guard"].tolist())
        return cls(**{**metadata, "guard": guard, "measured": tuple(metadata["measured"])})

    def to_json(self) -> dict[str, Any]:
        """Return the policy as JSON values, for `from_json`."""
        fingerprint = None if self.fingerprint is None else self.fingerprint.to_dict()
        return {**self.metadata(), "guard": [list(pair) for pair in self.guard], "fingerprint": fingerprint}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Restore what `to_json` returned."""
        fields = dict(values)
        fingerprint = fields.pop("fingerprint")
        policy = cls(**fields)
        object.__setattr__(policy, "fingerprint", None if fingerprint is None else ModelFingerprint.from_dict(fingerprint))
        return policy

    def describe_calibration(self) -> str:
        if self.bound is None:
            return "Not calibrated: the guards of the paper, scaled to the model's depth, and strict thresholds."
        kept = f"Thresholds at which accepted segments kept a mean KL divergence of at most {self.bound:g} nats on the next tokens"
        return f"{kept}; `same`: the share of these whose most likely token is the model's own.\n\n{markdown_table(self.measured)}"

    def with_repair(self, repair: float | None) -> SegmentPolicy:
        """Return the policy with another share to repair; None changes nothing."""
        if repair is None:
            return self
        changed = replace(self, repair=repair)
        # `replace` copies fields only.
        object.__setattr__(changed, "fingerprint", self.fingerprint)
        return changed


def _guard(guard: Any) -> tuple[tuple[float, int], ...]:
    """Return the pairs as tuples; refuse anything else."""
    pairs = [tuple(pair) if isinstance(pair, tuple | list) else () for pair in guard] if isinstance(guard, tuple | list) else [()]
    valid = all(len(pair) == 2 and is_number(pair[0]) and 0 < pair[0] <= 1 and type(pair[1]) is int and pair[1] >= 0 for pair in pairs)
    if not valid or pairs != sorted(pairs):
        raise ConfigError.of(
            "guard",
            "ascending pairs of a share of the layers, above 0 and up to 1, and a number of tokens",
            guard,
            "Such as ((0.25, 512),); () admits nothing unrepaired.",
        )
    return tuple((float(share), tokens) for share, tokens in pairs)

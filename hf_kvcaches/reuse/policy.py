"""`SegmentPolicy`: which stored tokens may be reused behind another text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.hub import Artifact, markdown_table
from hf_kvcaches.errors import ConfigError, is_number, whole_number
from hf_kvcaches.reuse.plan import Admission as Admission
from hf_kvcaches.reuse.plan import Match as Match

_RANGES = (
    ("similarity", 1.01, "0 reuses matches in any surroundings, 1.01 none."),
    ("repair", 1.0, "0.15 computes three tokens of twenty again."),
    ("repair_depth", 1.0, "0.5 computes them in the lower half of the layers, 1 in all."),
)


@dataclass(frozen=True)
class SegmentPolicy(Artifact):
    """When stored tokens are reused behind another text, and how much of them is repaired.

    Without calibration the thresholds are strict guesses.

    Args:
        guard: How many tokens directly before must be the same for reuse without repair; None: all.
        similarity: The least Jaccard similarity of the shingles of both surroundings.
        repair: Share of the tokens that are recomputed in the new context: a third of them each segment's first ones, the others those that
            the prompt's last tokens attend to most.
        repair_depth: Share of the layers that recompute these tokens: the lowest ones. The others reuse them.
        shortest: The least number of tokens that are reused behind another text.
        bound: The bound on the mean KL divergence that calibration kept, in nats; None without calibration.
        measured: One dict of settings and measurements for each setting that was tried.
    """

    artifact_type: ClassVar[str] = "segment-policy"
    format_version: ClassVar[int] = 2

    guard: int | None = None
    similarity: float = 0.9
    repair: float = 0.25
    repair_depth: float = 1.0
    shortest: int = 16
    bound: float | None = None
    measured: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name, most, hint in _RANGES:
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= most:
                raise ConfigError.of(name, f"a number from 0 to {most}", value, hint)
        object.__setattr__(self, "shortest", whole_number("shortest", self.shortest, 1, hint="It counts tokens."))
        if self.guard is not None:
            hint = "Shares of the layers are no longer guarded: see repair_depth." if isinstance(self.guard, tuple | list) else ""
            object.__setattr__(self, "guard", whole_number("guard", self.guard, 0, "a number of tokens, or None", hint))
        if self.bound is not None and not (is_number(self.bound) and self.bound >= 0):
            raise ConfigError.of("bound", "a number of nats of at least 0, or None", self.bound, "Calibration sets it.")
        object.__setattr__(self, "measured", tuple(self.measured))

    def admit(self, match: Match) -> Admission:
        """Decide on a match by the text before it."""
        if self.guard is not None and match.same >= self.guard:
            return Admission("guarded")
        # A threshold of 0 admits everything, without comparing surroundings.
        if self.similarity > 0 and match.likeness < self.similarity:
            return Admission(reason=f"Its surroundings have a likeness of {match.likeness:.2f}, below {self.similarity:g}.")
        unsafe = len(match) if self.guard is None else min(len(match), self.guard - match.same)
        return Admission("repaired", min(math.ceil(self.repair * len(match)), unsafe), self.repair_depth)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def metadata(self) -> dict[str, Any]:
        names = ("guard", "similarity", "repair", "repair_depth", "shortest", "bound")
        return {name: getattr(self, name) for name in names} | {"measured": list(self.measured)}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Self:
        return cls(**metadata)

    def to_json(self) -> dict[str, Any]:
        """Return the policy as JSON values, for `from_json`."""
        return {**self.metadata(), "fingerprint": None if self.fingerprint is None else self.fingerprint.to_dict()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Restore what `to_json` returned."""
        fields = dict(values)
        fingerprint = fields.pop("fingerprint")
        return cls(**fields).bound_to(None if fingerprint is None else ModelFingerprint.from_dict(fingerprint))

    def bound_to(self, fingerprint: ModelFingerprint | None) -> Self:
        """Set the model that the policy was measured for, and return the policy."""
        object.__setattr__(self, "fingerprint", fingerprint)
        return self

    def with_changes(self, **changes: Any) -> SegmentPolicy:
        """Return the policy with other fields, for the same model; None changes nothing."""
        changes = {name: value for name, value in changes.items() if value is not None}
        return replace(self, **changes).bound_to(self.fingerprint) if changes else self

    def describe_calibration(self) -> str:
        if self.bound is None:
            return "Not calibrated: strict guesses."
        kept = f"Settings at which prompts with reused tokens kept a mean KL divergence of at most {self.bound:g} nats on the next tokens"
        return f"{kept}; `same`: the share of these whose most likely token is the model's own.\n\n{markdown_table(self.measured)}"

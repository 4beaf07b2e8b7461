"""`SegmentPolicy`: which stored tokens may be reused behind another text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from hf_kvcaches.core.files import Artifact, markdown_table
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.errors import ConfigError, is_number, whole_number
from hf_kvcaches.reuse.index import Match as Match

_RANGES = (
    ("similarity", 1.01, "0 reuses matches in any surroundings, 1.01 none."),
    ("repair", 1.0, "0.15 computes three tokens of twenty again."),
    ("repair_depth", 1.0, "0.5 computes them in the lower half of the layers, 1 in all."),
)


class Admission(NamedTuple):
    """The decision on a match; without a `rule` it is rejected."""

    rule: str = ""  # a name for reports
    repair: int = 0  # how many tokens are recomputed: its first ones, and of all matches those that the prompt's end attends to most
    repair_depth: float = 1.0  # the share of the layers that recompute them, from the lowest on; the others reuse them
    reason: str = ""  # why it is rejected, as a sentence


Admit = Callable[[Match], Admission]


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
        fingerprint: The model that it was measured for, or None.
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
    fingerprint: ModelFingerprint | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, most, hint in _RANGES:
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= most:
                raise ConfigError.of(name, f"a number from 0 to {most}", value, hint)
        object.__setattr__(self, "shortest", whole_number("shortest", self.shortest, 1, hint="It counts tokens."))
        if self.guard is not None:
            object.__setattr__(self, "guard", whole_number("guard", self.guard, 0, "a number of tokens, or None"))
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
        return {name: value for name, value in vars(self).items() if name != "fingerprint"}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Self:
        return cls(**metadata)

    def describe_calibration(self) -> str:
        if self.bound is None:
            return "Not calibrated: strict guesses."
        kept = f"Settings at which prompts with reused tokens kept a mean KL divergence of at most {self.bound:g} nats on the next tokens"
        return f"{kept}; `same`: the share of these whose most likely token is the model's own.\n\n{markdown_table(self.measured)}"

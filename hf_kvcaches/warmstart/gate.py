"""`WarmStartGate`: which earlier prompts a new one may start from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor

from hf_kvcaches.core.files import Artifact, markdown_table
from hf_kvcaches.errors import ConfigError, Refusal, is_number
from hf_kvcaches.reuse.policy import SegmentPolicy


@dataclass(frozen=True)
class WarmStartGate(Artifact):
    """When spans of earlier prompts are reused behind changed text, and how much of each is repaired.

    Args:
        tau: The least cosine of an earlier prompt for its tokens to be compared. Calibration does not set it.
        reusable: The least share of a prompt's tokens that can be reused.
        similarity: The least Jaccard similarity of the text before a span, here and there; see `SegmentPolicy`.
        repair: Share of the spans' tokens that are recomputed; see `SegmentPolicy`.
        repair_depth: Share of the layers that recompute them: the lowest ones.
        encoder: The name of the library's encoder in the calibration, whose cosines `tau` is for, or None.
        bound: The bound on the mean KL divergence that calibration kept, in nats; None without calibration.
        measured: One dict of limits and measurements for each setting that was tried.
    """

    artifact_type: ClassVar[str] = "warm-start-gate"
    format_version: ClassVar[int] = 2

    tau: float = -1.0
    reusable: float = 0.4
    similarity: float = 0.0
    repair: float = 0.3
    repair_depth: float = 1.0
    encoder: str | None = None
    bound: float | None = None
    measured: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("tau", "reusable"):
            if not is_number(getattr(self, name)) or not -1.0 <= getattr(self, name) <= 1.01:  # a little over 1 rejects everything
                raise ConfigError.of(name, "a number from -1 to 1.01", getattr(self, name))
        object.__setattr__(self, "measured", tuple(self.measured))
        _ = self.policy  # checks the other numbers

    @property
    def policy(self) -> SegmentPolicy:
        """What admits single spans: the policy of segments."""
        return SegmentPolicy(similarity=self.similarity, repair=self.repair, repair_depth=self.repair_depth)

    def refusal(self, reused: int, tokens: int) -> Refusal | None:
        """Why so many reused tokens of a prompt are too few; None if they are enough."""
        if reused >= self.reusable * tokens:
            return None
        return Refusal(f"{reused / max(tokens, 1):.0%} of the tokens can be reused, below {self.reusable:.0%}.")

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def metadata(self) -> dict[str, Any]:
        return asdict(self) | {"measured": list(self.measured)}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Self:
        return cls(**metadata)

    def describe_calibration(self) -> str:
        return markdown_table(self.measured) or "Not calibrated."

"""`WarmStartGate`: which earlier prompts a new one may reuse."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from hf_kvcaches.core.hub import Artifact, markdown_table
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.warmstart.changes import Risk, TextChanges

Check = Literal["", "similarity", "lengths", "reusable", "content"] | Risk


class GateVerdict(NamedTuple):
    """Whether a pair is admitted; `check` names the check that rejected it, or is ""."""

    admitted: bool
    check: Check
    reason: str


@dataclass(frozen=True)
class WarmStartGate(Artifact):
    """When the state of an earlier prompt may be reused for a new one. Values that are None are not checked.

    Args:
        tau: The least cosine of the two prompts, for a summary.
        lengths: The least and the greatest length of the earlier prompt, as a multiple of the new one's, for a summary.
        reusable: The least share of the new prompt's tokens that alignment can reuse.
        content: The most words of content that may differ; None for any number.
        lexical: Whether numbers, names, negations and the like that differ reject a pair.
        encoder: The name of the encoder that `tau` was measured with, or None.
        measured: One dict of limits and measurements for each setting that was tried.
    """

    artifact_type: ClassVar[str] = "warm-start-gate"
    format_version: ClassVar[int] = 1
    may_be_infinite: ClassVar[frozenset[str]] = frozenset({"lengths"})

    tau: float = 0.9
    lengths: tuple[float, float] = (0.5, 2.0)
    reusable: float = 0.5
    content: int | None = 0
    lexical: bool = True
    encoder: str | None = None
    measured: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("tau", "reusable"):
            if not -1.0 <= getattr(self, name) <= 1.01:  # a little over 1 rejects everything
                raise ConfigError.of(name, "a number from -1 to 1.01", getattr(self, name))
        if len(self.lengths) != 2 or not 0 <= self.lengths[0] <= self.lengths[1]:
            raise ConfigError.of("lengths", "(least, greatest), neither negative", self.lengths, "(0.5, 2.0) allows half to twice as long.")
        if self.content is not None and self.content < 0:
            raise ConfigError.of("content", "a number of words, or None", self.content, "0 lets only small words differ.")
        object.__setattr__(self, "lengths", tuple(self.lengths))
        object.__setattr__(self, "measured", tuple(self.measured))

    def tensors(self) -> dict[str, Tensor]:
        # JSON has no infinite length.
        return {"lengths": torch.tensor(self.lengths, dtype=torch.float64)}

    def metadata(self) -> dict[str, Any]:
        names = ("tau", "reusable", "content", "lexical", "encoder")
        return {name: getattr(self, name) for name in names} | {"measured": list(self.measured)}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Self:
        return cls(**metadata, lengths=tuple(tensors["lengths"].tolist()))

    def describe_calibration(self) -> str:
        return markdown_table(self.measured) or "Not calibrated."

    def decide(
        self,
        *,
        similarity: float | None = None,
        lengths: tuple[int, int] | None = None,
        reusable: float | None = None,
        changes: TextChanges | None = None,
    ) -> GateVerdict:
        """Return the verdict of the first check that rejects; `lengths` are the tokens of the earlier prompt and of the new one."""
        # Comparisons are negated so that NaN is rejected.
        if similarity is not None and not similarity >= self.tau:
            return GateVerdict(False, "similarity", f"The similarity is {similarity:.3f}, below {self.tau:g}.")
        if lengths is not None:
            ratio = lengths[0] / lengths[1] if lengths[1] else math.inf
            least, most = self.lengths
            if not least <= ratio <= most:
                return GateVerdict(False, "lengths", f"The earlier prompt is {ratio:.2f} times as long, outside {least:g} to {most:g}.")
        if reusable is not None and not reusable >= self.reusable:
            return GateVerdict(False, "reusable", f"{reusable:.0%} of the tokens stand in the earlier prompt, below {self.reusable:.0%}.")
        if changes is not None and self.lexical and changes.risks:
            risk, example = changes.risks[0]
            return GateVerdict(False, risk, f"What differs touches {risk}: {example}.")
        if changes is not None and self.content is not None and len(changes.content) > self.content:
            words = ", ".join(changes.content[:4]) + (", ..." if len(changes.content) > 4 else "")
            return GateVerdict(False, "content", f"Words of content differ: {words}.")
        return GateVerdict(True, "", "Nothing speaks against it.")

"""How a codec was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from hf_kvcaches.codec.metric import Metric
from hf_kvcaches.codec.sides import CalibratedLayer


@dataclass(frozen=True)
class CodecSettings:
    """How a codec was made.

    Args:
        rotation: Whether keys are coded before ("aware") or after ("post") the model rotates them.
        metric: By which errors count.
        recent: How many of the newest tokens are expected to be exact.
        rule: How bits were allotted: the argument of `KVCodec.at` and its value.
        widths: The bits that a direction may have.
        gamma: The factor on decoded keys: "one", or the "paper"'s.
        block: Tokens of the longest sequence that was read.
    """

    rotation: Literal["aware", "post"]
    metric: Metric
    recent: int
    rule: dict[str, Any]
    widths: tuple[int, ...]
    gamma: Literal["one", "paper"]
    block: int
    blocks: int
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rule = {name: list(value) if isinstance(value, tuple) else value for name, value in self.rule.items()}
        return asdict(self) | {"rule": rule, "widths": list(self.widths)}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        rule = {name: tuple(value) if isinstance(value, list) else value for name, value in stored["rule"].items()}
        return cls(**stored | {"rule": rule, "widths": tuple(stored["widths"])})

    def card(self, layers: Sequence[CalibratedLayer | None], memory: str, packed: str) -> str:
        """What a model card says, as Markdown.

        Args:
            memory: The bytes of a token in memory, and `packed`.
        """
        rows = {
            "text": f"{self.tokens:,} tokens in {self.blocks:,} sequences of up to {self.block:,}",
            "bits by": ", ".join(f"{name} = {value}" for name, value in self.rule.items()),
            "memory": memory,
            "packed": packed,
            "bits of a direction": ", ".join(map(str, self.widths)),
            "rotation": self.rotation,
            "metric": self.metric,
            "exact newest tokens": str(self.recent),
            "gamma": self.gamma,
        }
        facts = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        head = "| layer | directions of keys | of values | bits of a key | of a value | energy of keys | of values |"
        table = "\n".join(_row(index, layer) for index, layer in enumerate(layers) if layer is not None)
        return f"| | |\n|---|---|\n{facts}\n\n{head}\n|---|---|---|---|---|---|---|\n{table}\n\nEnergies are the shares kept."


def _row(index: int, layer: CalibratedLayer) -> str:
    directions = [", ".join(map(str, (side.widths > 0).sum(1).tolist())) for side in layer]
    bits = [f"{float(side.widths.float().mean()):.2f}" for side in layer]
    return f"| {index} | {' | '.join([*directions, *bits, *(f'{side.kept:.4f}' for side in layer)])} |"

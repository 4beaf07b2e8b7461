"""How a codec was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from hf_kvcaches.codec.fixed import FixedLayer
from hf_kvcaches.codec.metric import Metric


@dataclass(frozen=True)
class CodecSettings:
    """How a codec was made.

    Args:
        rotation: Whether keys are coded before ("aware") or after ("post") the model rotates them.
        metric: By which errors count.
        recent: How many of the newest tokens are expected to be exact.
        bytes_ratio: The share of the bytes of exact keys and values in 16 bits that was asked for.
        block: Tokens of the longest sequence that was read.
        blocks: How many sequences were read.
        tokens: And tokens.
    """

    rotation: Literal["aware", "post"]
    metric: Metric
    recent: int
    bytes_ratio: float
    block: int
    blocks: int
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        return cls(**stored)

    def card(self, layers: Mapping[int, FixedLayer], memory: str, packed: str) -> str:
        """What a model card says, as Markdown.

        Args:
            layers: As they are read in memory.
            memory: The bytes of a token in memory, and `packed`.
        """
        rows = {
            "text": f"{self.tokens:,} tokens in {self.blocks:,} sequences of up to {self.block:,}",
            "share of the bytes": f"{self.bytes_ratio:g}",
            "memory": memory,
            "packed": packed,
            "rotation": self.rotation,
            "metric": self.metric,
            "exact newest tokens": str(self.recent),
        }
        facts = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        head = "| layer | heads of a basis | directions | with bits | bits of a number | energy kept |"
        table = "\n".join(_row(index, layer) for index, layer in layers.items())
        return f"| | |\n|---|---|\n{facts}\n\n{head}\n|---|---|---|---|---|---|\n{table}"


def _row(index: int, layer: FixedLayer) -> str:
    directions = f"{layer.shape.size} | {int((layer.widths > 0).sum())}"
    return f"| {index} | {layer.shape.group} | {directions} | {float(layer.widths.float().mean()):.2f} | {layer.kept:.4f} |"

"""How a codec was made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from hf_kvcaches.codec.fixed import FixedForm, FixedLayer
from hf_kvcaches.codec.joint import PackedForm
from hf_kvcaches.codec.meter import Metric
from hf_kvcaches.errors import ConfigError, is_number

_MOST = 1.5  # every direction in 24 bits


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

    def card(self, in_place: FixedForm, packed: PackedForm) -> str:
        """What a model card says of these forms, as Markdown."""
        share = in_place.nbytes / (2 * in_place.elements)
        kept = {
            "memory": f"{share:.4f} of exact keys and values in 16 bits ({in_place.nbytes:,} bytes per token)",
            "packed": f"{packed.ratio:.4f}",
        }
        if self.metric == "loss":
            for name, divergence in (("memory", in_place.divergence), ("packed", packed.divergence)):
                kept[name] += f", with an expected divergence of {divergence:.4f} nats"
        rows = {
            "text": f"{self.tokens:,} tokens in {self.blocks:,} sequences of up to {self.block:,}",
            "share of the bytes": f"{self.bytes_ratio:g}",
            **kept,
            "rotation": self.rotation,
            "metric": self.metric,
            "exact newest tokens": str(self.recent),
        }
        facts = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        head = "| layer | heads of a basis | directions | with bits | bits of a number | energy kept |"
        table = "\n".join(_row(index, layer) for index, layer in in_place.layers.items())
        return f"| | |\n|---|---|\n{facts}\n\n{head}\n|---|---|---|---|---|---|\n{table}"


def _row(index: int, layer: FixedLayer) -> str:
    directions = f"{layer.shape.size} | {int((layer.widths > 0).sum())}"
    return f"| {index} | {layer.shape.group} | {directions} | {float(layer.widths.float().mean()):.2f} | {layer.kept:.4f} |"


def check_ratio(bytes_ratio: Any) -> None:
    """Refuse what is no share of the bytes."""
    if not is_number(bytes_ratio) or not 0 < bytes_ratio <= _MOST:
        raise ConfigError.of("bytes_ratio", f"a number above 0 and up to {_MOST}", bytes_ratio, "It is a share of the bytes. Try 0.125.")

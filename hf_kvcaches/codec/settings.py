"""How a codec was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hf_kvcaches.codec.fixed import FixedForm
from hf_kvcaches.codec.joint import PackedForm
from hf_kvcaches.codec.meter import Metric
from hf_kvcaches.core.hub import markdown_table
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


def card_of(made: CodecSettings, in_place: FixedForm, packed: PackedForm) -> str:
    """What a model card says of a codec, as Markdown."""
    share = f"{in_place.nbytes / (2 * in_place.elements):.4f}"
    kept = {"memory": f"{share} of exact keys and values in 16 bits ({in_place.nbytes:,} bytes per token)", "packed": f"{packed.ratio:.4f}"}
    if made.metric == "loss":
        for name, form in (("memory", in_place), ("packed", packed)):
            kept[name] += f", with an expected divergence of {form.divergence:.4f} nats"
    facts = {
        "text": f"{made.tokens:,} tokens in {made.blocks:,} sequences of up to {made.block:,}",
        "share of the bytes": f"{made.bytes_ratio:g}",
        **kept,
        "rotation": made.rotation,
        "metric": made.metric,
        "exact newest tokens": made.recent,
    }
    layers = [
        {
            "layer": index,
            "heads of a basis": layer.shape.group,
            "directions": layer.shape.size,
            "with bits": int((layer.widths > 0).sum()),
            "bits of a number": f"{float(layer.widths.float().mean()):.2f}",
            "energy kept": layer.kept,
        }
        for index, layer in in_place.layers.items()
    ]
    return "\n\n".join([markdown_table([{"fact": name, "value": value} for name, value in facts.items()]), markdown_table(layers)])


def check_ratio(bytes_ratio: Any) -> float:
    """Refuse what is no share of the bytes."""
    if not is_number(bytes_ratio) or not 0 < bytes_ratio <= _MOST:
        raise ConfigError.of("bytes_ratio", f"a number above 0 and up to {_MOST}", bytes_ratio, "It is a share of the bytes. Try 0.125.")
    return float(bytes_ratio)

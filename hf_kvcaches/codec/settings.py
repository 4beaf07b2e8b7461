"""How texts are read for a codec, and how a codec was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_kvcaches.errors import ConfigError, is_number, require_choice, whole_number

Metric = Literal["loss", "plain"]
Rotation = Literal["aware", "post"]
_MOST = 1.5  # share of the bytes: every direction in 24 bits


@dataclass(frozen=True)
class Reading:
    """How texts are read and measured; described in `KVCodec.calibrate`. Checked when made."""

    rotation: Rotation = "aware"
    metric: Metric = "loss"
    recent: int = 64
    block: int = 512
    batch_size: int = 1
    max_tokens: int | None = None
    shards: int = 1
    progress: bool = True

    def __post_init__(self) -> None:
        require_choice("rotation", self.rotation, ("aware", "post"))
        require_choice("metric", self.metric, ("loss", "plain"))
        for name, least in (("recent", 0), ("block", 2), ("batch_size", 1), ("max_tokens", 2), ("shards", 1)):
            if (value := getattr(self, name)) is not None or name != "max_tokens":
                object.__setattr__(self, name, whole_number(name, value, least))


@dataclass(frozen=True)
class CodecSettings:
    """How a codec was made."""

    rotation: Rotation  # whether keys are coded before ("aware") or after ("post") the model rotates them
    metric: Metric  # by which errors count
    recent: int  # how many of the newest tokens are expected to be exact
    bytes_ratio: float  # the share of the bytes of exact keys and values in 16 bits that was asked for
    block: int  # tokens of the longest sequence that was read
    blocks: int  # sequences that were read
    tokens: int  # and their tokens

    def facts(self, kept: Mapping[str, str]) -> dict[str, Any]:
        """What a model card says, with what forms keep."""
        text = f"{self.tokens:,} tokens in {self.blocks:,} sequences of up to {self.block:,}"
        settings = {"rotation": self.rotation, "metric": self.metric, "exact newest tokens": self.recent}
        return {"text": text, "share of the bytes": f"{self.bytes_ratio:g}", **kept, **settings}


def check_ratio(bytes_ratio: Any) -> float:
    """Refuse what is no share of the bytes."""
    if not is_number(bytes_ratio) or not 0 < bytes_ratio <= _MOST:
        raise ConfigError.of("bytes_ratio", f"a number above 0 and up to {_MOST}", bytes_ratio, "It is a share of the bytes. Try 0.125.")
    return float(bytes_ratio)

"""What `eval_real.py` measures: the caches of this package and their peers, by the task that they are made for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import torch
from _kivi import KiviCache, KiviCoding, share
from transformers import Cache, QuantizedCache

from hf_kvcaches import KVCodec, SegmentReuseCache, SegmentStore, SubspaceCache, WarmStartCache, WarmStartLibrary
from hf_kvcaches.cli.suite import Item, Row
from hf_kvcaches.codec.past import CodecCoding, PackedCoding
from hf_kvcaches.evaluate.measures import TextQuality, compare
from hf_kvcaches.evaluate.past import PastCoding, read_rows

SHARES = (0.125, 0.1875, 0.25)
# Packed, for each window. Of text that was not calibrated on, some 5% more bytes are written.
PACKED = {0: (0.066, 0.122), 64: (0.0325, 0.0515)}
WINDOWS = (0, 64)
SINKS = 4
# Of a prompt that is read before a quantized cache is compared token by token.
QUANTIZED_PROMPT, QUANTIZED_STEPS = 256, 32


@dataclass(frozen=True)
class Side:
    """One cache in the tables.

    Args:
        share: Of the bytes of keys and values in 16 bits.
        recent: Newest tokens that stay exact.
        peer: Whether it is somebody else's.
    """

    name: str
    share: float
    recent: int = 0
    peer: bool = False

    def __str__(self) -> str:
        window = f", {self.recent} recent" if self.recent else ""
        return f"{self.name} {self.share:g}{window}"


class RotatedCoding(PastCoding):
    """Each token's key and value of a head as a norm and a rotated direction, whose coordinates are rounded to few levels without data.

    The rotation is random; the levels are those with the least squared error for normal coordinates. This is what data-free codes such as
    TurboQuant's do, without the part that removes the bias of inner products.

    Args:
        bits: Of a coordinate.
    """

    def __init__(self, bits: int, *, sinks: int = 4, recent: int = 0) -> None:
        super().__init__(sinks, recent)
        self.bits = bits

    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(keys), self._read(values)

    def _read(self, states: torch.Tensor) -> torch.Tensor:
        dim, wide = states.shape[-1], states.float()
        rotation, levels = random_rotation(dim), normal_levels(self.bits)
        norm = wide.norm(dim=-1, keepdim=True).half().float()
        coordinates = wide @ rotation * (math.sqrt(dim) / norm.clamp(min=1e-9))
        nearest = torch.bucketize(coordinates, (levels[1:] + levels[:-1]) / 2)
        return (levels[nearest] @ rotation.T * (norm / math.sqrt(dim))).to(states.dtype)


@cache
def random_rotation(dim: int) -> torch.Tensor:
    """A rotation of that many dimensions, always the same."""
    normal = torch.randn(dim, dim, generator=torch.Generator().manual_seed(0))
    return torch.linalg.qr(normal)[0]


@cache
def normal_levels(bits: int) -> torch.Tensor:
    """The 2**bits levels with the least squared error for a normal variable, by Lloyd's iteration on a fine grid."""
    grid = torch.linspace(-6, 6, 12001, dtype=torch.float64)
    weights = torch.exp(-(grid**2) / 2)
    levels = torch.linspace(-2, 2, 2**bits, dtype=torch.float64)
    for _ in range(200):
        nearest = torch.bucketize(grid, (levels[1:] + levels[:-1]) / 2)
        sums = torch.zeros(2, len(levels), dtype=torch.float64).index_add(1, nearest, torch.stack([weights * grid, weights]))
        levels = sums[0] / sums[1].clamp(min=1e-12)
    return levels.float()


def codings(model: Any, codecs: Mapping[int, KVCodec], head_dim: int) -> dict[Side, PastCoding]:
    """Codes of the past by their bytes, with and without a window.

    Args:
        codecs: For each window the one that is calibrated for it.
    """
    sides: dict[Side, PastCoding] = {}
    for recent in WINDOWS:
        window = {"sinks": SINKS, "recent": recent}
        for ratio in SHARES:
            sides[Side("codec", ratio, recent)] = CodecCoding(codecs[recent].at(ratio), model, **window)
        for ratio in PACKED[recent]:
            sides[Side("packed codec", ratio, recent)] = PackedCoding(codecs[recent].at(ratio), model, **window)
        for bits in (2, 4):
            sides[Side(f"KIVI {bits} bit", share(bits), recent, peer=True)] = KiviCoding(bits, **window)
    for bits in (2, 3, 4):
        # A norm in 16 bits for each head's key and value.
        sides[Side(f"rotation {bits} bit", (bits + 16 / head_dim) / 16, peer=True)] = RotatedCoding(bits, sinks=SINKS)
    return sides


def quantized(model: Any, codec: KVCodec) -> dict[Side, Callable[[], Cache]]:
    """Caches whose bytes are read token by token behind an exact prompt, transformers' own among them."""
    sides: dict[Side, Callable[[], Cache]] = {}
    for ratio in SHARES:
        sides[Side("SubspaceCache", ratio, 64)] = lambda ratio=ratio: SubspaceCache(model, codec.at(ratio), recent=64)
    for bits in (2, 4):
        sides[Side(f"KIVI {bits} bit", share(bits), peer=True)] = lambda bits=bits: KiviCache(model.config, bits)
        for backend, axis in (("quanto", 0), ("hqq", 1)):
            # Groups of 64 numbers with a scale and a zero in 16 bits; up to 128 tokens are exact.
            side = Side(f"QuantizedCache {backend} {bits} bit", (bits + 0.5) / 16, 128, peer=True)
            sides[side] = lambda backend=backend, axis=axis, bits=bits: QuantizedCache(
                backend, model.config, nbits=bits, axis_key=axis, axis_value=axis
            )
    return sides


def segments(model: Any, tokenizer: Any) -> dict[str, Callable[[], Cache]]:
    """`SegmentReuseCache` by mode, each with a store that its requests share."""
    sides: dict[str, Callable[[], Cache]] = {}
    for mode in ("exact", "auto", "approximate"):
        store = SegmentStore("memory")
        sides[f"segments {mode}"] = lambda mode=mode, store=store: SegmentReuseCache(model, store, tokenizer, mode)
    return sides


def warm_starts(model: Any, tokenizer: Any) -> Mapping[str, Callable[[Sequence[int]], Callable[[], Cache]]]:
    """`WarmStartCache`, its library holding the earlier prompt alone."""

    def prepare(earlier: Sequence[int]) -> Callable[[], Cache]:
        library = WarmStartLibrary(model, tokenizer)
        library.add([list(earlier)])
        return lambda: WarmStartCache(model, library, tokenizer)

    return {"warm start auto": prepare}


def row_items(model: Any, task: str, input_ids: torch.Tensor, codings: Mapping[str, PastCoding], prompt: int = 4) -> Iterator[Item]:
    """Yield KL and perplexity of codings of the past over rows of text.

    Args:
        task: A name for the text.
        input_ids: (rows, tokens).
        prompt: First tokens of each row, which are not compared.
    """
    full: dict[int, torch.Tensor] = {}

    def measure(sample: int, name: str) -> list[Row]:
        row = input_ids[sample : sample + 1].to(model.device)
        if sample not in full:
            full.clear()
            full[sample] = read_rows(model, row)
        quality = compare(full[sample], read_rows(model, row, codings[name], prompt), row, prompt)
        return [{"tokens": quality.tokens, "kl": quality.kl, "loss": quality.loss, "full_loss": quality.full_loss}]

    for sample in range(len(input_ids)):
        for name in codings:
            yield Item(task, name, sample, lambda sample=sample, name=name: measure(sample, name))  # type: ignore[misc]


def row_summary(rows: Sequence[Row], cache: str) -> Row:
    """Return means over the rows of a text."""
    own = [row for row in rows if row["cache"] == cache]
    means = (fmean(row[name] for row in own) for name in ("kl", "loss", "full_loss"))
    quality = TextQuality(sum(row["tokens"] for row in own), *means)
    return {"cache": cache, "tokens": quality.tokens, "kl": quality.kl, "perplexity": quality.perplexity, "change": quality.change}

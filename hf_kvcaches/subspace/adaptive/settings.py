"""`AdaptiveSubspace`: how `SubspaceCache` lets its bases follow the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hf_kvcaches.codec.allocation import BitRule
from hf_kvcaches.errors import ConfigError, is_number, require_choice, whole_number
from hf_kvcaches.kernels.codes import TILE
from hf_kvcaches.subspace.adaptive.sketch import FrequentDirections, Gram, Sketch


@dataclass(frozen=True)
class AdaptiveSubspace:
    """Bases that follow the text: those of a codec until the text says otherwise, or without calibration from the start.

    "Online Subspace Projection for KV Caches", section 5. A sketch of each head counts in what is coded. A head changes to a basis of what
    its sketch knows when a tile of 16 tokens loses too much, or after `chunk` tokens, if that one is better. Tokens that are coded stay
    in their basis.

    Beside a codec, a sketch begins with what the codec was calibrated on, as if a chunk of it had been read, and each direction of a new
    basis has as many bits as one of the codec's. Without one (`rank` or `bytes_ratio`), the first `warmup` tokens stay exact until
    they are all there, the first basis of each head is made of them, and errors count by the size of keys and values themselves.

    **Departs from the paper**: what triggers is the loss of a tile, not of a token: one token in twenty is above a 95th percentile, and
    chunks would be that short. Keys and values of a head change by themselves. Keys are projected before their rotation
    (`rotation="post"` is the paper's).

    Args:
        rank: Without a codec: directions of a key and of a value, or one number for both.
        bytes_ratio: In place of `rank`: the bytes of a token's codes as a share of those of its keys and values in 16 bits.
        energy: In place of `rank`: the share of the energy of the first tokens that each head keeps.
        widths: The bits that a direction may have; as for `KVCodec.at`.
        sketch: "gram" keeps all outer products; "fd" the rows of Frequent Directions.
        sketch_size: Of these, how many remain after a shrink, two to four times the rank; None for twice.
        chunk: The most tokens until a basis is looked at again; whole tiles of 16.
        tau_k: The largest loss of a tile of keys, as a share of its length. None: with a codec what one calibration token in twenty lost,
            else one and a half times what the basis lost when it was new.
        tau_v: The same of values.
        warmup: Without a codec: tokens that the first basis is made of; whole tiles.
        rotation: Without a codec: whether keys are projected before ("aware") or after ("post") the model rotates them.
        decay: What the energy of older tokens is multiplied with after each chunk, 0 to 1.
        agreement: A new basis that saves less than this share of the loss is not taken.
    """

    rank: int | tuple[int, int] | None = None
    bytes_ratio: float | None = None
    energy: float | None = None
    widths: int | Sequence[int] | None = None
    sketch: Literal["gram", "fd"] = "gram"
    sketch_size: int | None = None
    chunk: int = 256
    tau_k: float | None = None
    tau_v: float | None = None
    warmup: int = 256
    rotation: Literal["aware", "post"] = "aware"
    decay: float = 1.0
    agreement: float = 0.05

    def __post_init__(self) -> None:
        if self.finds_bits or self.widths is not None:
            bits = BitRule.of(self.bytes_ratio, self.rank, self.energy, self.widths)
            object.__setattr__(self, "rank", bits.rule.get("rank"))
            object.__setattr__(self, "widths", bits.widths if "bytes_ratio" in bits.rule else bits.widths[0])
        for name, known in (("sketch", ("gram", "fd")), ("rotation", ("aware", "post"))):
            require_choice(name, getattr(self, name), known)
        for name in ("chunk", "warmup"):
            expected = f"a multiple of {TILE} tokens"
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1, expected))
            if getattr(self, name) % TILE:
                raise ConfigError.of(name, expected, getattr(self, name))
        if self.sketch_size is not None:
            expected = "an integer of at least 1, with sketch='fd'"
            object.__setattr__(self, "sketch_size", whole_number("sketch_size", self.sketch_size, 1, expected))
            if self.sketch != "fd":
                raise ConfigError.of("sketch_size", expected, self.sketch_size)
            if isinstance(self.rank, tuple) and self.sketch_size < max(self.rank):
                expected = f"at least the rank, {max(self.rank)}, and better two to four times it"
                raise ConfigError.of("sketch_size", expected, self.sketch_size)
        for name in ("tau_k", "tau_v", "decay", "agreement"):
            value = getattr(self, name)
            if not (value is None and name in ("tau_k", "tau_v")) and not (is_number(value) and 0 <= value <= 1):
                raise ConfigError.of(name, "a number from 0 to 1", value)

    @property
    def finds_bits(self) -> bool:
        """Whether bits are allotted by the text, as there is no codec."""
        return any(each is not None for each in (self.rank, self.bytes_ratio, self.energy))

    @property
    def sketch_differs_by_head(self) -> bool:
        """Whether the size of the sketch is that of the head with most directions."""
        return self.sketch == "fd" and self.sketch_size is None and self.rank is None

    @property
    def bits(self) -> BitRule:
        """How."""
        return BitRule.of(self.bytes_ratio, self.rank, self.energy, self.widths)

    def summary(self, rank: int) -> Sketch:
        """The sketch of heads with a rank.

        Args:
            rank: Theirs.
        """
        return Gram() if self.sketch == "gram" else FrequentDirections(self.sketch_size or 2 * rank)

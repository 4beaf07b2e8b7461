"""`AdaptiveSubspace`: what `SubspaceCache` needs to find its bases in the text that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_kvcaches.errors import ConfigError, is_number, require_choice, whole_number
from hf_kvcaches.kernels.coefficients import TILE
from hf_kvcaches.subspace.sketch import FrequentDirections, Gram, Sketch

_RANK = "an integer of at least 1, or two: (keys, values)"


@dataclass(frozen=True)
class AdaptiveSubspace:
    """Bases from the text itself: nothing is calibrated, and they follow the text.

    "Online Subspace Projection for KV Caches", section 5. The first `warmup` tokens stay exact until they are all there; the first basis
    of each head is made of them. From then on a sketch of each head counts in what comes, and a head changes to a basis of what its
    sketch knows when a tile of 16 tokens loses too much, or after `chunk` tokens, unless the basis in use is as good.

    **Departs from the paper**: keys are projected before their rotation (`rotation="post"` is the paper's), where attention feels the
    error (`metric="plain"` is the paper's). What triggers is the loss of a tile, not of a token: one token in twenty is above a 95th
    percentile, and chunks would be that short. Keys and values of a head have chunks of their own.

    Args:
        rank: Coefficients of a key and of a value, or one number for both.
        bytes_ratio: In place of `rank`: the share of a layer's bytes that coefficients may take. What heads, keys and values get of it is
            decided after the warm-up, for all rows of a batch together.
        sketch: "gram" keeps all outer products; "fd" the rows of Frequent Directions.
        sketch_size: Of these, how many remain after a shrink, two to four times the rank; None for twice.
        chunk: The most tokens until a basis is looked at again; whole tiles of 16.
        tau_k: The largest loss of a tile of keys, as a share of its length; None for one and a half times what the basis lost of the
            tokens that it was made of.
        tau_v: Likewise of values.
        warmup: Tokens that the first basis is made of; whole tiles.
        lookahead: Tokens that stay exact, besides the recent ones, so that a basis is made of what follows, too.
        rotation: Whether keys are projected before ("aware") or after ("post") the model rotates them.
        metric: "attention" or "plain".
        decay: What the energy of older tokens is multiplied with after each chunk, 0 to 1. None: 1 before the rotation, where keys of all
            positions are alike, and 0.5 after it: a window of about two chunks, trailing.
        agreement: A new basis that saves less than this share of the energy is not taken.
        multiple_of: What ranks are multiples of with `bytes_ratio`.
    """

    rank: int | tuple[int, int] | None = None
    bytes_ratio: float | None = None
    sketch: Literal["gram", "fd"] = "gram"
    sketch_size: int | None = None
    chunk: int = 256
    tau_k: float | None = None
    tau_v: float | None = None
    warmup: int = 256
    lookahead: int = 0
    rotation: Literal["aware", "post"] = "aware"
    metric: Literal["attention", "plain"] = "attention"
    decay: float | None = None
    agreement: float = 0.01
    multiple_of: int = 4

    def __post_init__(self) -> None:
        if (self.rank is None) == (self.bytes_ratio is None):
            raise ConfigError.of("rank, bytes_ratio", "exactly one of them", (self.rank, self.bytes_ratio), "Try rank=(16, 32).")
        if self.rank is not None:
            pair = self.rank if isinstance(self.rank, tuple | list) else (self.rank, self.rank)
            if len(pair) != 2:
                raise ConfigError.of("rank", _RANK, self.rank)
            object.__setattr__(self, "rank", tuple(whole_number("rank", each, 1, _RANK) for each in pair))
        if self.bytes_ratio is not None and not (is_number(self.bytes_ratio) and 0 < self.bytes_ratio <= 1):
            raise ConfigError.of("bytes_ratio", "a number above 0 and up to 1", self.bytes_ratio, "It is a share, such as 0.375.")
        for name, known in (("sketch", ("gram", "fd")), ("rotation", ("aware", "post")), ("metric", ("attention", "plain"))):
            require_choice(name, getattr(self, name), known)
        counts = {"chunk": (1, f"a multiple of {TILE} tokens"), "warmup": (1, f"a multiple of {TILE} tokens")}
        counts |= {"lookahead": (0, "a number of tokens, 0 or more"), "multiple_of": (1, "")}
        if self.sketch_size is not None:
            counts["sketch_size"] = (1, "an integer of at least 1, with sketch='fd'")
        for name, (least, expected) in counts.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least, expected))
            if name in ("chunk", "warmup") and getattr(self, name) % TILE:
                raise ConfigError.of(name, expected, getattr(self, name))
        if self.sketch_size is not None and self.sketch != "fd":
            raise ConfigError.of("sketch_size", "an integer of at least 1, with sketch='fd'", self.sketch_size)
        if self.sketch_size is not None and isinstance(self.rank, tuple) and self.sketch_size < max(self.rank):
            raise ConfigError.of("sketch_size", f"at least the rank, {max(self.rank)}, and better two to four times it", self.sketch_size)
        for name in ("tau_k", "tau_v", "decay", "agreement"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 <= value <= 1):
                raise ConfigError.of(name, "a number from 0 to 1", value)

    def summary(self, rank: int) -> Sketch:
        """The sketch of heads with a rank.

        Args:
            rank: Theirs.
        """
        return Gram() if self.sketch == "gram" else FrequentDirections(self.sketch_size or 2 * rank)

    @property
    def forgetting(self) -> float:
        """`decay`, as it is where it was not given."""
        if self.decay is not None:
            return self.decay
        return 1.0 if self.rotation == "aware" else 0.5

"""`AdaptiveSubspace`: the options of the paper's own method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from hf_kvcaches.errors import ConfigError, is_number, require_choice, whole_number
from hf_kvcaches.kernels.code_format import TILE
from hf_kvcaches.subspace.paper.side import Rule, Sketch

Bases = Mapping[int, tuple[Tensor, Tensor]]
"""By layer of keys and of values the right singular vectors of each head as rows, multiplied by their singular values, (heads, d, d)."""


@dataclass(frozen=True)
class AdaptiveSubspace:
    """Coefficients of keys and values in low-rank bases that follow the text: the paper's method, in place of a codec.

    "Online Subspace Projection for KV Caches", sections 4 to 7. A sketch of each head summarizes its keys, and one its values. Tokens are
    kept as coefficients in the bases of their block, in the dtype of the model; bases are float32. A block ends after `chunk` tokens or
    with the tile of 16 tokens before one whose relative residual exceeds a threshold, and the bases of the next one are the top directions
    of the sketches.

    **Departs from the paper**: thresholds are for a tile, not for a token, of which one in twenty is above a 95th percentile. A residual
    changes the basis of that head's keys or values alone, and its tile is coded in the new one. Chunks begin at multiples of `chunk`.
    Gamma is 1, and keys are projected before their rotation; `gamma="paper", rotation="post"` is the paper's main text.

    Args:
        rank: Directions of a key and of a value, or one number for both.
        bytes_ratio: In place of `rank`: the rank as a share of the head size.
        energy: In place of `rank`: the share of the energy of the first tokens that each head keeps, 0 to 1.
        sketch: "gram" keeps all outer products; "fd" the rows of Frequent Directions.
        sketch_size: How many rows these are, two to four times the rank; None for twice.
        chunk: The most tokens of a block, whole tiles of 16. None: the first bases are the only ones.
        tau_k: The largest relative residual of a tile of keys. None: 1.5 times what the basis lost of the tokens that it was made of, or
            of the first tile of its block if that was more.
        tau_v: The same of values.
        warmup: Tokens behind the sinks that the first bases are made of, and that stay exact before; whole tiles of 16, 0 with `bases`.
        rotation: Whether keys are projected before ("aware") or after ("post") the model rotates them.
        decay: What the energy of older tokens is multiplied with after each chunk, 0 to 1.
        gamma: What logits of coefficients are multiplied with: 1 ("one") or sqrt(rank / head size) ("paper").
        bases: The first ones, as `scripts/papers/_bases.py` measures them; with `chunk=None` the Static Subspace. It can't be saved.
    """

    rank: int | tuple[int, int] | None = None
    bytes_ratio: float | None = None
    energy: float | None = None
    sketch: Literal["gram", "fd"] = "gram"
    sketch_size: int | None = None
    chunk: int | None = 256
    tau_k: float | None = None
    tau_v: float | None = None
    warmup: int = 256
    rotation: Literal["aware", "post"] = "aware"
    decay: float = 1.0
    gamma: Literal["one", "paper"] = "one"
    bases: Bases | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        rules = [name for name in ("bytes_ratio", "rank", "energy") if getattr(self, name) is not None]
        if len(rules) != 1:
            raise ConfigError.of("bytes_ratio, rank, energy", "one of them", " and ".join(rules) or "none", "Try bytes_ratio=0.25.")
        for name, known in (("sketch", ("gram", "fd")), ("rotation", ("aware", "post")), ("gamma", ("one", "paper"))):
            require_choice(name, getattr(self, name), known)
        numbers = {"bytes_ratio": "above", "energy": "above", "tau_k": "from", "tau_v": "from", "decay": "from"}
        for name, least in numbers.items():
            value = getattr(self, name)
            valid = is_number(value) and (0 < value <= 1 or (value == 0 and least == "from"))
            if not valid and (value is not None or name == "decay"):
                raise ConfigError.of(name, f"a number {least} 0 to 1", value)
        checked: dict[str, Any] = {"rank": None, "warmup": 0}
        if self.rank is not None:
            pair = self.rank if isinstance(self.rank, tuple | list) and len(self.rank) == 2 else (self.rank, self.rank)
            expected = "an integer of at least 1, or one for keys and one for values"
            checked["rank"] = tuple(whole_number("rank", rank, 1, expected) for rank in pair)
        for name in ["warmup"] * (self.bases is None) + ["chunk"] * (self.chunk is not None):
            checked[name] = whole_number(name, getattr(self, name), 1, f"a multiple of {TILE} tokens")
            if checked[name] % TILE:
                raise ConfigError.of(name, f"a multiple of {TILE} tokens", checked[name])
        if self.sketch == "gram" and self.sketch_size is not None:
            raise ConfigError.of("sketch_size", "None with sketch='gram'", self.sketch_size)
        if self.sketch_size is not None or (self.sketch == "fd" and self.energy is not None):
            hint = "Two to four times the rank is best."
            checked["sketch_size"] = whole_number("sketch_size", self.sketch_size, max(checked["rank"] or (1,)), hint=hint)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def rules(self, *dims: int) -> list[Rule]:
        """Return how the bases of keys and of values with these dimensions are made."""
        ranks = [None if self.bytes_ratio is None else max(1, int(self.bytes_ratio * dim)) for dim in dims]
        rules = []
        for rank, tau in zip(self.rank if isinstance(self.rank, tuple) else ranks, (self.tau_k, self.tau_v), strict=True):
            sketch = Sketch(None if self.sketch == "gram" else self.sketch_size or 2 * (rank or 1))
            rules.append(Rule(rank, self.energy or 1.0, tau, None if self.chunk is None else sketch))
        return rules

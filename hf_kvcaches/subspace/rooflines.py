"""What attention over coefficients costs for each new token, in arithmetic, memory traffic and memory, from the config alone.

Counted is the attention of one decoding step, in all layers and heads: every row of the batch has `tokens` tokens, the new one included.
Left out, being alike on both sides: softmax, and all that is done to the new token's own vectors before they meet the cache. For each key
head, with g query heads to it, keys and values of sizes d and e, n compressed tokens and x exact ones, ranks r and s, and J bases:

| part         | FLOPs                                        | elements read  |
|--------------|----------------------------------------------|----------------|
| baseline     | 2 g (n + x) (d + e)                          | (n + x) (d + e) |
| exact        | 2 g x (d + e)                                | x (d + e)      |
| coefficients | 2 g n (r + s); aware: 2 g n (d + s)          | n (r + s)      |
| bases        | 2 (g J + 1) (r d + s e); aware: g J for s e only | J (r d + s e) |
| rebuilding   | aware: 2 n r d + 3 (n + 1) t                 | n t, once for all heads and rows |
| sketches     | 12 l d + 72 l**2, and the same with e        | 2 (d + e), of 4 bytes |

A multiplication and an addition are 2 FLOPs. Every step one token leaves the newest and is encoded: the 1 in `g J + 1`.

**Rotation.** Coefficients of keys as the model rotated them ("post") meet a query that was projected once. Coefficients of keys from before
the rotation ("aware") have to be decoded and rotated for every query, t dimensions of each, because a different angle belongs to every
position. That may well be more arithmetic than exact attention; the traffic hardly grows, if a kernel keeps the rebuilt keys to itself.

**Sketches.** Frequent Directions with l rows in a buffer of 2 l. Whenever it is full, the rows are multiplied with each other (8 l**2 d),
the eigenvectors of the result are taken (9 N**3 for N x N, a usual estimate) and the rows are combined into l new ones (4 l**2 d); a step
pays 1 / l of that. From 2 l = d on, the d x d product (4 l d**2) and its eigenvectors are the new rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hf_kvcaches import compat
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, UnsupportedError, whole_number

Bound = Literal["compute", "bandwidth"]

# Layers without a cache of their own that grows: they cost the same with any cache, and are not counted.
_NOT_COUNTED = frozenset({"linear_attention", "conv", "dummy"})
_SLIDING = frozenset({"sliding_attention", "chunked_attention"})
_SKETCH_BYTES = 4


@dataclass(frozen=True)
class Work:
    """The cost of attention, or of a part of it.

    Args:
        flops: Floating-point operations of one step.
        bytes: Bytes that one step reads.
        memory: Bytes that are kept between steps.
    """

    flops: int = 0
    bytes: int = 0
    memory: int = 0

    @property
    def intensity(self) -> float:
        """FLOPs for each byte read."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.memory + other.memory)


@dataclass(frozen=True)
class Roofline:
    """The cost of both kinds of attention. Made by `roofline`.

    What a machine predicts is for attention alone: a step also reads all weights, which no cache makes fewer.

    Args:
        tokens: Tokens in each row.
        compressed: How many of them are kept as coefficients, in each compressed layer.
        bases: Bases for each key head, of keys and as many of values.
        layers: Layers that are compressed.
        sliding_layers: Layers with a window, which are exact on both sides.
        batch: Rows. One step makes a token in each.
        baseline: Exact attention.
        parts: Of attention over coefficients: `exact`, `coefficients`, `bases`, `rebuilding` (keys, where the rotation comes after
            decoding), `sketches` and `sliding` (the layers with a window).
        flops_per_second: What the machine computes, or None.
        bytes_per_second: What the machine reads, or None.
    """

    tokens: int
    compressed: int
    bases: int
    layers: int
    sliding_layers: int
    batch: int
    baseline: Work
    parts: dict[str, Work] = field(hash=False)
    flops_per_second: float | None = None
    bytes_per_second: float | None = None

    @property
    def subspace(self) -> Work:
        """Attention over coefficients: all parts."""
        return sum(self.parts.values(), Work())

    @property
    def flops_ratio(self) -> float:
        """How many times fewer FLOPs."""
        return self.baseline.flops / self.subspace.flops

    @property
    def bytes_ratio(self) -> float:
        """How many times fewer bytes read."""
        return self.baseline.bytes / self.subspace.bytes

    @property
    def memory_ratio(self) -> float:
        """How many times less memory."""
        return self.baseline.memory / self.subspace.memory

    @property
    def baseline_bound(self) -> Bound | None:
        """What exact attention waits for; None without a machine."""
        return self._bound(self.baseline)

    @property
    def subspace_bound(self) -> Bound | None:
        """What attention over coefficients waits for; None without a machine."""
        return self._bound(self.subspace)

    @property
    def baseline_seconds(self) -> float | None:
        """The least time of exact attention in one step; None without a machine."""
        return self._seconds(self.baseline)

    @property
    def subspace_seconds(self) -> float | None:
        """The least time of attention over coefficients in one step; None without a machine."""
        return self._seconds(self.subspace)

    @property
    def speedup(self) -> float | None:
        """How many times faster attention can be; None without a machine."""
        before, after = self.baseline_seconds, self.subspace_seconds
        return None if before is None or after is None else before / after

    def _times(self, work: Work) -> tuple[float, float] | None:
        if self.flops_per_second is None or self.bytes_per_second is None:
            return None
        return work.flops / self.flops_per_second, work.bytes / self.bytes_per_second

    def _seconds(self, work: Work) -> float | None:
        times = self._times(work)
        return None if times is None else max(times)

    def _bound(self, work: Work) -> Bound | None:
        times = self._times(work)
        return None if times is None else "compute" if times[0] > times[1] else "bandwidth"

    def __str__(self) -> str:
        left = self.tokens - self.compressed
        sliding = f" and {self.sliding_layers} with a window" if self.sliding_layers else ""
        lines = [
            f"{self.layers} layers{sliding}, {self.batch} x {self.tokens} tokens: {self.compressed} compressed, {left} exact; "
            f"bases per head: {self.bases}",
            f"{'':<16}{'MFLOP':>12}{'MB read':>12}{'MB kept':>12}{'FLOP/byte':>12}",
            _row("baseline", self.baseline),
            *(_row(f"  {name}", work) for name, work in self.parts.items() if work != Work()),
            _row("subspace", self.subspace),
            f"{'times less':<16}{self.flops_ratio:>12.2f}{self.bytes_ratio:>12.2f}{self.memory_ratio:>12.2f}",
        ]
        if self.baseline_seconds is not None and self.subspace_seconds is not None:
            lines.append(
                f"at least {self.baseline_seconds * 1e6:.1f} us ({self.baseline_bound}) and {self.subspace_seconds * 1e6:.1f} us "
                f"({self.subspace_bound}): {self.speedup:.2f} times faster"
            )
        return "\n".join(lines)


def _row(name: str, work: Work) -> str:
    return f"{name:<16}{work.flops / 1e6:>12.3f}{work.bytes / 1e6:>12.3f}{work.memory / 1e6:>12.3f}{work.intensity:>12.2f}"


@dataclass(frozen=True)
class _Layer:
    """One attention layer as the config has it."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    turned: int
    window: int | None


@dataclass(frozen=True)
class _Plan:
    """What `roofline` was asked for, checked."""

    ranks: tuple[int, int]
    tokens: int
    compressed: int
    chunk: int | None
    sketch_size: int | None
    batch: int
    dtype_bytes: int
    int8: bool
    aware: bool

    @property
    def bases(self) -> int:
        return min(self.compressed, 1) if self.chunk is None else -(-self.compressed // self.chunk)


def roofline(
    config: Any,
    rank: int | tuple[int, int],
    tokens: int,
    *,
    sinks: int = 4,
    recent: int = 64,
    dtype_bytes: int = 2,
    coefficients: Literal["int8"] | None = None,
    rotation: Literal["aware", "post"] = "aware",
    chunk: int | None = None,
    sketch_size: int | None = None,
    batch: int = 1,
    flops_per_second: float | None = None,
    bytes_per_second: float | None = None,
) -> Roofline:
    """Counts the attention of one decoding step, exact and over coefficients.

    Layers with a window stay exact. Cross-attention, linear attention and layers that read another layer's cache are not counted.

    Args:
        config: A model or its config.
        rank: Coefficients of each key and each value, or (of keys, of values).
        tokens: Tokens in each row, the new one included.
        sinks: First tokens that stay exact.
        recent: Newest tokens that stay exact.
        dtype_bytes: Bytes of a number of the model.
        coefficients: `"int8"`: a byte each, with a scale and a zero point of `dtype_bytes` for each token's keys and each token's values.
            None: in the model's type.
        rotation: Whether coefficients are of keys from before the rotation (`"aware"`) or from after it (`"post"`). Where keys aren't
            rotated, both cost the same.
        chunk: Tokens that share bases, which then belong to one row each. None: one pair of bases for each head, shared by all rows.
        sketch_size: Rows of the sketches from which bases are taken. None: there are no sketches.
        batch: Rows.
        flops_per_second: What the machine computes. With `bytes_per_second`, times are predicted.
        bytes_per_second: What the machine reads from its memory.
    """
    _check_integers(1, tokens=tokens, dtype_bytes=dtype_bytes, batch=batch)
    _check_integers(1, **{name: value for name, value in (("chunk", chunk), ("sketch_size", sketch_size)) if value is not None})
    _check_integers(0, sinks=sinks, recent=recent)
    _check_choice("coefficients", coefficients, (None, "int8"))
    _check_choice("rotation", rotation, ("aware", "post"))
    _check_machine(flops_per_second, bytes_per_second)
    layers = _read_layers(compat.split_model(config)[1])
    full = [layer for layer in layers if layer.window is None]
    ranks = _check_ranks(rank, full, sketch_size)
    compressed = max(0, tokens - sinks - recent)
    plan = _Plan(ranks, tokens, compressed, chunk, sketch_size, batch, dtype_bytes, coefficients == "int8", rotation == "aware")
    baseline, parts = _count(layers, plan)
    return Roofline(
        tokens, compressed, plan.bases, len(full), len(layers) - len(full), batch, baseline, parts, flops_per_second, bytes_per_second
    )


def _count(layers: list[_Layer], plan: _Plan) -> tuple[Work, dict[str, Work]]:
    """Exact attention, and the parts of attention over coefficients."""
    baseline, parts = Work(), dict.fromkeys(("exact", "coefficients", "bases", "rebuilding", "sketches", "sliding"), Work())
    for layer in layers:
        whole = _attend(layer, plan.tokens if layer.window is None else min(plan.tokens, layer.window), plan)
        baseline += whole
        for name, work in ({"sliding": whole} if layer.window is not None else _over_coefficients(layer, plan)).items():
            parts[name] += work
    return baseline, parts


def _attend(layer: _Layer, tokens: int, plan: _Plan) -> Work:
    """Exact attention of one layer to some tokens."""
    size = layer.key_size + layer.value_size
    stored = plan.batch * layer.kv_heads * tokens * size * plan.dtype_bytes
    return Work(2 * plan.batch * layer.heads * tokens * size, stored, stored)


def _over_coefficients(layer: _Layer, plan: _Plan) -> dict[str, Work]:
    """The parts of one layer; the module's docstring has the formulas."""
    n, bases = plan.compressed, plan.bases
    # Without a rotation in between, the query can meet the coefficients themselves.
    aware = plan.aware and layer.turned > 0
    each = plan.batch * layer.kv_heads
    r, s = plan.ranks
    d, e = layer.key_size, layer.value_size
    of_token = r + s + 4 * plan.dtype_bytes if plan.int8 else (r + s) * plan.dtype_bytes
    stored = each * n * of_token
    basis = layer.kv_heads * bases * (r * d + s * e) * plan.dtype_bytes
    of_rows = basis if plan.chunk is None else basis * plan.batch
    projections = 2 * plan.batch * layer.heads * bases * (s * e + (0 if aware else r * d))
    encoding = 2 * each * (r * d + s * e) if n else 0
    parts = {
        "exact": _attend(layer, plan.tokens - n, plan),
        "coefficients": Work(2 * plan.batch * layer.heads * n * ((d if aware else r) + s), stored, stored),
        "bases": Work(projections + encoding, of_rows, of_rows),
    }
    if aware and n:
        parts["rebuilding"] = Work(each * (2 * n * r * d + 3 * (n + 1) * layer.turned), n * layer.turned * plan.dtype_bytes)
    if plan.sketch_size is not None:
        flops = _sketch_flops(plan.sketch_size, d) + _sketch_flops(plan.sketch_size, e)
        read = 2 * (d + e) * _SKETCH_BYTES
        parts["sketches"] = Work(each * flops, each * read, each * read * plan.sketch_size)
    return parts


def _sketch_flops(rows: int, size: int) -> int:
    """What a sketch costs for each token, rounded up."""
    if 2 * rows < size:
        return 12 * rows * size + 72 * rows**2
    return 4 * size**2 + -(-9 * size**3 // rows)


def _read_layers(config: Any) -> list[_Layer]:
    """The layers of a decoder whose attention is counted."""
    if getattr(config, "kv_lora_rank", None) or hasattr(config, "swa_num_key_value_heads"):
        raise UnsupportedError(f"The heads of {config.model_type} have no keys and values of one size, which roofline counts with.")
    layers = []
    for index, (kind, arguments) in enumerate(compat.layer_plan(config)):
        if kind in _NOT_COUNTED:
            continue
        if kind != "full_attention" and kind not in _SLIDING:
            raise UnsupportedError(f"Layer {index} is of the type {kind!r}, of which roofline doesn't know what it reads.")
        own = config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config
        geometry = RotaryGeometry.from_config(config, layer_idx=index)
        heads, size = own.num_attention_heads, geometry.head_dim
        value_size = getattr(own, "v_head_dim", None) or size
        layers.append(_Layer(heads, _key_heads(own, heads), size, value_size, geometry.rotary_dim, arguments.get("sliding_window")))
    if not layers:
        raise UnsupportedError(f"{config.model_type} has no attention layers with a cache of their own.")
    return layers


def _key_heads(config: Any, heads: int) -> int:
    # Falcon's first architecture has one key head; its second repeats what it has for all heads before the cache gets it.
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return getattr(config, "num_key_value_heads", None) or heads


def _check_integers(least: int, **values: Any) -> None:
    for name, value in values.items():
        whole_number(name, value, least)


def _check_choice(name: str, value: Any, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ConfigError.of(name, " or ".join(map(repr, choices)), value)


def _check_machine(flops_per_second: float | None, bytes_per_second: float | None) -> None:
    for name, value in (("flops_per_second", flops_per_second), ("bytes_per_second", bytes_per_second)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise ConfigError.of(name, "a number above 0, or None", value)
    if (flops_per_second is None) != (bytes_per_second is None):
        raise ConfigError("flops_per_second, bytes_per_second: a prediction needs both. Give both, or neither.")


def _check_ranks(rank: Any, layers: list[_Layer], sketch_size: int | None) -> tuple[int, int]:
    """Ranks of keys and values that every compressed layer has room for."""
    ranks = (rank, rank) if isinstance(rank, int) else rank
    if not isinstance(ranks, tuple | list) or len(ranks) != 2:
        raise ConfigError.of("rank", "an integer, or two of them (of keys, of values)", rank)
    limits = (min((layer.key_size for layer in layers), default=None), min((layer.value_size for layer in layers), default=None))
    for each, limit in zip(ranks, limits, strict=True):
        _check_integers(1, rank=each)
        if limit is not None and each > limit:
            raise ConfigError.of("rank", f"at most {limit}, the size of a head", each)
        if sketch_size is not None and each > sketch_size:
            raise ConfigError.of("sketch_size", f"at least {each}, the rank", sketch_size, "A sketch has as many directions as rows.")
    return ranks[0], ranks[1]

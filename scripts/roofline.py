"""What attention over coefficients costs for each new token, in arithmetic, memory traffic and memory, from the config alone.

    python scripts/roofline.py [--model FOLDER_OR_HUB_ID] --rank 32 [--tokens 4096] [--flops 1e14 --bandwidth 1e12]

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
from typing import Any

from shared.cli import arguments, check_counts, run_script
from shared.results import table
from transformers import AutoConfig

from hf_kvcaches import compat
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, UnsupportedError

# Layers without a cache of their own that grows: they cost the same with any cache, and are not counted.
_NOT_COUNTED = frozenset({"linear_attention", "conv", "dummy"})
_SLIDING = frozenset({"sliding_attention", "chunked_attention"})
_SKETCH_BYTES = 4


@dataclass(frozen=True)
class Work:
    """The cost of attention, or of a part of it: operations and bytes read in one step, and bytes kept between steps."""

    flops: int = 0
    bytes: int = 0
    memory: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.memory + other.memory)

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The least time on a machine. A step also reads all weights, which no cache makes fewer."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


@dataclass(frozen=True)
class Roofline:
    """The cost of both kinds of attention, each in all layers; layers with a window are exact on both sides."""

    tokens: int  # in each row
    compressed: int  # how many of them are kept as coefficients
    layers: int  # that are compressed
    sliding_layers: int
    baseline: Work  # exact attention
    # Of attention over coefficients: exact, coefficients, bases, rebuilding (keys that are rotated after decoding), sketches, sliding.
    parts: dict[str, Work] = field(hash=False)

    @property
    def subspace(self) -> Work:
        """Attention over coefficients: all parts."""
        return sum(self.parts.values(), Work())

    def ratio(self, name: str) -> float:
        """How many times fewer `flops`, `bytes` or bytes of `memory`."""
        return getattr(self.baseline, name) / getattr(self.subspace, name)

    def __str__(self) -> str:
        works = {
            "baseline": self.baseline,
            **{name: work for name, work in self.parts.items() if work != Work()},
            "subspace": self.subspace,
        }
        numbers = lambda work: [f"{value / 1e6:.3f}" for value in (work.flops, work.bytes, work.memory)]  # noqa: E731
        lines = [[name, *numbers(work), f"{work.flops / max(1, work.bytes):.2f}"] for name, work in works.items()]
        lines.append(["times less", *(f"{self.ratio(name):.2f}" for name in ("flops", "bytes", "memory")), ""])
        head = f"{self.layers} layers and {self.sliding_layers} with a window, {self.tokens} tokens, {self.compressed} of them compressed"
        return f"{head}\n{table(['', 'MFLOP', 'MB read', 'MB kept', 'FLOP/byte'], lines)}"


@dataclass(frozen=True)
class _Layer:
    """One attention layer as the config has it."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    turned: int  # dimensions that are rotated
    window: int | None


@dataclass(frozen=True)
class Plan:
    """What is compressed, and how.

    Args:
        ranks: Coefficients of each key and of each value.
        tokens: Tokens in each row, the new one included.
        sinks: First tokens that stay exact.
        recent: Newest tokens that stay exact.
        dtype_bytes: Bytes of a number of the model.
        int8: Whether coefficients take a byte, with a scale and a zero point of `dtype_bytes` for each token's keys and values.
        aware: Whether coefficients are of keys from before the rotation.
        chunk: Tokens that share bases, which then belong to one row each. None: one pair of bases for each head, shared by all rows.
        sketch_size: Rows of the sketches from which bases are taken. None: there are no sketches.
        batch: Rows.
    """

    ranks: tuple[int, int]
    tokens: int
    sinks: int = 4
    recent: int = 64
    dtype_bytes: int = 2
    int8: bool = False
    aware: bool = True
    chunk: int | None = None
    sketch_size: int | None = None
    batch: int = 1

    @property
    def compressed(self) -> int:
        return max(0, self.tokens - self.sinks - self.recent)

    @property
    def bases(self) -> int:
        return min(self.compressed, 1) if self.chunk is None else -(-self.compressed // self.chunk)


def roofline(config: Any, plan: Plan) -> Roofline:
    """Count the attention of one decoding step of a model or its config, exact and over coefficients.

    Layers with a window stay exact. Cross-attention, linear attention and layers that read another layer's cache are not counted.
    """
    layers = _read_layers(compat.split_model(config)[1])
    full = [layer for layer in layers if layer.window is None]
    for rank, sizes in zip(plan.ranks, ([layer.key_size for layer in full], [layer.value_size for layer in full]), strict=True):
        if sizes and rank > min(sizes):
            raise ConfigError.of("rank", f"at most {min(sizes)}, the size of a head", rank)
        if plan.sketch_size is not None and rank > plan.sketch_size:
            raise ConfigError.of("sketch_size", f"at least {rank}, the rank", plan.sketch_size, "A sketch has as many directions as rows.")
    return Roofline(plan.tokens, plan.compressed, len(full), len(layers) - len(full), *_count(layers, plan))


def _count(layers: list[_Layer], plan: Plan) -> tuple[Work, dict[str, Work]]:
    """Exact attention, and the parts of attention over coefficients."""
    baseline, parts = Work(), dict.fromkeys(("exact", "coefficients", "bases", "rebuilding", "sketches", "sliding"), Work())
    for layer in layers:
        whole = _attend(layer, plan.tokens if layer.window is None else min(plan.tokens, layer.window), plan)
        baseline += whole
        for name, work in ({"sliding": whole} if layer.window is not None else _over_coefficients(layer, plan)).items():
            parts[name] += work
    return baseline, parts


def _attend(layer: _Layer, tokens: int, plan: Plan) -> Work:
    """Exact attention of one layer to some tokens."""
    size = layer.key_size + layer.value_size
    stored = plan.batch * layer.kv_heads * tokens * size * plan.dtype_bytes
    return Work(2 * plan.batch * layer.heads * tokens * size, stored, stored)


def _over_coefficients(layer: _Layer, plan: Plan) -> dict[str, Work]:
    """The parts of one layer; the module's docstring has the formulas."""
    n, bases = plan.compressed, plan.bases
    # Without a rotation in between, the query can meet the coefficients themselves.
    aware = plan.aware and layer.turned > 0
    rows = plan.batch * layer.kv_heads
    r, s = plan.ranks
    d, e = layer.key_size, layer.value_size
    of_token = r + s + 4 * plan.dtype_bytes if plan.int8 else (r + s) * plan.dtype_bytes
    stored = rows * n * of_token
    basis = layer.kv_heads * bases * (r * d + s * e) * plan.dtype_bytes
    of_rows = basis if plan.chunk is None else basis * plan.batch
    projections = 2 * plan.batch * layer.heads * bases * (s * e + (0 if aware else r * d))
    encoding = 2 * rows * (r * d + s * e) if n else 0
    parts = {
        "exact": _attend(layer, plan.tokens - n, plan),
        "coefficients": Work(2 * plan.batch * layer.heads * n * ((d if aware else r) + s), stored, stored),
        "bases": Work(projections + encoding, of_rows, of_rows),
    }
    if aware and n:
        parts["rebuilding"] = Work(rows * (2 * n * r * d + 3 * (n + 1) * layer.turned), n * layer.turned * plan.dtype_bytes)
    if plan.sketch_size is not None:
        flops = _sketch_flops(plan.sketch_size, d) + _sketch_flops(plan.sketch_size, e)
        read = 2 * (d + e) * _SKETCH_BYTES
        parts["sketches"] = Work(rows * flops, rows * read, rows * read * plan.sketch_size)
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
    for index, (kind, options) in enumerate(compat.layer_plan(config)):
        if kind in _NOT_COUNTED:
            continue
        if kind != "full_attention" and kind not in _SLIDING:
            raise UnsupportedError(f"Layer {index} is of the type {kind!r}, of which the roofline doesn't know what it reads.")
        own = config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config
        geometry = RotaryGeometry.from_config(config, layer_idx=index)
        heads, size = own.num_attention_heads, geometry.head_dim
        value_size = getattr(own, "v_head_dim", None) or size
        layers.append(_Layer(heads, _key_heads(own, heads), size, value_size, geometry.rotary_dim, options.get("sliding_window")))
    if not layers:
        raise UnsupportedError(f"{config.model_type} has no attention layers with a cache of their own.")
    return layers


def _key_heads(config: Any, heads: int) -> int:
    # Falcon's first architecture has one key head; its second repeats what it has for all heads before the cache gets it.
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return getattr(config, "num_key_value_heads", None) or heads


def main() -> None:
    parser = arguments(__doc__, "model")
    parser.add_argument(
        "--rank", type=int, nargs="+", required=True, help="coefficients of each key and each value, or of keys and of values"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="in each row")
    for name, default in (("sinks", 4), ("recent", 64), ("dtype-bytes", 2), ("batch", 1), ("chunk", None), ("sketch-size", None)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--int8", action="store_true", help="coefficients of 8 bits")
    parser.add_argument("--rotation", choices=("aware", "post"), default="aware")
    parser.add_argument("--flops", type=float, help="that a machine computes in a second")
    parser.add_argument("--bandwidth", type=float, help="bytes that it reads in a second")
    args = parser.parse_args()
    check_counts(args, ["rank", "tokens", "dtype_bytes", "batch", "chunk", "sketch_size"])
    check_counts(args, ["sinks", "recent"], least=0)
    options = {name: getattr(args, name) for name in ("sinks", "recent", "dtype_bytes", "int8", "chunk", "sketch_size", "batch")}
    counts = roofline(
        AutoConfig.from_pretrained(args.model), Plan((args.rank[0], args.rank[-1]), args.tokens, aware=args.rotation == "aware", **options)
    )
    print(counts)
    if args.flops and args.bandwidth:
        before, after = (work.seconds(args.flops, args.bandwidth) for work in (counts.baseline, counts.subspace))
        print(f"at least {before * 1e6:.1f} us, and {after * 1e6:.1f} us over coefficients: {before / after:.2f} times faster")


if __name__ == "__main__":
    run_script(main)

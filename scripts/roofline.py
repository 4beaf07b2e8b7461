"""What attention over coefficients costs for each new token, in arithmetic, memory traffic and memory, from the config alone.

    python scripts/roofline.py [--model FOLDER_OR_HUB_ID] --rank 32 [--tokens 4096] [--flops 1e14 --bandwidth 1e12]

Counted is one decoding step's attention of one row, in all layers without a window. For each key head, with g query heads to it, keys and
values of size d, n compressed and x exact tokens, and ranks r and s (a multiplication and an addition are 2 FLOPs):

| part         | FLOPs                                 | elements read   |
|--------------|---------------------------------------|-----------------|
| baseline     | 4 g (n + x) d                         | 2 (n + x) d     |
| exact        | 4 g x d                               | 2 x d           |
| coefficients | 2 g n (r + s); aware: 2 g n (d + s)   | n (r + s)       |
| bases        | 2 (g + 1) (r + s) d; aware: no g r d  | (r + s) d       |
| rebuilding   | aware: 2 n r d + 3 (n + 1) t          | n t, once for all heads |

Coefficients of keys from before the rotation ("aware") are decoded and rotated for every query, t dimensions of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shared.cli import arguments, check_counts, run_script
from shared.results import table
from transformers import AutoConfig

from hf_kvcaches import compat
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, UnsupportedError


class Work(NamedTuple):
    """Operations and bytes read in one step, and bytes kept between steps."""

    flops: int = 0
    bytes: int = 0
    memory: int = 0

    def plus(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.memory + other.memory)


class Plan(NamedTuple):
    """What is compressed, and how."""

    ranks: tuple[int, int]  # coefficients of each key and of each value
    tokens: int  # the new one included
    sinks: int = 4  # first tokens that stay exact
    recent: int = 64  # newest tokens that stay exact
    dtype_bytes: int = 2
    int8: bool = False  # coefficients of a byte, with a scale and a zero point of `dtype_bytes` for a token's keys and values
    aware: bool = True  # coefficients of keys from before the rotation


def roofline(config: Any, plan: Plan) -> tuple[Work, dict[str, Work]]:
    """Exact attention, and the parts of attention over coefficients, summed over layers."""
    config = compat.split_model(config)[1]
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedError(f"The heads of {config.model_type} have no keys and values of one size, which roofline counts with.")
    layers = [index for index, (kind, _) in enumerate(compat.layer_plan(config)) if kind == "full_attention"]
    if not layers:
        raise UnsupportedError(f"{config.model_type} has no layers with full attention.")
    baseline, parts = Work(), dict.fromkeys(("exact", "coefficients", "bases", "rebuilding"), Work())
    for layer in layers:
        geometry = RotaryGeometry.from_config(config, layer_idx=layer)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        baseline = baseline.plus(attention(heads, kv_heads, geometry.head_dim, plan.tokens, plan.dtype_bytes))
        for name, work in layer_parts(heads, kv_heads, geometry.head_dim, geometry.rotary_dim, plan).items():
            parts[name] = parts[name].plus(work)
    return baseline, parts


def attention(heads: int, kv_heads: int, size: int, tokens: int, dtype_bytes: int) -> Work:
    """Exact attention of one layer."""
    stored = 2 * kv_heads * tokens * size * dtype_bytes
    return Work(4 * heads * tokens * size, stored, stored)


def layer_parts(heads: int, kv_heads: int, size: int, rotated: int, plan: Plan) -> dict[str, Work]:
    """The parts of one layer, by the formulas above."""
    (r, s), compressed = plan.ranks, max(0, plan.tokens - plan.sinks - plan.recent)
    if max(r, s) > size:
        raise ConfigError.of("--rank", f"at most {size}, the size of a head", max(r, s))
    # Keys that are not rotated meet the query as coefficients.
    aware, used = plan.aware and rotated > 0, min(compressed, 1)
    stored = kv_heads * compressed * (r + s + 4 * plan.dtype_bytes if plan.int8 else (r + s) * plan.dtype_bytes)
    bases = used * kv_heads * (r + s) * size * plan.dtype_bytes
    projections = 2 * used * size * (heads * (s if aware else r + s) + kv_heads * (r + s))
    parts = {
        "exact": attention(heads, kv_heads, size, plan.tokens - compressed, plan.dtype_bytes),
        "coefficients": Work(2 * heads * compressed * ((size if aware else r) + s), stored, stored),
        "bases": Work(projections, bases, bases),
    }
    if aware and compressed:
        flops = kv_heads * (2 * compressed * r * size + 3 * (compressed + 1) * rotated)
        parts["rebuilding"] = Work(flops, compressed * rotated * plan.dtype_bytes)
    return parts


def main() -> None:
    parser = arguments(__doc__, "model")
    parser.add_argument("--rank", type=int, nargs="+", required=True, help="of keys and values, or of keys and of values")
    parser.add_argument("--tokens", type=int, default=4096)
    for name, default in (("sinks", 4), ("recent", 64), ("dtype-bytes", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--int8", action="store_true", help="coefficients of 8 bits")
    parser.add_argument("--rotation", choices=("aware", "post"), default="aware")
    parser.add_argument("--flops", type=float, help="that a machine computes in a second")
    parser.add_argument("--bandwidth", type=float, help="bytes that it reads in a second")
    args = parser.parse_args()
    check_counts(args, ["rank", "tokens", "dtype_bytes"])
    check_counts(args, ["sinks", "recent"], least=0)
    ranks = (args.rank[0], args.rank[-1])
    plan = Plan(ranks, args.tokens, args.sinks, args.recent, args.dtype_bytes, args.int8, args.rotation == "aware")
    baseline, parts = roofline(AutoConfig.from_pretrained(args.model), plan)
    subspace = Work(*map(sum, zip(*parts.values(), strict=True)))
    works = {"baseline": baseline, **parts, "subspace": subspace}
    lines = [[name, *(f"{value / 1e6:.3f}" for value in work)] for name, work in works.items()]
    lines.append(["times less", *(f"{before / after:.2f}" for before, after in zip(baseline, subspace, strict=True))])
    print(table(["", "MFLOP", "MB read", "MB kept"], lines))
    if args.flops and args.bandwidth:
        before, after = (max(work.flops / args.flops, work.bytes / args.bandwidth) for work in (baseline, subspace))
        print(f"at least {before * 1e6:.1f} us, and {after * 1e6:.1f} us over coefficients: {before / after:.2f} times faster")


if __name__ == "__main__":
    run_script(main)

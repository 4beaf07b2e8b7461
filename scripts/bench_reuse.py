"""Times the first token of a prompt of which most is stored, at the size of a real model, against what the saved FLOPs allow.

    python scripts/bench_reuse.py [--layers 28] [--redis redis://localhost/0] [--csv docs/benchmarks/reuse-speed.csv]

The model is a Llama with random weights. Before anything is timed, the logits of a prefix from a bit-equal store are compared with those of
no reuse. Then every prompt is asked on all sides in turns, in one process; the first hit of each side does not count. On a CPU times are
those of the processor, so that other jobs matter little (set OMP_NUM_THREADS=1), on a GPU those of the clock. Memory is measured in a
request of its own.

`prefix`: nine tenths of the prompt begin an earlier one; beside it a copy of a `DynamicCache` that holds these. `moved`: five pages of an
earlier prompt in another order, `mode="approximate"`. `aligned`: an earlier prompt with ten other words, in a warm start. `possible` is
what the saved FLOPs allow: 1 / (1 - their share), and `efficiency` the share of it that is reached. `extra` is the peak memory of a hit,
beside the weights, the store and what the cache keeps, as a share of what the reused keys and values take. `no repeats` are whole requests
of which nothing is stored. `network` is arithmetic: what it takes to fetch a stored token at several speeds, to compute it as measured
here, and up to how many tokens a second fetching wins.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from _reuse_cells import PROMPTS, Answer, Locations, Way, ask, cold, segments, ways
from shared.cli import OPTIONS, arguments, begin, check_counts, run_script
from shared.models import Pair, Shape, random_ids
from shared.results import Results, Row, print_environment, show
from shared.timing import in_turns, ratios, spread
from transformers import DynamicCache

from hf_kvcaches import SegmentReuseCache, SegmentStore

SECTIONS = ("prefix", "moved", "aligned", "no repeats", "network")
COLUMNS = (
    "section side stored model dtype tokens count cold_ms time_ms time_q1_ms time_q3_ms ratio ratio_q1 ratio_q3 saved possible "
    "efficiency extra bytes gbps fetch_ms compute_ms faster_above"
).split()
SHOWN = {
    "stored": "{stored}",
    "n": "{count}",
    "cold ms": "{cold_ms:.0f}",
    "ms": "{time_ms:.0f}",
    "speed-up": "{ratio:.2f}x",
    "quartiles": "{ratio_q1:.2f}-{ratio_q3:.2f}",
    "saved": "{saved:.1%}",
    "possible": "{possible:.2f}x",
    "efficiency": "{efficiency:.2f}",
    "extra": "{extra:.2f}x",
    "bytes a token": "{bytes:.0f}",
    "Gb/s": "{gbps:g}",
    "fetch ms": "{fetch_ms:.2f}",
    "compute ms": "{compute_ms:.2f}",
    "worth it below tokens/s": "{faster_above:.0f}",
}
TOLERANCE = 1e-4
NETWORKS = (1, 10, 100)  # Gb/s
CODEC = 0.125  # of a 16-bit cache's bytes, the default of `KVCodec.calibrate`
NO_REUSE = "no reuse"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    layers: int = 28
    hidden: int = 1024
    tokens: int = 2048
    hits: int = 3
    new_tokens: int = 64  # of a whole request
    dtype: str = "float32"

    def model(self, device: torch.device) -> Pair:
        dim = min(128, self.hidden // 8)
        heads = 2 * self.hidden // dim, self.hidden // dim, dim
        return Shape(self.hidden, self.layers, *heads, 3 * self.hidden, min(4096, 4 * self.hidden)).random(device, self.dtype)


QUICK = Size(2, 64, 400, 2, 3)


class Run:
    """One run: what is measured where."""

    def __init__(self, size: Size, device: torch.device, locations: Locations) -> None:
        self.size, self.pair, self.locations = size, size.model(device), locations
        self.vocabulary = int(self.pair.plain.config.vocab_size)
        self.first = self._prompt(0)
        self.labels = {"model": f"{size.layers} x {size.hidden}", "dtype": size.dtype, "tokens": size.tokens}
        self.cold_seconds: list[float] = []

    def _prompt(self, seed: int) -> torch.Tensor:
        return random_ids(self.vocabulary, 1, self.size.tokens, seed=seed).to(self.pair.device)

    def bytes_per_token(self, stored: Any, itemsize: int) -> int:
        config = self.pair.plain.config
        elements = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
        return elements * {"int8": 8, "int4": 4, None: 8 * itemsize}[stored] // 8

    def hits(self, section: str) -> Iterator[Row]:
        *prompts, last = PROMPTS[section](self.first, self.size.hits + 2, self.vocabulary)
        sides: dict[Any, Way] = {NO_REUSE: cold(self.pair), **ways(section, self.pair, self.locations, self.first)}
        works = {side: lambda number, way=way: ask(way, prompts[number]) for side, way in sides.items()}
        answers = {side: own[1:] for side, own in in_turns(works, len(prompts)).items()}
        peaks = {}
        for side, way in sides.items():
            peaks[side] = ask(way, last, memory=True)
            way.close()
        self.locations.clear()
        base = [answer.seconds for answer in answers.pop(NO_REUSE)]
        self.cold_seconds += base
        for (backend, stored), own in answers.items():
            yield {"side": backend, "stored": stored, **self.labels, **self._hit(base, own, peaks[backend, stored])}

    def _hit(self, base: Sequence[float], hits: Sequence[Answer], peak: Answer) -> Row:
        seconds = [hit.seconds for hit in hits]
        row = {"count": len(hits), "cold_ms": statistics.median(base) * 1e3, **spread("time", seconds, 1e3), **ratios(base, seconds)}
        row["saved"] = statistics.median(hit.saved for hit in hits)
        row["possible"] = 1 / (1 - row["saved"])
        row["efficiency"] = row["ratio"] / row["possible"]
        if peak.reused:
            row["extra"] = peak.extra / (peak.reused * self.bytes_per_token(None, self.pair.plain.dtype.itemsize))
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}

    def no_repeats(self) -> Iterator[Row]:
        sides: dict[str, Way] = {NO_REUSE: cold(self.pair)}
        for mode in ("exact", "approximate"):
            sides[mode] = segments(self.pair, "memory", "bit-equal", mode)
        prompts = [self._prompt(100 + number) for number in range(self.size.hits + 1)]
        works = {side: lambda number, way=way: ask(way, prompts[number], self.size.new_tokens) for side, way in sides.items()}
        answers = {side: [answer.seconds for answer in own[1:]] for side, own in in_turns(works, len(prompts)).items()}
        for way in sides.values():
            way.close()
        base = answers[NO_REUSE]
        for side, seconds in answers.items():
            row = {"side": side, **self.labels, "count": len(seconds), "cold_ms": round(statistics.median(base) * 1e3, 4)}
            yield row | spread("time", seconds, 1e3) | ratios(base, seconds)

    def network(self) -> Iterator[Row]:
        if not self.cold_seconds:
            self.cold_seconds.append(ask(cold(self.pair), self.first).seconds)
        compute = statistics.median(self.cold_seconds) / self.size.tokens * 1e3
        exact = {name: self.bytes_per_token(None, itemsize) for name, itemsize in (("float32", 4), ("bfloat16", 2))}
        forms = {**exact, "int8": self.bytes_per_token("int8", 1), f"KVCodec {CODEC:g}": round(CODEC * exact["bfloat16"])}
        for stored, size in forms.items():
            for gbps in NETWORKS:
                per_second = gbps * 1e9 / 8 / size
                times = {"fetch_ms": round(1e3 / per_second, 5), "compute_ms": round(compute, 4), "faster_above": round(per_second)}
                yield {"side": "network", "stored": stored, **self.labels, "bytes": size, "gbps": gbps, **times}

    @torch.no_grad()
    def prove(self) -> str:
        """Compare logits of a prefix from a bit-equal store with those of no reuse."""
        plain, switched, reused, worst = self.pair.plain, self.pair.switched, 0, 0.0
        with SegmentStore("memory", quantization=None) as store:
            for ids in (self.first, *PROMPTS["prefix"](self.first, 1, self.vocabulary)):
                cache = SegmentReuseCache(switched, store, mode="exact")
                ours = switched(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
                reused = cache.report().reused_tokens
                del cache
                store.flush()
                full = plain(input_ids=ids, past_key_values=DynamicCache(config=plain.config), logits_to_keep=1).logits
                worst = max(worst, float((ours.float() - full.float()).abs().max()))
        limit = TOLERANCE if self.size.dtype == "float32" else float(full.abs().max()) * 8 * torch.finfo(full.dtype).eps
        if not worst <= limit or not reused:
            raise SystemExit(f"logits differ by {worst:.3g}, with {reused} tokens reused: nothing timed")
        return f"a prefix from a bit-equal store gives the logits of no reuse, to {worst:.1e}, with {reused} tokens reused"


def main() -> None:
    parser = arguments(__doc__, "device", "threads", "quick")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="only these")
    parser.add_argument("--csv", **OPTIONS["csv"] | {"help": "write every number here; sections that are in it and not measured stay"})
    for name in ("layers", "hidden", "tokens", "hits"):
        parser.add_argument(f"--{name}", type=int, help=f"default: {getattr(Size(), name)}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32")
    parser.add_argument("--backends", nargs="+", choices=("memory", "disk"), default=["memory", "disk"], help="where stores lie")
    parser.add_argument("--redis", metavar="URL", help="an empty database, to measure reuse through it, too; it is cleared")
    args = parser.parse_args()
    check_counts(args, ["layers", "hidden", "tokens"])
    check_counts(args, ["hits"], least=2)  # fewer have no quartiles
    device = begin(args)
    print_environment(device)
    given = {name: getattr(args, name) for name in ("layers", "hidden", "tokens", "hits", "dtype") if getattr(args, name) is not None}
    locations = Locations([*args.backends, *(["Redis"] if args.redis else [])], args.redis)
    run = Run(replace(QUICK if args.quick else Size(), **given), device, locations)
    print(run.prove(), flush=True)
    works: dict[str, Any] = {section: lambda section=section: run.hits(section) for section in PROMPTS}
    works |= {"no repeats": run.no_repeats, "network": run.network}
    results = Results(args.csv, COLUMNS, device)
    results.drop(args.sections)
    for section in args.sections:
        rows = [{"section": section, **row} for row in works[section]()]
        results.add(rows)
        print(show(rows, {section: "{side}", **SHOWN}), "\n", flush=True)


if __name__ == "__main__":
    run_script(main)

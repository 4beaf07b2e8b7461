"""Times prompts of which nothing is reused: what a cache costs where it can't help, beside transformers' DynamicCache.

    python scripts/bench_prefill.py [--device auto] [--tokens 1000] [--rounds 11] [--csv docs/benchmarks/prefill.csv]

Each round gives every cache a prompt of its own, whose first token is timed; sides run in turns on the same random weights. What a store
writes behind the first token is waited for outside of the clock. `own` is the share of the time that a profiler finds in this package's
files, its own cost included: where the clock differs from run to run by more than a percent, it bounds what the package does.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from shared.bars import Bar, verdicts
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.models import Pair, Shape, random_ids
from shared.results import Row, environment, print_environment, show, write_csv
from shared.timing import in_turns, own_share, ratios, seconds_of, spread
from transformers import Cache, DynamicCache

from hf_kvcaches import GrowingCache, SegmentReuseCache, SegmentStore, WarmStartCache, WarmStartLibrary

SIZES = {"full": (1024, 8, 16, 2816), "quick": (64, 2, 4, 192)}
COLUMNS = {
    "cache": "{side}",
    "ms": "{time_ms:.2f}",
    "time over DynamicCache": "{ratio:.4f}",
    "quartiles": "{ratio_q1:.3f}-{ratio_q3:.3f}",
    "own": "{own:.3%}",
}
BARS = [Bar("at most 1% of the time over DynamicCache", {}, "ratio", most=1.01, also=lambda row: row["side"] != "dynamic")]


Prompts = Callable[[], torch.Tensor]  # makes prompts that differ from their first token on


def embed(texts: list[str]) -> torch.Tensor:
    """An embedding of each text that is far from that of others."""
    vectors = torch.stack([torch.randn(32, generator=torch.Generator().manual_seed(sum(map(ord, text)))) for text in texts])
    return torch.nn.functional.normalize(vectors)


def makers(pair: Pair, prompts: Prompts) -> dict[str, Callable[[], Cache]]:
    """How each cache is made, in front of a store or a library with other prompts."""
    model, store = pair.switched, SegmentStore("memory")
    library = WarmStartLibrary(model, pair.tokenizer, encoder=embed)
    for _ in range(2):
        library.add([prompts()[0].tolist()])
    return {
        "dynamic": lambda: DynamicCache(config=pair.plain.config),
        "growing": lambda: GrowingCache(model),
        "segments": lambda: SegmentReuseCache(model, store, mode="auto"),
        "warmstart": lambda: WarmStartCache(model, library),
    }


@torch.no_grad()
def measure(pair: Pair, prompts: Prompts, rounds: int) -> list[Row]:
    """A row for each cache."""
    makes = makers(pair, prompts)

    def first_token(name: str) -> tuple[float, Any]:
        cache, ids = makes[name](), prompts().to(pair.device)
        model = pair.plain if name == "dynamic" else pair.switched
        call = lambda: model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)  # noqa: E731
        return seconds_of(call, pair.device), cache

    def timed(name: str) -> float:
        seconds, cache = first_token(name)
        if isinstance(cache, SegmentReuseCache):
            cache.store.flush()
        return seconds

    seconds = in_turns({name: lambda _, name=name: timed(name) for name in makes}, rounds, warm_up=2)
    return [
        {
            "side": name,
            **spread("time", times, 1e3),
            **ratios(times, seconds["dynamic"]),
            "own": statistics.median(own_share(lambda name=name: first_token(name)) for _ in range(3)),
        }
        for name, times in seconds.items()
    ]


def main() -> None:
    parser = arguments(__doc__, "device", "threads", "csv", "quick")
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    check_counts(args, ["tokens", "rounds"], least=2)
    device = begin(args)
    print_environment(device)
    _, tokenizer = load("base", device)
    shape = Shape(*SIZES["quick" if args.quick else "full"], vocabulary=len(tokenizer))
    pair = replace(Pair.random(shape, "gqa", device), tokenizer=tokenizer)
    numbers = itertools.count(1)
    prompts = lambda: random_ids(shape.vocabulary, 1, args.tokens, seed=next(numbers))  # noqa: E731
    rows = measure(pair, prompts, args.rounds)
    print(f"{show(rows, COLUMNS)}\n{verdicts(BARS, rows)}")
    if args.csv:
        write_csv(args.csv, rows, environment(device))


if __name__ == "__main__":
    run_script(main)

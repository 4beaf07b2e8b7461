"""Times SegmentReuseCache on prompts as agents send them: until the first token, with 32 tokens more, and part by part.

    python scripts/bench_segments.py [--device auto] [--csv docs/benchmarks/segments-speed.csv] [--plot docs/benchmarks/segments-speed.png]

Before anything is timed, the logits of prefix caching are compared with those of no reuse. Then every prompt is asked on all sides in
turns, in one process, and a ratio is taken within a prompt: the time without reuse (DynamicCache) by that of the side. The making of the
cache is in the time; storing, which is done while an answer is generated, has rows of its own. Each side has its own store in memory,
empty at first; all prompts count, the first too.

`no repeats` are prompts without anything to reuse. `larger` is a Llama with random weights, for which four fifths of a prompt have been
seen in another order. `look-up` is among random segments without tensors, `sharing` the share of tokens that are reused where another
process has stored them, in a folder, and in the Redis that `--redis` names. The policy of "auto" is the one that `calibrate_segments.py`
chooses for the model of this repository, which admits any surroundings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from _segments_parts import POLICY, agents, lookups, sharing
from _segments_sides import APPROXIMATE, AUTO, NONE, PREFIX, moved, passes, prove, rows_of
from shared.bars import Bar
from shared.cli import run_script
from shared.models import LARGER, Pair, Shape
from shared.plot import Panel
from shared.results import Row, rows_where
from shared.sections import TIMES, Output, begin_sections, run_sections, section_arguments

SECTIONS = ("requests", "no repeats", "larger", "look-up", "sharing")
COLUMNS = "section measure workload side tokens count time_ms time_q1_ms time_q3_ms ratio ratio_q1 ratio_q3 reused value unit".split()
SHOWN = {
    "": "{measure}, {side}, {tokens} tokens",
    "workload": "{workload}",
    **TIMES,
    "reused": "{reused:.1%}",
    "rate": "{value:g} {unit}",
}
ALL_SIDES = (NONE, PREFIX, AUTO, APPROXIMATE)
HIT_RATE = 0.005  # by how much hit rates may differ: which of two segments that are equally like a third is found first is left to chance


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    requests: int = 200  # of agents
    long_requests: int = 60  # as many of them have a long answer
    new_tokens: int = 33  # of a long answer
    repeats: tuple[int, int] = (40, 3)  # prompts without repeats, and how many passes over them until the first token
    shape: Shape = LARGER  # of the larger model
    tokens: tuple[int, ...] = (1024, 2048, 4096)  # of its prompts
    rounds: int = 5  # how many prompts of each length
    segments: int = 100_000  # in the index
    calls: int = 200  # look-ups
    shared: int = 60  # requests for two processes
    quick: bool = False


QUICK = Size(3, 2, 3, (2, 1), Shape(64, 4, 4, 96, 128), (300,), 2, 200, 20, 4, quick=True)


class Run:
    """One run: what is measured where."""

    def __init__(self, size: Size, device: torch.device, redis: str | None = None) -> None:
        self.size, self.device, self.redis = size, device, redis
        self.pair, self.prompts = agents(size.requests, device)
        # Of another seed, so that nothing of what is measured is stored before.
        self.first = self.fresh(1 if size.quick else 2, seed=1)

    def fresh(self, count: int, seed: int = 0) -> list[torch.Tensor]:
        """Prompts without repeats."""
        from tests.testbed.agents import no_repeat_workload

        requests = no_repeat_workload(self.pair.tokenizer, requests=count, seed=seed)
        return [torch.tensor([request.prompt], device=self.device) for request in requests]

    def _asked(self, workload: str, names: Sequence[str], prompts: Sequence[torch.Tensor], long: int, count: int = 1) -> Iterator[Row]:
        """Rows for the first token of all prompts, and for long answers to the first `long` of them, which are asked once."""
        answers = passes(names, self.pair, POLICY, prompts, count=count, first=self.first)
        yield from rows_of(answers, "first token", workload=workload)
        answers = passes(names, self.pair, POLICY, prompts[:long], self.size.new_tokens, first=self.first)
        yield from rows_of(answers, "whole request", workload=workload)

    def requests(self) -> Iterator[Row]:
        yield from self._asked("agents", ALL_SIDES, self.prompts, self.size.long_requests)

    def no_repeats(self) -> Iterator[Row]:
        count, times = self.size.repeats
        yield from self._asked("no repeats", (NONE, AUTO), self.fresh(count), count, times)

    def larger(self) -> Iterator[Row]:
        size, vocabulary = self.size, self.size.shape.vocabulary
        pair = Pair.random(size.shape, "gqa", self.device)
        print(prove(pair, moved(size.tokens[0], 1, vocabulary, self.device), "the larger model"))
        for tokens in size.tokens:
            prompts = moved(tokens, size.rounds + 1, vocabulary, self.device)
            answers = passes(ALL_SIDES, pair, POLICY, prompts, first=prompts[:1])
            # The first prompt brings the segments in.
            yield from rows_of({name: own[1:] for name, own in answers.items()}, "first token", workload="moved", tokens=tokens)

    def look_up(self) -> Iterator[Row]:
        yield from lookups(self.size.segments, self.size.calls)

    def sharing(self) -> Iterator[Row]:
        _, prompts = agents(self.size.shared, self.device)
        with tempfile.TemporaryDirectory() as folder:
            yield from sharing("disk", f"disk:{folder}/store", self.pair, prompts)
        if self.redis is not None:
            yield from sharing("Redis", self.redis, self.pair, prompts)


def bars() -> list[Bar]:
    first = {"section": "requests", "measure": "first token", "side": AUTO}
    promised = [Bar("auto at least 2.5x as fast as no reuse to the first token, median", first, least=2.5)]
    for measure in ("first token", "whole request"):
        where = {"section": "no repeats", "measure": measure, "side": AUTO}
        text = f"auto takes at most 1.03x the time of no reuse where nothing repeats, {measure}"
        promised.append(Bar(text, where, lambda row: 1 / row["ratio"], most=1.03))
    for measure in ("prefix", "runs"):
        # A thousandth of a second and more is not below it.
        where = {"section": "look-up", "measure": measure}
        promised.append(Bar(f"look-up below 1 ms, {measure}", where, "time_ms", most=0.9999, unit=" ms"))
    for backend in ("disk", "Redis"):
        where = {"section": "sharing", "workload": backend, "measure": "hit rate lost"}
        promised.append(Bar(f"a second process reuses as much as one alone, {backend}", where, "value", most=HIT_RATE, unit=" less"))
    return promised


def panels(rows: Sequence[Row]) -> list[Panel]:
    timed = [row for row in rows if "ratio" in row and row["side"] != NONE]
    requests, larger = (rows_where(timed, section=section) for section in ("requests", "larger"))
    look_up = rows_where(rows, section="look-up")
    return [
        Panel("times as fast as no reuse", requests, "{side}", "{workload}\n{measure}", "ratio", levels=(1.0,)),
        Panel("larger: times as fast as no reuse", larger, "{side}, {workload}", "tokens", "ratio", log="x"),
        Panel("look-up", look_up, "{measure}", "{measure}\n{side}", "time_ms", log="y"),
    ]


def main() -> None:
    parser = section_arguments(__doc__, SECTIONS)
    parser.add_argument("--requests", type=int, help="of agents; default: 200")
    parser.add_argument("--redis", metavar="URL", help="an empty database, to measure sharing through it; it is cleared")
    args = parser.parse_args()
    device = begin_sections(args, "requests")
    size = QUICK if args.quick else Size()
    if args.requests is not None:
        size = replace(size, requests=args.requests, long_requests=min(size.long_requests, args.requests))
    run = Run(size, device, args.redis)
    print(prove(run.pair, run.prompts[:3], "the model of this repository"))
    works = (run.requests, run.no_repeats, run.larger, run.look_up, run.sharing)
    output = Output("SegmentReuseCache", COLUMNS, SHOWN, bars(), panels)
    run_sections(args, device, dict(zip(SECTIONS, works, strict=True)), output)


if __name__ == "__main__":
    run_script(main)

"""Times SegmentReuseCache on prompts as agents send them: until the first token, with 32 tokens more, and part by part.

    python scripts/bench_segments.py [--device auto] [--csv docs/benchmarks/segments-speed.csv] [--plot docs/benchmarks/segments-speed.png]

Before anything is timed, the logits of prefix caching are compared with those of no reuse. Then every prompt is asked on all sides in
turns, in one process, and a ratio is taken within a prompt: the time without reuse (DynamicCache) by that of the side. The making of the
cache is in the time; storing is not where only the first token is asked for, because that is done while an answer is generated: it has
rows of its own, and goes on during the requests for 32 tokens more. Each side has its own store in memory, empty at first; all prompts
count, the first too.

`no repeats` are prompts without anything to reuse: what looking in vain costs. `phases` takes the time to the first token apart. `larger`
is a Llama with random weights, for which four fifths of a prompt have been seen in another order: random weights say nothing about whether
reuse is harmless, so all probes of "auto" pass, but in rows of their own most fail, as the policy has it. `look-up` is among random
segments without tensors, `splice` the writing of keys and values alone, `sharing` the share of tokens that are reused where another
process has stored them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from _common import run_script
from _equip_sides import Shape
from _sections import Columns, arguments, begin, measure_each, run_sections
from _segments_parts import agents, load_policy, lookups, redis_server, sharing, splices
from _segments_report import bars, show, write_plot
from _segments_sides import APPROXIMATE, AUTO, NONE, PREFIX, Pair, Row, larger_model, moved, passes, phases, prove, rows_of
from _subspace_sides import Clock

from hf_kvcaches import SegmentPolicy

SECTIONS = ("requests", "no repeats", "phases", "larger", "splice", "look-up", "sharing")
FIELDS = (
    "section measure workload side tokens count time_ms time_q1_ms time_q3_ms ratio ratio_q1 ratio_q3 reused value unit floor_share"
).split()
ALL_SIDES = (NONE, PREFIX, AUTO, APPROXIMATE)


LARGER = Shape(512, 8, 8, 1408, 2048)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    requests: int = 200  # of agents; a part of them where an answer is long
    long_requests: int = 60  # that part
    new_tokens: int = 33  # of a long answer
    repeats: tuple[int, int] = (40, 3)  # prompts without repeats, and how many passes over them until the first token
    shape: Shape = LARGER  # of the larger model, with how many key heads
    kv_heads: int = 2
    tokens: tuple[int, ...] = (1024, 2048, 4096)  # of its prompts
    rounds: int = 5  # how many prompts of each length
    splice: tuple[int, int, int, int] = (32, 8, 512, 128)  # layers, heads, tokens, dimensions of what is written, and how often
    splices: int = 9
    segments: int = 100_000  # in the index, and how many look-ups
    calls: int = 200
    shared: int = 60  # requests for two processes
    quick: bool = False  # whether numbers mean nothing


QUICK = Size(
    requests=3,
    long_requests=2,
    new_tokens=3,
    repeats=(2, 1),
    shape=Shape(64, 4, 4, 96, 128),
    kv_heads=2,
    tokens=(300,),
    rounds=2,
    splice=(2, 2, 48, 16),
    splices=2,
    segments=200,
    calls=20,
    shared=4,
    quick=True,
)


@dataclass
class Run:
    """One run: what is measured where."""

    size: Size  # how much
    device: torch.device  # where
    policy_folder: str | None = None  # what "auto" lets in, or None
    rows: list[Row] = field(default_factory=list)  # what is measured so far
    notes: list[str] = field(default_factory=list)  # what was not, and why

    def __post_init__(self) -> None:
        self.policy: SegmentPolicy = load_policy(self.policy_folder)
        self.pair, self.prompts = agents(self.size.requests, self.device)
        # Of another seed, so that nothing of what is measured is stored before.
        self.first = self.fresh(1 if self.size.quick else 2, seed=1)

    def fresh(self, count: int, seed: int = 0) -> list[torch.Tensor]:
        """Prompts without repeats."""
        from tests.testbed.agents import no_repeat_workload

        made = no_repeat_workload(self.pair.tokenizer, requests=count, seed=seed)
        return [torch.tensor([request.prompt], device=self.device) for request in made]

    def go(self, sections: Sequence[str]) -> None:
        print(prove(self.pair, self.prompts[:3], "the model of this repository"))
        works = {
            "requests": self.requests,
            "no repeats": self.no_repeats,
            "phases": self.phases,
            "larger": self.larger,
            "splice": self.splice,
            "look-up": self.look_up,
            "sharing": self.sharing,
        }
        measure_each(self, works, sections, show)

    def _asked(
        self, section: str, workload: str, pair: Pair, names: Sequence[str], prompts: Sequence[torch.Tensor], long: int, count: int = 1
    ) -> None:
        """Rows for the first token of all prompts, and for long answers to the first `long` of them."""
        first = self.first if pair is self.pair else prompts[:1]
        for measure, these, new in (("first token", prompts, 1), ("whole request", prompts[:long], self.size.new_tokens)):
            if these:
                # Long answers take long, and one pass gives as many ratios as there are prompts.
                asked = passes(names, pair, self.policy, these, new, count=count if new == 1 else 1, first=first)
                self.rows += rows_of(asked, measure, section=section, workload=workload)

    def requests(self) -> None:
        self._asked("requests", "agents", self.pair, ALL_SIDES, self.prompts, self.size.long_requests)

    def no_repeats(self) -> None:
        count, times = self.size.repeats
        self._asked("no repeats", "no repeats", self.pair, (NONE, AUTO), self.fresh(count), count, times)

    def phases(self) -> None:
        for workload, prompts in (("agents", self.prompts), ("no repeats", self.fresh(self.size.repeats[0]))):
            self.rows += phases((NONE, AUTO), self.pair, self.policy, prompts, workload)

    def larger(self) -> None:
        size = self.size
        pair = larger_model(size.shape, size.kv_heads, self.device)
        vocabulary = size.shape.vocabulary
        print(prove(pair, moved(size.tokens[0], 1, vocabulary, self.device), "the larger model"))
        # What reuse gains is measured with probes that pass, and what it costs where they fail, with the policy as it is.
        passing = replace(self.policy, probe=-1.0)
        for tokens in size.tokens:
            # The first prompt brings the segments in.
            prompts = moved(tokens, size.rounds + 1, vocabulary, self.device)
            for names, policy in ((ALL_SIDES, passing), ((NONE, AUTO), self.policy)):
                asked = passes(names, pair, policy, prompts, first=prompts[:1])
                workload = "moved" if policy is passing else "moved, gates as they are"
                later = {name: answers[1:] for name, answers in asked.items()}
                self.rows += rows_of(later, "first token", section="larger", workload=workload, tokens=tokens)

    def splice(self) -> None:
        self.rows += splices(self.size.splice, self.size.splices, Clock(self.device, small=self.size.quick))

    def look_up(self) -> None:
        self.rows += lookups(self.size.segments, self.size.calls)

    def sharing(self) -> None:
        shared = self.size.shared
        _, prompts = agents(shared, self.device)
        with tempfile.TemporaryDirectory() as folder:
            self.rows += sharing("disk", f"disk:{folder}/store", self.pair, shared, self.policy_folder, prompts)
        with redis_server() as location:
            if location is None:
                self.notes.append("Redis: there is no redis-server here, so sharing through it was not measured.")
            else:
                self.rows += sharing("Redis", location, self.pair, shared, self.policy_folder, prompts)


COLUMNS = Columns(FIELDS, ("section", "measure", "workload", "side", "unit"), ("tokens", "count"))


def main() -> None:
    parser = arguments(__doc__, SECTIONS, "requests", "of agents; default: 200")
    parser.add_argument("--policy", help='a folder with the SegmentPolicy of "auto"; default: one that suits the model of this repository')
    args = parser.parse_args()
    device = begin(args, "requests")
    size = QUICK if args.quick else Size()
    if args.requests is not None:
        size = replace(size, requests=args.requests, long_requests=min(size.long_requests, args.requests))
    run = Run(size, device, args.policy)
    run_sections(run, COLUMNS, args, device)
    print("\n".join([*run.notes, *(bar.verdict(run.rows) for bar in bars())]))
    if args.plot:
        write_plot(args.plot, run.rows, device)


if __name__ == "__main__":
    run_script(main)

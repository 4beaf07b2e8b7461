"""Times WarmStartCache on prompts that resemble earlier ones: until the first token, and part by part.

    python scripts/bench_warmstart.py [--device auto] [--csv docs/benchmarks/warmstart-speed.csv] [--plot FILE.png]

Before anything is timed, the first token's distribution is compared with that of a cold start. Then every prompt is asked on all sides in
turns, in one process, and a ratio is taken within a prompt: the time of the cold start (DynamicCache) by that of the side. The making of
the cache and the look-up are in the time. A library holds all prompts that the measured ones resemble, of all kinds of that length, and
half as many that nothing resembles.

`hits` are those prompts that a similar one answers ("exact": the same prompt, "align": what both share). In `misses`, `unrelated` prompts
begin as stored ones do, and `other text` has nothing in common with any. `larger` is a Llama with random weights and prompts of which one
word in 128 is another; its gate lets all of them in. `look-up` is among made-up prompts without keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from _warmstart_timing import ALIGN, AUTO, COLD, PREFIX, Asked, Side, ask_in_turns, lookups, prove, rows_of
from shared.bars import Bar
from shared.cli import run_script
from shared.models import LARGER, Pair, Shape, random_ids, word_tokenizer
from shared.plot import Panel
from shared.results import Row, rows_where
from shared.sections import TIMES, Output, begin_sections, run_sections, section_arguments

from hf_kvcaches import WarmStartGate, WarmStartLibrary

SECTIONS = ("hits", "misses", "larger", "look-up")
FIRST_SIDES = (COLD, PREFIX, ALIGN, AUTO)
HIT_KINDS = tuple("identical no_content few_words reworded reordered_notes reordered_tools changed_fact changed_digit negated".split())
COLUMNS = (
    "section measure workload group side length tokens count asked time_ms time_q1_ms time_q3_ms ratio ratio_q1 ratio_q3 "
    "extra_ms extra_q1_ms extra_q3_ms reused same served value unit"
).split()
SHOWN = {
    "": "{side}, {measure}",
    "prompts": "{workload}",
    "tokens": "{length}",
    **TIMES,
    "extra ms": "{extra_ms:+.2f}",
    "reused": "{reused:.1%}",
    "same": "{same:.1%}",
    "served by": "{served}",
    "rate": "{value:g} {unit}",
}
# Rows over all kinds of pairs, and over those that are not the same prompt again.
ALL_KINDS, ALL_BUT_IDENTICAL = "all kinds", "all kinds but identical"
# What is promised, and at how many tokens and among how many prompts.
FASTER, MISS, MISS_MS, LOOK_UP_MS, TOKENS, PROMPTS = 4.0, 1.03, 5.0, 5.0, 800, 100_000
# One word of a prompt for the larger model in so many is another.
CHANGED = 128


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    kinds: tuple[str, ...] = HIT_KINDS  # of pairs
    lengths: tuple[int, ...] = (128, 300, 600, 800)  # of prompts, in tokens
    pairs: int = 20  # of each kind and length
    misses: tuple[int, int] = (40, 3)  # prompts of each length that nothing resembles, and how many passes over them
    proven: int = 5  # pairs of each kind whose answers are compared first
    shape: Shape = LARGER  # of the larger model
    larger: tuple[int, ...] = (1024, 2048, 4096)  # lengths of its prompts
    rounds: int = 7  # how many of each
    prompts: tuple[int, ...] = (1_000, 10_000, 100_000)  # in the libraries of look-ups
    calls: int = 200  # look-ups in each


QUICK = Size(
    ("identical", "no_content", "changed_fact"), (128, 800), 2, (2, 1), 2, Shape(64, 4, 4, 96, 128), (300,), 2, (200,), 20
)  # fmt: skip


@dataclass(frozen=True)
class Shelf:
    """A library of prompts of one length, and prompts that resemble some of them or none."""

    library: WarmStartLibrary  # with them
    similar: list[Asked]  # of all kinds
    unrelated: list[Asked]  # begin as others do
    other: list[Asked]  # have nothing in common with any


class Run:
    """One run: what is measured where."""

    def __init__(self, size: Size, device: torch.device) -> None:
        from tests import testbed

        self.size, self.device = size, device
        model, tokenizer = testbed.load()
        self.pair = Pair.of(model, device, tokenizer)
        self.shelf = functools.cache(self._shelf)

    def _shelf(self, length: int) -> Shelf:
        from tests import testbed
        from tests.testbed.pairs import make_pairs

        size, tokenizer = self.size, self.pair.tokenizer
        library = WarmStartLibrary(self.pair.switched, tokenizer)
        similar = []
        for kind in size.kinds:
            for pair in make_pairs(tokenizer, kind, size.pairs, length=length):
                library.add([pair.source.prompt])
                similar.append(Asked(kind, self._tensor(pair.target.prompt)))
        # Their sources are what nothing resembles.
        strangers = make_pairs(tokenizer, "unrelated", max(size.misses[0], len(similar) // 2), length=length)
        library.add([pair.source.prompt for pair in strangers])
        unrelated = [Asked("unrelated", self._tensor(pair.target.prompt)) for pair in strangers[: size.misses[0]]]
        verse = tokenizer(testbed.held_out("verse"), verbose=False)["input_ids"]
        places = range(0, size.misses[0] * length, length)
        other = [Asked("other text", self._tensor(verse[(start % (len(verse) - length)) :][:length])) for start in places]
        return Shelf(library, similar, unrelated, other)

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], device=self.device)

    def _sides(self, names: Sequence[str], library: WarmStartLibrary) -> list[Side]:
        return [Side(name, self.pair, library) for name in names]

    def _some(self, shelf: Shelf, count: int) -> list[Asked]:
        """The first prompts of each kind."""
        return [asked for kind in self.size.kinds for asked in [each for each in shelf.similar if each.kind == kind][:count]]

    def prove(self) -> None:
        for length in (self.size.lengths[0], self.size.lengths[-1]):
            shelf = self.shelf(length)
            sides = self._sides((COLD, AUTO), shelf.library)
            print(prove(sides, self._some(shelf, self.size.proven), f"the model of this repository, {length} tokens"), flush=True)

    def _asked(self, names: Sequence[str], length: int, prompts: Sequence[Asked]) -> Iterator[Row]:
        """Rows for each kind, and for all."""
        sides = self._sides(names, self.shelf(length).library)
        # What is new to a process is slow.
        ask_in_turns(sides, prompts[:1])
        answers, kinds = ask_in_turns(sides, prompts), [asked.kind for asked in prompts]
        groups: dict[str, list[str]] = {kind: [kind] for kind in dict.fromkeys(kinds)}
        if len(groups) > 1:
            groups |= {ALL_KINDS: list(groups), ALL_BUT_IDENTICAL: [kind for kind in groups if kind != "identical"]}
        for workload, members in groups.items():
            chosen = {name: [a for a, kind in zip(own, kinds, strict=True) if kind in members] for name, own in answers.items()}
            for group in ("all", "hits"):
                yield from rows_of(chosen, group, workload=workload, length=length)

    def hits(self) -> Iterator[Row]:
        for length in self.size.lengths:
            yield from self._asked(FIRST_SIDES, length, self.shelf(length).similar)

    def misses(self) -> Iterator[Row]:
        _, passes = self.size.misses
        for length in self.size.lengths:
            for prompts in (self.shelf(length).unrelated, self.shelf(length).other):
                yield from self._asked((COLD, AUTO), length, prompts * passes)

    def larger(self) -> Iterator[Row]:
        size, vocabulary = self.size, self.size.shape.vocabulary
        pair = Pair.random(size.shape, "gqa", self.device)
        gate = WarmStartGate(reusable=0.0)  # admits whatever differs
        for length in size.larger:
            library = WarmStartLibrary(pair.switched, word_tokenizer(vocabulary))
            # The first one of the prompts is the same again, and does not count.
            sources = random_ids(vocabulary, size.rounds + 1, length, seed=length)
            library.add(list(sources))
            targets = [sources[0], *(changed(ids, length // CHANGED, vocabulary, seed) for seed, ids in enumerate(sources[1:]))]
            prompts = [Asked("changed" if number else "identical", ids[None].to(self.device)) for number, ids in enumerate(targets)]
            sides = [Side(name, pair, library, gate) for name in (COLD, PREFIX, ALIGN)]
            print(prove([sides[0], *sides[2:]], prompts, f"the larger model, {length} tokens", trained=False), flush=True)
            ask_in_turns(sides, prompts[:1])
            yield from rows_of(ask_in_turns(sides, prompts[1:]), workload="changed", length=length)

    def look_up(self) -> Iterator[Row]:
        for count in self.size.prompts:
            yield from lookups(self.pair.switched, self.pair.tokenizer, count, self.size.calls)


def changed(ids: torch.Tensor, places: int, vocabulary: int, seed: int) -> torch.Tensor:
    """The same prompt with other words in some places; the last words stay."""
    random = torch.Generator().manual_seed(seed)
    at = torch.randperm(len(ids) - 32, generator=random)[:places]
    # By so much that it is never the word that is there.
    away = torch.randint(1, vocabulary - 1, (places,), generator=random)
    out = ids.clone()
    out[at] = (ids[at] - 1 + away) % (vocabulary - 1) + 1
    return out


def bars() -> list[Bar]:
    promised: list[Bar] = []
    for workload in (ALL_KINDS, ALL_BUT_IDENTICAL):
        where = {"section": "hits", "measure": "first token", "workload": workload, "group": "hits", "side": AUTO, "length": TOKENS}
        text = f"auto at least {FASTER:g}x as fast as cold to the first token, hits at {TOKENS} tokens, {workload}"
        promised.append(Bar(text, where, least=FASTER))
    for workload in ("unrelated", "other text"):
        where = {"section": "misses", "measure": "first token", "workload": workload, "group": "all", "side": AUTO}
        # What costs few milliseconds counts as nothing.
        cost = lambda row: 1 / row["ratio"] if row["extra_ms"] > MISS_MS else min(1.0, 1 / row["ratio"])  # noqa: E731
        text = f"a miss takes at most {MISS:g}x the time of cold, or {MISS_MS:g} ms more, {workload}"
        promised.append(Bar(text, where, cost, most=MISS, name="length"))
    where = {"section": "look-up", "measure": "all", "length": PROMPTS}
    text = f"look-up among {PROMPTS} prompts in at most {LOOK_UP_MS:g} ms"
    return [*promised, Bar(text, where, "time_ms", most=LOOK_UP_MS, unit=" ms")]


def panels(rows: Sequence[Row]) -> list[Panel]:
    hits = [row for row in rows_where(rows, section="hits", group="hits") if row["side"] != COLD]
    longest = [row for row in hits if row["length"] == max(row["length"] for row in hits)]
    larger, look_up = rows_where(rows, section="larger"), rows_where(rows, section="look-up")
    return [
        Panel("first token, hits", rows_where(hits, workload=ALL_BUT_IDENTICAL), "{side}", "length", "ratio", levels=(1.0,)),
        Panel("first token, longest hits, by kind", longest, "{side}", "{workload}", "ratio", levels=(1.0,)),
        Panel("larger model", larger, "{side}", "length", "ratio", log="xy", levels=(1.0,)),
        Panel("look-up", look_up, "{side}", "length", "time_ms", log="xy", levels=(LOOK_UP_MS,)),
    ]


def main() -> None:
    parser = section_arguments(__doc__, SECTIONS)
    parser.add_argument("--pairs", type=int, help="of each kind and length; default: 20")
    args = parser.parse_args()
    device = begin_sections(args, "pairs")
    size = QUICK if args.quick else Size()
    if args.pairs is not None:
        size = replace(size, pairs=args.pairs)
    run = Run(size, device)
    if {"hits", "misses"} & set(args.sections):
        run.prove()
    works = (run.hits, run.misses, run.larger, run.look_up)
    output = Output("WarmStartCache", COLUMNS, SHOWN, bars(), panels)
    run_sections(args, device, dict(zip(SECTIONS, works, strict=True)), output)


if __name__ == "__main__":
    run_script(main)

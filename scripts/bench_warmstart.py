"""Times WarmStartCache on prompts that resemble earlier ones: until the first token, with 32 tokens more, and part by part.

    python scripts/bench_warmstart.py [--device auto] [--csv docs/benchmarks/warmstart-speed.csv] [--plot FILE.png]

Before anything is timed, the first token's distribution is compared with that of a cold start. Then every prompt is asked on all sides in
turns, in one process, and a ratio is taken within a prompt: the time of the cold start (DynamicCache) by that of the side. The making of
the cache and the look-up are in the time. A library holds all prompts that the measured ones resemble, of all kinds of that length, and
half as many that nothing resembles.

`hits` are those prompts that a similar one answers: by its keys and values ("exact" for the same prompt, "align" for what both share) or
by its summary ("slots"); a common beginning alone is no hit. In `misses`, `unrelated` prompts begin as stored ones do, and `other text`
has nothing in common with any. `answers` have 32 tokens more; `longest pause` is the longest time between two of them. `phases` takes the
time to the first token apart. `larger` is a Llama with random weights and prompts of which one word in 128 is another; its gate lets all
of them in, since random weights say nothing about whether that is harmless. `look-up` is among made-up prompts without keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from _common import run_script
from _equip_sides import Shape
from _sections import arguments, begin, measure_each, run_sections
from _segments_sides import Pair, Row, larger_model
from _warmstart_report import ALL_BUT_IDENTICAL, ALL_KINDS, COLUMNS, bars, rows_of, show, write_plot
from _warmstart_timing import ALIGN, AUTO, BACKGROUND, COLD, PREFIX, SLOTS, SYNC, Asked, Side, in_turns, lookups, phases, prove
from transformers import PreTrainedTokenizerFast

from hf_kvcaches import WarmStartGate, WarmStartLibrary

SECTIONS = ("hits", "misses", "answers", "phases", "larger", "look-up")
FIRST_SIDES = (COLD, PREFIX, ALIGN, AUTO, SLOTS)
LONG_SIDES = (COLD, AUTO, SYNC, BACKGROUND)
HIT_KINDS = (
    "identical",
    "no_content",
    "few_words",
    "reworded",
    "reordered_notes",
    "reordered_tools",
    "changed_fact",
    "changed_digit",
    "negated",
)
LARGER = Shape(512, 8, 8, 1408, 2048)
# One word of a prompt for the larger model in so many is another.
CHANGED = 128


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    kinds: tuple[str, ...] = HIT_KINDS  # of pairs
    lengths: tuple[int, ...] = (128, 300, 600, 800)  # of prompts, in tokens
    pairs: int = 20  # of each kind and length
    long_pairs: int = 8  # as many of them are asked for long answers
    new_tokens: int = 33  # of a long answer
    misses: tuple[int, int] = (40, 3)  # prompts of each length that nothing resembles, and how many passes over them
    proven: int = 5  # pairs of each kind whose answers are compared first
    shape: Shape = LARGER  # of the larger model, with how many key heads
    kv_heads: int = 2
    larger: tuple[int, ...] = (1024, 2048, 4096)  # lengths of its prompts
    rounds: int = 7  # how many of each
    prompts: tuple[int, ...] = (1_000, 10_000, 100_000)  # in the libraries of look-ups
    calls: int = 200  # look-ups in each
    quick: bool = False  # whether numbers mean nothing


QUICK = Size(
    kinds=("identical", "no_content", "changed_fact"),
    lengths=(128, 800),
    pairs=2,
    long_pairs=2,
    new_tokens=3,
    misses=(2, 1),
    proven=2,
    shape=Shape(64, 4, 4, 96, 128),
    larger=(300,),
    rounds=2,
    prompts=(200,),
    calls=20,
    quick=True,
)


@dataclass(frozen=True)
class Shelf:
    """A library of prompts of one length, and prompts that resemble some of them or none."""

    library: WarmStartLibrary  # with them
    similar: list[Asked]  # of all kinds
    unrelated: list[Asked]  # begin as others do
    other: list[Asked]  # have nothing in common with any


@dataclass
class Run:
    """One run: what is measured where."""

    size: Size  # how much
    device: torch.device  # where
    rows: list[Row] = field(default_factory=list)  # what is measured so far

    def __post_init__(self) -> None:
        from tests import testbed

        model, tokenizer = testbed.load()
        self.pair = Pair.of(model, self.device, tokenizer)
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

    def go(self, sections: Sequence[str]) -> None:
        if set(sections) & {"hits", "misses", "answers", "phases"}:
            for length in (self.size.lengths[0], self.size.lengths[-1]):
                shelf = self.shelf(length)
                sides = self._sides((COLD, AUTO, SLOTS), shelf.library)
                print(prove(sides, self._some(shelf, self.size.proven), f"the model of this repository, {length} tokens"), flush=True)
        works = {
            "hits": self.hits,
            "misses": self.misses,
            "answers": self.answers,
            "phases": self.phases,
            "larger": self.larger,
            "look-up": self.look_up,
        }
        measure_each(self, works, sections, show)

    def _asked(
        self, section: str, names: Sequence[str], length: int, prompts: Sequence[Asked], measures: Sequence[str], new_tokens: int = 1
    ) -> None:
        """Rows for each kind, and for all."""
        sides = self._sides(names, self.shelf(length).library)
        # What is new to a process is slow.
        in_turns(sides, prompts[:1], new_tokens)
        answers = in_turns(sides, prompts, new_tokens)
        kinds = [asked.kind for asked in prompts]
        groups: dict[str, list[str]] = {kind: [kind] for kind in dict.fromkeys(kinds)}
        if len(groups) > 1:
            groups |= {ALL_KINDS: list(groups), ALL_BUT_IDENTICAL: [kind for kind in groups if kind != "identical"]}
        for workload, members in groups.items():
            own = {name: [each for each, kind in zip(found, kinds, strict=True) if kind in members] for name, found in answers.items()}
            for measure in measures:
                for group in ("all", "hits"):
                    self.rows += rows_of(own, measure, group, section=section, workload=workload, length=length)

    def hits(self) -> None:
        for length in self.size.lengths:
            self._asked("hits", FIRST_SIDES, length, self.shelf(length).similar, ["first token"])

    def misses(self) -> None:
        _, passes = self.size.misses
        for length in self.size.lengths:
            shelf = self.shelf(length)
            for prompts in (shelf.unrelated, shelf.other):
                self._asked("misses", (COLD, AUTO), length, prompts * passes, ["first token"])

    def answers(self) -> None:
        for length in self.size.lengths:
            prompts = self._some(self.shelf(length), self.size.long_pairs)
            self._asked("answers", LONG_SIDES, length, prompts, ["first token", "whole answer", "longest pause"], self.size.new_tokens)

    def phases(self) -> None:
        for length in self.size.lengths:
            shelf = self.shelf(length)
            prompts = [asked for asked in self._some(shelf, self.size.long_pairs) if asked.kind != "identical"]
            sides = self._sides((COLD, ALIGN, SLOTS), shelf.library)
            in_turns(sides, prompts[:1])
            self.rows += phases(sides, prompts, workload=ALL_BUT_IDENTICAL, length=length)

    def larger(self) -> None:
        size = self.size
        vocabulary = size.shape.vocabulary
        pair = larger_model(size.shape, size.kv_heads, self.device)
        # Whatever differs is let in.
        gate = WarmStartGate(tau=-1.0, content=None, lexical=False)
        for length in size.larger:
            random = torch.Generator().manual_seed(length)
            library = WarmStartLibrary(pair.switched, word_tokenizer(vocabulary))
            # The first one of the prompts is the same again, and does not count.
            sources = [torch.randint(1, vocabulary, (length,), generator=random) for _ in range(size.rounds + 1)]
            library.add(sources)
            targets = [sources[0], *(changed(ids, length // CHANGED, vocabulary, seed) for seed, ids in enumerate(sources[1:]))]
            prompts = [Asked("changed" if number else "identical", ids[None].to(self.device)) for number, ids in enumerate(targets)]
            sides = [Side(name, pair, library, gate) for name in (COLD, PREFIX, ALIGN, SLOTS)]
            print(prove([sides[0], *sides[2:]], prompts, f"the larger model, {length} tokens", trained=False), flush=True)
            in_turns(sides, prompts[:1])
            self.rows += rows_of(in_turns(sides, prompts[1:]), "first token", section="larger", workload="changed", length=length)

    def look_up(self) -> None:
        for count in self.size.prompts:
            self.rows += lookups(self.pair.switched, self.pair.tokenizer, count, self.size.calls)


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """For a model with random weights: each token is a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocabulary)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")


def changed(ids: torch.Tensor, places: int, vocabulary: int, seed: int) -> torch.Tensor:
    """The same prompt with other words in some places; the last words stay."""
    random = torch.Generator().manual_seed(seed)
    at = torch.randperm(len(ids) - 32, generator=random)[:places]
    # By so much that it is never the word that is there.
    away = torch.randint(1, vocabulary - 1, (places,), generator=random)
    out = ids.clone()
    out[at] = (ids[at] - 1 + away) % (vocabulary - 1) + 1
    return out


def main() -> None:
    args = arguments(__doc__, SECTIONS, "pairs", "of each kind and length; default: 20").parse_args()
    device = begin(args, "pairs")
    size = QUICK if args.quick else Size()
    if args.pairs is not None:
        size = replace(size, pairs=args.pairs, long_pairs=min(size.long_pairs, args.pairs))
    run = Run(size, device)
    run_sections(run, COLUMNS, args, device)
    print("\n".join(bar.verdict(run.rows) for bar in bars()))
    if args.plot:
        write_plot(args.plot, run.rows, device)


if __name__ == "__main__":
    run_script(main)

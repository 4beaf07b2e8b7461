"""How good the first tokens of warm starts are, on pairs of prompts that resemble each other, against the same model without.

    python scripts/eval_warmstart.py [--pairs 60] [--csv FOLDER] [--plot FOLDER] [--prefix-tuning] [--quick]

The sources of a batch of pairs are put into a library, beside other prompts that nobody asks for; then each target is prefilled, and its
true answers and further questions are fed in. Compared are the distributions of these tokens. `exact prefix`, `auto`, `align` and `slots,
gated` are strategies of `WarmStartCache` with all that it decides for itself. The other sides start from the pair's own source, whatever
a gate would say: from its slots in the layouts `salient` and `paper`; from these through a projector that was fitted on pairs of other
seeds; from its last tokens; from those that H2O, SnapKV and StreamingLLM would keep of it.

**Controls**: `tail only` has the last tokens of the target and nothing else, `mismatched source` has them behind another pair's source.

Divergences and shares within 0.05 in the tables are of what was admitted; right and stale answers and tokens run are of all pairs. Times
are in `bench_warmstart.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from _common import add_common, check_counts, environment, load, pick_device, prepare, run_script
from _warmstart_quality import Answer, Extra, bars, controls, judged, paper_criteria, show, summary, write_csv, write_plot
from _warmstart_sides import (
    ALIGN,
    AUTO,
    FITTED_SEED,
    GATED,
    MOST,
    PREFIX_TUNED,
    SIDES,
    Example,
    LearnedPrefix,
    Side,
    Summaries,
    SummaryCache,
    eager_twin,
    fit_projectors,
    fitting_pairs,
)
from tqdm import tqdm

from hf_kvcaches import WarmStartCache, WarmStartGate, WarmStartLibrary
from hf_kvcaches.segments.calibration import next_tokens
from tests.testbed.pairs import KINDS, Kind, Pair, make_pairs

LENGTHS = (128, 300, 600, 900)
ASKS = ("same", "other")
# Sources that are in the library at a time.
BATCH = 25
# The end of a prompt, with its question.
TAIL = 16
RISKY: tuple[Kind, ...] = ("changed_fact", "changed_digit", "negated")


class Bench:
    """Asks pairs on every side."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = pick_device(args.device)
        self.model, self.tokenizer = load(args.model, self.device)
        self.watched = eager_twin(args.model, self.model)
        self.gate = None
        if args.gate is not None:
            self.gate = WarmStartGate.from_pretrained(args.gate, model=self.model, tokenizer=self.tokenizer)
        self.library = WarmStartLibrary(self.model, self.tokenizer, slots=MOST, encoder=args.encoder)
        each = -(-args.distractors // len(args.lengths))
        others = [make_pairs(self.tokenizer, "unrelated", each, FITTED_SEED + 1, length) for length in args.lengths]
        self.library.add([pair.source.prompt for own in others for pair in own][: args.distractors])
        fitted = fitting_pairs(self.tokenizer, args.fit_pairs, args.length)
        self.projectors = fit_projectors(self.library, self._summaries, fitted)
        self.prefix: LearnedPrefix | None = None
        if args.prefix_tuning:
            asked = [pair.target for pair in fitted]
            alone = [next_tokens(self.model, each.prompt, each.continuation) for each in asked]
            examples = [Example(each.prompt[-TAIL:], each.continuation, cold) for each, cold in zip(asked, alone, strict=True)]
            self.prefix = LearnedPrefix(self.model, examples, args.prefix_steps)

    def _summaries(self, ids: Sequence[int]) -> Summaries:
        return Summaries(self.model, self.watched, ids)

    def batches(self, pairs: Sequence[Pair]) -> Iterable[list[tuple[Pair, float]]]:
        """Pairs whose sources are in the library, with their cosines."""
        for start in range(0, len(pairs), BATCH):
            some = pairs[start : start + BATCH]
            keys = self.library.add([pair.source.prompt for pair in some])
            yield [(pair, self._cosine(pair)) for pair in some]
            for key in {key for key in keys if key is not None}:
                self.library.delete(key)

    def _cosine(self, pair: Pair) -> float:
        prompts = [pair.source.prompt, pair.target.prompt]
        first, second = self.library.encoder.encode([self.library.text(ids) for ids in prompts], prompts)
        return float(first @ second)

    def ask(self, pairs: Sequence[Pair], sides: Sequence[Side], bar: tqdm[Any]) -> dict[Side, list[Answer]]:
        """Answers of each side, in the order of the pairs."""
        found: dict[Side, list[Answer]] = {side: [] for side in sides}
        for some in self.batches(pairs):
            for number, (pair, cosine) in enumerate(some):
                cold = next_tokens(self.model, pair.target.prompt, pair.target.continuation).cpu()
                summaries = self._summaries(pair.source.prompt)
                other = some[number - 1][0].source.prompt
                for side in sides:
                    found[side].append(self._answer(pair, side, cold, summaries, other, cosine))
                bar.update()
        return found

    def _answer(self, pair: Pair, side: Side, cold: torch.Tensor, summaries: Summaries, other: Sequence[int], cosine: float) -> Answer:
        prompt, then = pair.target.prompt, pair.target.continuation
        known: dict[str, Any] = {"kind": pair.kind, "asks": pair.asks, "cosine": cosine, "tokens": len(prompt), "refused": ""}
        if side.control is not None:
            found = self._control(side, prompt[-TAIL:], then, other)
            known |= {"served": "control", "forwarded": TAIL}
        elif side.rule is not None:
            projector = self.projectors[side.rule] if side.projected else None
            cache = SummaryCache(self.model, self.library, summaries.by(side.rule, side.slots), projector)
            found = next_tokens(self.model, prompt, then, cache)
            known |= {"served": "slots", "forwarded": 1}
        elif side.strategy is not None:
            cache = WarmStartCache(self.model, self.library, strategy=side.strategy, gate=self.gate)
            found = next_tokens(self.model, prompt, then, cache)
            known |= _told(cache)
        else:
            found = cold
            known |= {"served": "cold", "forwarded": len(prompt)}
        return Answer(**known, **judged(pair, cold, found.cpu()))

    def _control(self, side: Side, tail: list[int], then: list[int], other: Sequence[int]) -> torch.Tensor:
        if side.control == "prefix":
            assert self.prefix is not None
            return self.prefix.logits(tail, then)
        # Positions only count as differences, so that the tail alone may begin at 0.
        return next_tokens(self.model, [*other[:-TAIL], *tail] if side.control == "mismatch" else tail, then)

    def admissions(self, pairs: Sequence[Pair], sides: Sequence[Side], bar: tqdm[Any]) -> dict[Side, list[Answer]]:
        """Only what would serve each target; nothing is fed in behind it."""
        found: dict[Side, list[Answer]] = {side: [] for side in sides}
        for some in self.batches(pairs):
            for pair, cosine in some:
                for side in sides:
                    cache = WarmStartCache(self.model, self.library, strategy=side.strategy or "auto", gate=self.gate)
                    ids = torch.tensor([pair.target.prompt], device=self.device)
                    self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                    found[side].append(Answer(pair.kind, pair.asks, cosine=cosine, tokens=ids.shape[1], **_told(cache)))
                bar.update()
        return found

    def swapped(self, pairs: Sequence[Pair], bar: tqdm[Any]) -> list[float]:
        """For each prompt with a swap: how far the logits behind it are from cold ones."""
        found = []
        for some in self.batches(pairs):
            for pair, _ in some:
                prompt, then = pair.target.prompt, pair.target.continuation
                cache = WarmStartCache(self.model, self.library, swap="sync", gate=self.gate)
                warm = next_tokens(self.model, prompt, then, cache)
                bar.update()
                if cache.report().swapped:
                    found.append(float((warm - next_tokens(self.model, prompt, then))[1:].abs().max()))
        return found


def _told(cache: WarmStartCache) -> dict[str, Any]:
    report = cache.report()
    return {"served": report.strategies[0], "refused": report.refusals[0], "forwarded": report.computed_tokens}


def spread(tokenizer: Any, kind: Kind, count: int, seed: int, lengths: Sequence[int]) -> list[Pair]:
    """So many pairs of a kind, over all lengths and both ways to ask."""
    cells = list(product(lengths, ASKS))
    found: list[Pair] = []
    for number, (length, asks) in enumerate(cells):
        share = count // len(cells) + (number < count % len(cells))
        found += make_pairs(tokenizer, kind, share, seed, length, asks=asks)
    return found


def risky_pairs(tokenizer: Any, count: int, seed: int, lengths: Sequence[int]) -> list[Pair]:
    """So many pairs in which the source's answer is wrong, about as many of each kind."""
    found: list[Pair] = []
    for number, kind in enumerate(RISKY):
        wanted = count // len(RISKY) + (number < count % len(RISKY))
        # Of the pairs with a negation every other one has another answer, and each cell begins with one that has.
        made = spread(tokenizer, kind, 2 * wanted if kind == "negated" else wanted, seed, lengths)
        found += [pair for pair in made if pair.changes_answer][:wanted]
    return found


def measure(args: argparse.Namespace, bench: Bench) -> tuple[dict[Side, list[Answer]], Extra]:
    """Everything."""
    tokenizer, lengths = bench.tokenizer, args.lengths
    sides = (*SIDES, PREFIX_TUNED) if args.prefix_tuning else SIDES
    pairs = [pair for kind in args.kinds for pair in spread(tokenizer, kind, args.pairs, args.seed, lengths)]
    risky = risky_pairs(tokenizer, args.risky, args.seed + 1, lengths)
    unrelated = spread(tokenizer, "unrelated", args.unrelated, args.seed + 2, lengths)
    again = [pair for kind in args.kinds for pair in spread(tokenizer, kind, args.swaps, args.seed + 3, lengths)]
    with tqdm(total=sum(map(len, (pairs, risky, unrelated, again))), unit=" pairs") as bar:
        found = bench.ask(pairs, sides, bar)
        bar.set_postfix_str("changed answers")
        changed = bench.ask(risky, (AUTO,), bar)[AUTO]
        bar.set_postfix_str("false hits")
        false = bench.admissions(unrelated, (AUTO, ALIGN, GATED), bar)
        bar.set_postfix_str("swaps")
        return found, Extra(changed, false, bench.swapped(again, bar))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="of prompts, in tokens, 128 to 900")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--pairs", type=int, default=64, help="of each kind, over all lengths and both ways to ask")
    parser.add_argument("--risky", type=int, default=500, help="pairs with another answer, for stale ones")
    parser.add_argument("--unrelated", type=int, default=1000, help="pairs for false hits")
    parser.add_argument("--swaps", type=int, default=8, help="pairs of each kind whose exact prefill is compared")
    parser.add_argument("--distractors", type=int, default=100, help="prompts in the library that nobody asks for")
    parser.add_argument("--fit-pairs", type=int, default=64, help="that projectors and prefixes are fitted to, of --length tokens")
    parser.add_argument("--encoder", help="of the library; default: the model's input embeddings")
    parser.add_argument("--gate", help="a folder or a hub id; default: the library's default gate")
    parser.add_argument("--prefix-tuning", action="store_true", help="with a learned prefix, too (needs peft)")
    parser.add_argument("--prefix-steps", type=int, default=300)
    parser.add_argument("--csv", type=Path, help="write tables into this folder")
    parser.add_argument("--plot", type=Path, help="write a picture into this folder (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="few short pairs, to see that everything runs")
    parser.set_defaults(length=600)
    args = parser.parse_args()
    check_counts(args, ["pairs", "risky", "unrelated", "swaps", "distractors", "fit_pairs", "prefix_steps"])
    if args.quick:
        small = {"pairs": 2, "risky": 3, "unrelated": 2, "swaps": 1, "distractors": 2, "fit_pairs": 3, "prefix_steps": 3}
        vars(args).update(small, lengths=[300], length=200)
    return args


def main() -> None:
    args = parse()
    prepare(args)
    with torch.no_grad():
        bench = Bench(args)
        found, extra = measure(args, bench)
    rows = []
    for kind in args.kinds:
        rows += [summary(kind, side, [each for each in answers if each.kind == kind]) for side, answers in found.items()]
    print(f"{show(rows)}\n")
    print("\n".join([*controls(found), "", *bars(found, extra), "", paper_criteria(found)]))
    if args.csv:
        settings = {"model": Path(args.model).name, "seed": args.seed, "encoder": bench.library.encoder.name}
        write_csv(args.csv, rows, found, {**environment(bench.device), **settings})
    if args.plot:
        write_plot(args.plot, rows, found)


if __name__ == "__main__":
    run_script(main)

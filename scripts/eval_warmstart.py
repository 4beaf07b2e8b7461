"""How good the tokens behind warm starts are, on pairs of prompts that resemble each other, against the same model without.

    python scripts/eval_warmstart.py [--pairs 60] [--csv FOLDER] [--plot FOLDER] [--quick]

The sources of a batch of pairs are put into a library, beside other prompts that nobody asks for; then each target is prefilled, and its
true answers and further questions are fed in. Compared are the distributions of these tokens. `exact prefix`, `auto`, `align` and `slots,
gated` are strategies of `WarmStartCache` with all that it decides for itself. `slots` with a layout start from the pair's source, whatever
a gate would say. Of the controls `tail only` has the last tokens of the target alone, `mismatched source` behind another pair's source.
Divergences and shares within 0.05 are of what was admitted: of the first token, and the mean over all following ones. Right and stale
answers count all questions of all pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import _warmstart_quality as quality
import torch
from _warmstart_quality import Answer, Side
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import environment
from tqdm import tqdm

from hf_kvcaches import WarmStartCache, WarmStartGate, WarmStartLibrary
from hf_kvcaches.evaluate.runner import next_tokens
from hf_kvcaches.warmstart.reading import read_prompt
from tests.testbed.pairs import KINDS, Kind, Pair, make_pairs

LENGTHS = (128, 300, 600, 900)
ASKS = ("same", "other")
# Sources that are in the library at a time.
BATCH = 25
DISTRACTORS_SEED = 10**6 + 1
# The end of a prompt, with its question.
TAIL = 16
RISKY: tuple[Kind, ...] = ("changed_fact", "changed_digit", "negated")


class Bench:
    """Asks pairs on every side."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.device = device
        self.model, self.tokenizer = load(args.model, device)
        self.gate = None
        if args.gate is not None:
            self.gate = WarmStartGate.from_pretrained(args.gate, model=self.model, tokenizer=self.tokenizer)
        self.library = WarmStartLibrary(self.model, self.tokenizer, slots=quality.SUMMARY_SLOTS, encoder=args.encoder)
        count = -(-args.distractors // len(args.lengths))
        others = [make_pairs(self.tokenizer, "unrelated", count, DISTRACTORS_SEED, length) for length in args.lengths]
        self.library.add([pair.source.prompt for group in others for pair in group][: args.distractors])

    def batches(self, pairs: Sequence[Pair]) -> Iterable[list[tuple[Pair, float]]]:
        """Pairs whose sources are in the library, with their cosines."""
        for start in range(0, len(pairs), BATCH):
            batch = pairs[start : start + BATCH]
            keys = self.library.add([pair.source.prompt for pair in batch])
            yield [(pair, self._cosine(pair)) for pair in batch]
            for key in {key for key in keys if key is not None}:
                self.library.delete(key)

    def _cosine(self, pair: Pair) -> float:
        prompts = [pair.source.prompt, pair.target.prompt]
        first, second = self.library.encoder.encode([self.library.text(ids) for ids in prompts], prompts)
        return float(first @ second)

    def ask(self, pairs: Sequence[Pair], sides: Sequence[Side], progress: tqdm[Any]) -> dict[Side, list[Answer]]:
        """Answers of each side, in the order of the pairs."""
        answers: dict[Side, list[Answer]] = {side: [] for side in sides}
        for batch in self.batches(pairs):
            for number, (pair, cosine) in enumerate(batch):
                cold = next_tokens(self.model, pair.target.prompt, pair.target.continuation).cpu()
                states = read_prompt(self.model, torch.tensor([pair.source.prompt], device=self.device))
                other = batch[number - 1][0].source.prompt
                for side in sides:
                    answers[side].append(self._answer(pair, side, cold, states, other, cosine))
                progress.update()
        return answers

    def _answer(self, pair: Pair, side: Side, cold: torch.Tensor, states: Any, other: Sequence[int], cosine: float) -> Answer:
        prompt, then = pair.target.prompt, pair.target.continuation
        fields: dict[str, Any] = {"kind": pair.kind, "asks": pair.asks, "cosine": cosine, "tokens": len(prompt), "refused": ""}
        if side.control is not None:
            # Only differences of positions count, so that the tail alone may begin at 0.
            tail = prompt[-TAIL:]
            logits = next_tokens(self.model, [*other[:-TAIL], *tail] if side.control == "mismatch" else tail, then)
            fields |= {"served": "control", "forwarded": TAIL}
        elif side.layout is not None:
            slots = quality.summarise(states, len(pair.source.prompt), side.layout)
            logits = next_tokens(self.model, prompt, then, quality.SummaryCache(self.model, self.library, slots))
            fields |= {"served": "slots", "forwarded": 1}
        elif side.strategy is not None:
            cache = WarmStartCache(self.model, self.library, strategy=side.strategy, gate=self.gate)
            logits = next_tokens(self.model, prompt, then, cache)
            fields |= _served(cache)
        else:
            logits = cold
            fields |= {"served": "cold", "forwarded": len(prompt)}
        return Answer(**fields, **quality.judged(pair, cold, logits.cpu()))

    def admissions(self, pairs: Sequence[Pair], sides: Sequence[Side], progress: tqdm[Any]) -> dict[Side, list[Answer]]:
        """Only what would serve each target; nothing is fed in behind it."""
        answers: dict[Side, list[Answer]] = {side: [] for side in sides}
        for pair, cosine in (pair for batch in self.batches(pairs) for pair in batch):
            for side in sides:
                cache = WarmStartCache(self.model, self.library, strategy=side.strategy or "auto", gate=self.gate)
                ids = torch.tensor([pair.target.prompt], device=self.device)
                self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                answers[side].append(Answer(pair.kind, pair.asks, cosine=cosine, tokens=ids.shape[1], **_served(cache)))
            progress.update()
        return answers

    def swapped(self, pairs: Sequence[Pair], progress: tqdm[Any]) -> list[float]:
        """For each prompt with a swap: how far the logits behind it are from cold ones."""
        errors = []
        for pair, _ in (pair for batch in self.batches(pairs) for pair in batch):
            prompt, then = pair.target.prompt, pair.target.continuation
            cache = WarmStartCache(self.model, self.library, swap="sync", gate=self.gate)
            warm = next_tokens(self.model, prompt, then, cache)
            progress.update()
            if cache.report().swapped:
                errors.append(float((warm - next_tokens(self.model, prompt, then))[1:].abs().max()))
        return errors


def _served(cache: WarmStartCache) -> dict[str, Any]:
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


def measure(args: argparse.Namespace, bench: Bench) -> tuple[dict[Side, list[Answer]], quality.Extra]:
    """Everything."""
    tokenizer, lengths = bench.tokenizer, args.lengths
    pairs = [pair for kind in args.kinds for pair in spread(tokenizer, kind, args.pairs, args.seed, lengths)]
    risky = risky_pairs(tokenizer, args.risky, args.seed + 1, lengths)
    unrelated = spread(tokenizer, "unrelated", args.unrelated, args.seed + 2, lengths)
    again = [pair for kind in args.kinds for pair in spread(tokenizer, kind, args.swaps, args.seed + 3, lengths)]
    with tqdm(total=sum(map(len, (pairs, risky, unrelated, again))), unit=" pairs") as progress:
        answers = bench.ask(pairs, quality.SIDES, progress)
        changed = bench.ask(risky, (quality.AUTO,), progress)[quality.AUTO]
        false = bench.admissions(unrelated, (quality.AUTO, quality.ALIGN, quality.GATED), progress)
        return answers, quality.Extra(changed, false, bench.swapped(again, progress))


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "model", "seed", "device", "csv", "plot", "quick")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="of prompts, in tokens, 128 to 900")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--pairs", type=int, default=64, help="of each kind, over all lengths and both ways to ask")
    parser.add_argument("--risky", type=int, default=500, help="pairs with another answer, for stale ones")
    parser.add_argument("--unrelated", type=int, default=1000, help="pairs for false hits")
    parser.add_argument("--swaps", type=int, default=8, help="pairs of each kind whose exact prefill is compared")
    parser.add_argument("--distractors", type=int, default=100, help="prompts in the library that nobody asks for")
    parser.add_argument("--encoder", help="of the library; default: the model's input embeddings")
    parser.add_argument("--gate", help="a folder or a hub id; default: the library's default gate")
    args = parser.parse_args()
    check_counts(args, ["pairs", "risky", "unrelated", "swaps", "distractors"])
    if args.quick:
        vars(args).update(pairs=2, risky=3, unrelated=2, swaps=1, distractors=2, lengths=[300])
    return args


@torch.no_grad()
def main() -> None:
    args = parse()
    device = begin(args)
    bench = Bench(args, device)
    answers, extra = measure(args, bench)
    rows = [
        quality.summary(kind, side, [answer for answer in group if answer.kind == kind])
        for kind in args.kinds
        for side, group in answers.items()
    ]
    print(f"{quality.report(rows)}\n")
    print("\n".join([*quality.controls(answers), "", *quality.bars(answers, extra)]))
    if args.csv:
        settings = {"model": Path(args.model).name, "seed": args.seed, "encoder": bench.library.encoder.name}
        quality.write_files(args.csv, rows, answers, {**environment(device), **settings})
    if args.plot:
        quality.write_plot(args.plot, rows)


if __name__ == "__main__":
    run_script(main)

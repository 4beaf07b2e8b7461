"""Compares structures of summaries: layouts, numbers of slots, adapters, projectors, and the encoder that finds the source of a summary.

    python scripts/compare_summaries.py [--pairs 6] [--csv FOLDER] [--quick]

Pairs are prompts of the testbed that end with the same question: the target has other small words (`no_content`), other words of prose
(`few_words`), or another preamble (`reworded`). Maps are learned from other pairs than those that are judged. The last token of the target
is run behind a summary of the source, or of the target itself (`own`), and then the true continuation is fed. Given are the mean divergence
(KL, in nats) of the first token, of all following ones, and the share of right answers. For each encoder, among sources, sources that end
with another question, and other documents: how often the nearest is the pair's source, and the divergences behind the summary of the
nearest, and behind spans of the nearest three (`align`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import _warmstart_quality as quality
import numpy as np
import torch
from _adapter_training import fit_values, sample_of, train_adapters
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.numbers import mean
from shared.results import Row, environment, show, write_csv
from tqdm import tqdm

from hf_kvcaches import SlotProjector, WarmStartCache, WarmStartLibrary
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.evaluate.runner import next_tokens
from hf_kvcaches.reuse.tokens import as_ids
from hf_kvcaches.warmstart.reading import PromptStates, read_prompt
from hf_kvcaches.warmstart.summaries.adapters import Adapters
from hf_kvcaches.warmstart.summaries.slots import Slots
from tests.testbed.pairs import Kind, Pair, make_pairs

KINDS: tuple[Kind, ...] = ("no_content", "few_words", "reworded")
LENGTHS = (300, 600)
LEARNED_SEED, JUDGED_SEED, OTHERS_SEED = 11, 12, 13
STRUCTURES = ("shared", "per_head", "block_diagonal")


class Known(NamedTuple):
    """A pair with the states of its prompts."""

    pair: Pair
    source: PromptStates
    target: PromptStates


def hashed(texts: list[str]) -> np.ndarray[Any, Any]:
    """Bags of words, without weights: the plainest of encoders."""
    rows = np.zeros((len(texts), 512), np.float32)
    for row, text in zip(rows, texts, strict=True):
        for word in text.lower().split():
            row[sum(word.encode()) * 31 % 512] += 1
    return rows


class Comparison:
    """The model, the pairs that maps are learned from, and those that are judged."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.model, self.tokenizer = load(args.model, device)
        self.library = WarmStartLibrary(self.model, self.tokenizer, slots=8)
        self.geometries = self.library.rotation.layers
        self.learned = self._known(LEARNED_SEED)
        self.judged = self._known(JUDGED_SEED)
        self.cold = [next_tokens(self.model, known.pair.target.prompt, known.pair.target.continuation) for known in self.judged]

    def _known(self, seed: int) -> list[Known]:
        pairs = [pair for kind in KINDS for length in LENGTHS for pair in make_pairs(self.tokenizer, kind, self.args.pairs, seed, length)]
        return [Known(pair, self._read(pair.source.prompt), self._read(pair.target.prompt)) for pair in tqdm(pairs, desc="reading")]

    def _read(self, ids: Sequence[int]) -> PromptStates:
        return read_prompt(self.model, torch.tensor([list(ids)], device=self.device))

    def judge(self, started: Callable[[int, Known], WarmStartCache], **labels: Any) -> Row:
        """A row for a way to start the judged pairs."""
        kls, right = [], []
        for number, (known, cold) in enumerate(zip(self.judged, self.cold, strict=True)):
            target = known.pair.target
            logits = next_tokens(self.model, target.prompt, target.continuation, started(number, known))
            kls.append(divergence(cold, logits).tolist())
            right += target.right(logits.argmax(-1).tolist())
        return {**labels, "pairs": len(kls), **means(kls), "right": mean([float(flag) for flag in right])}

    def cold_row(self) -> Row:
        """What the model says alone."""
        right = [
            flag for known, cold in zip(self.judged, self.cold, strict=True) for flag in known.pair.target.right(cold.argmax(-1).tolist())
        ]
        return {"map": "cold", "pairs": len(self.cold), "first": 0.0, "following": 0.0, "right": mean([float(flag) for flag in right])}

    def structures(self, layout: str, slots: int) -> Iterator[Row]:
        """Rows for each map of summaries of this layout and number of slots."""
        pool = lambda known, side: quality.summarise(getattr(known, side), len(getattr(known.pair, side).prompt), layout, slots)  # noqa: E731
        made = [(pool(known, "source"), pool(known, "target")) for known in self.learned]
        ways: dict[str, Callable[[Known], Slots]] = {
            "own": lambda known: pool(known, "target"),
            "none": lambda known: pool(known, "source"),
        }
        for name, adapters in self._adapters(layout, slots):
            ways[name] = lambda known, adapters=adapters: adapters.apply(pool(known, "source"), self.geometries)  # type: ignore[misc]
        for structure in STRUCTURES:
            projector = SlotProjector.fit(made, self.geometries, structure=structure)  # type: ignore[arg-type]
            ways[f"projector, {structure}"] = lambda known, projector=projector: projector.apply(  # type: ignore[misc]
                pool(known, "source"), len(known.pair.target.prompt), self.geometries
            )
        for name, way in ways.items():
            started = lambda number, known, way=way: quality.SummaryCache(self.model, self.library, way(known))  # noqa: E731
            yield self.judge(started, layout=layout, slots=slots, map=name)

    def _adapters(self, layout: Any, slots: int) -> Iterator[tuple[str, Adapters]]:
        compressor = quality.SlotCompressor(slots, layout)
        samples = []
        for states in (known.source for known in self.learned):
            keys, values = zip(*states.layers, strict=True)
            samples.append(sample_of(compressor, keys, values, states.queries, self.geometries, 1, states.scaling))
        yield "adapters, ridge", fit_values(samples)
        yield "adapters, trained", train_adapters(samples, steps=self.args.steps)

    def _asking_otherwise(self, pair: Pair) -> list[int]:
        """The source with another question at its end."""
        start = pair.source.parts[-1].start
        return [*pair.source.prompt[:start], *self.tokenizer.encode(pair.source.asked[1].question, add_special_tokens=False)]

    def encoders(self) -> Iterator[Row]:
        """Rows for what each encoder finds among the sources and prompts that nobody asks for."""
        others = [pair.source.prompt for length in LENGTHS for pair in make_pairs(self.tokenizer, "unrelated", 25, OTHERS_SEED, length)]
        others += [self._asking_otherwise(known.pair) for known in self.judged]
        states = {tuple(known.pair.source.prompt): known.source for known in self.judged}
        for name, encoder in {"model": "model", "hidden": "hidden", "bag of words": hashed}.items():
            library = WarmStartLibrary(self.model, self.tokenizer, slots=0, encoder=encoder)
            library.add([*states, *others])
            nearest = [library.near(as_ids(known.pair.target.prompt), 1)[0].ids.tolist() for known in self.judged]
            found = [near == list(known.pair.source.prompt) for near, known in zip(nearest, self.judged, strict=True)]

            def summary(number: int, known: Known, nearest: list[list[int]] = nearest) -> WarmStartCache:
                near = states.get(tuple(nearest[number])) or self._read(nearest[number])
                return quality.SummaryCache(self.model, self.library, quality.summarise(near, len(nearest[number]), "salient"))

            def align(number: int, known: Known, library: WarmStartLibrary = library) -> WarmStartCache:
                return WarmStartCache(self.model, library, strategy="align")

            labels = {"encoder": name, "prompts": len(library), "found": mean([float(flag) for flag in found])}
            yield self.judge(summary, map="none", layout="salient", slots=quality.SUMMARY_SLOTS, **labels)
            yield self.judge(align, map="align", **labels)


def means(kls: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mean of the first tokens' divergences, and of all following ones'."""
    return {"first": mean([row[0] for row in kls]), "following": mean([kl for row in kls for kl in row[1:]])}


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "model", "device", "csv", "quick")
    parser.add_argument("--pairs", type=int, default=6, help="of each kind and length, to learn from and to judge")
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--steps", type=int, default=200, help="of the training of adapters")
    args = parser.parse_args()
    check_counts(args, ["pairs", "slots", "steps"])
    if args.quick:
        vars(args).update(pairs=1, slots=[8], steps=2)
    return args


@torch.no_grad()
def main() -> None:
    args = parse()
    device = begin(args)
    comparison = Comparison(args, device)
    rows, encoders = [comparison.cold_row()], list(comparison.encoders())
    for layout in ("salient", "paper"):
        for slots in tqdm(args.slots, desc=layout):
            rows += comparison.structures(layout, slots)
    numbers = {"first": "{first:.2g}", "following": "{following:.2g}", "right": "{right:.0%}"}
    print(show([{"layout": "", "slots": "", **row} for row in rows], {"layout": "{layout}", "slots": "{slots}", "map": "{map}", **numbers}))
    print(f"\n{show(encoders, {'encoder': '{encoder}', 'found': '{found:.0%} of {prompts}', 'from': '{map}', **numbers})}")
    if args.csv:
        columns = ("encoder", "prompts", "found", "layout", "slots", "map", "pairs", "first", "following", "right")
        write_csv(args.csv / "warmstart-summaries.csv", [*rows, *encoders], environment(device), columns)


if __name__ == "__main__":
    run_script(main)

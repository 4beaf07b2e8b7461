"""Times TranslatedCache: until the first token.

    python scripts/bench_translation.py [--device auto] [--csv docs/benchmarks/translation-speed.csv] [--plot FILE.png]

Before anything is timed, codes that are a model's own keys and values must change nothing, codes must be read from bytes as they were, and
diverge less than raw keys and values from what the consumer says after its own prefill. Then every prompt is produced and answered by all
sides in turns, in one process, and a ratio is taken within a prompt: the time of the consumer's prefill by that of the side. The making of
the cache, with all checks of models and prompt, is in the time; what a producer needs stands beside it. Printed is also at which bandwidth
codes break even.

`larger` is a Llama with random weights, and a consumer that differs by a little noise.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import _translation_timing as timing
import torch
from _translation_timing import BYTES, CODES, ONE, OWN, RAW, Answers, Side
from shared.bars import Bar
from shared.cli import run_script
from shared.models import LARGER, Pair, Shape, random_ids
from shared.plot import Panel
from shared.results import Row, rows_where
from shared.sections import TIMES, Output, begin_sections, run_sections, section_arguments

from hf_kvcaches.translate.config import TranslatorConfig
from hf_kvcaches.translate.translator import CacheTranslator

SECTIONS = ("first token", "larger")
SIDES = (OWN, CODES, BYTES, ONE, RAW)
COLUMNS = "section measure workload side length tokens count time_ms time_q1_ms time_q3_ms ratio ratio_q1 ratio_q3 value unit".split()
SHOWN = {
    "": "{side}, {measure}",
    "of": "{workload}",
    "tokens": "{length}",
    **TIMES,
    "value": "{value:g} {unit}",
}
# What is promised, and at how many tokens.
FASTER, TOKENS = 8.0, 2048
# Settings of translators; the default one is what users get.
SETTINGS: dict[str, dict[str, Any]] = {
    CODES: {},
    ONE: {"recompute_layers": 1},
}
# Random weights have no loss worth a gradient.
PLAIN = {"config": TranslatorConfig(metric="plain")}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    lengths: tuple[int, ...] = (300, 600, 900)  # of prompts, in tokens
    rounds: int = 20  # prompts of each length
    proven: int = 8  # prompts whose first token is compared before
    texts: tuple[int, int] = (32, 256)  # that translators are fitted to, and their tokens
    shape: Shape = LARGER  # of the larger model
    larger: tuple[int, ...] = (1024, 2048, 4096)  # lengths of its prompts
    larger_rounds: int = 7
    quick: bool = False


QUICK = Size((40, 60), 2, 2, (8, 64), Shape(64, 3, 4, 96, 128), (80,), 2, quick=True)


class Run:
    """One run: what is measured where."""

    def __init__(self, size: Size, device: torch.device) -> None:
        from tests import testbed

        self.size, self.device = size, device
        producer, tokenizer = testbed.load("base")
        self.producer = producer.to(device)
        self.pair = Pair.of(testbed.load("tuned")[0], device, tokenizer)
        count, length = size.texts
        ids = tokenizer(testbed.held_out("prose"), verbose=False)["input_ids"]
        # Prompts come from the end, texts to fit from before.
        prompts = size.rounds * size.lengths[-1]
        self.ids, rest = ids[-prompts:], ids[:-prompts]
        self.texts = [rest[start : start + length] for start in range(0, len(rest), max(length, len(rest) // count))][:count]
        self._codecs: dict[str, CacheTranslator] = {}

    def codec(self, name: str) -> CacheTranslator | None:
        """The translator of a side, fitted when it is first asked for; None for sides without codes."""
        name = CODES if name == BYTES else name
        if name in SETTINGS and name not in self._codecs:
            options = ({"config": TranslatorConfig(metric="plain")} if self.size.quick else {}) | SETTINGS[name]
            fit = (self.producer, self.pair.switched, self.pair.tokenizer, self.texts)
            self._codecs[name] = CacheTranslator.fit(*fit, progress=False, **options)
        return self._codecs.get(name)

    def prompts(self, length: int, count: int) -> list[torch.Tensor]:
        """Prompts of so many tokens, each another text."""
        return [torch.tensor([self.ids[start : start + length]], device=self.device) for start in range(0, count * length, length)]

    def sides(self) -> list[Side]:
        return [Side(name, self.producer, self.pair, self.codec(name)) for name in SIDES]

    def prove(self) -> list[Row]:
        prompts = self.prompts(self.size.lengths[-1], self.size.proven)
        text, rows = timing.prove(self.sides(), prompts, "base to tuned", trained=not self.size.quick)
        print(text, flush=True)
        return [{**row, "length": prompts[0].shape[1], "tokens": prompts[0].shape[1]} for row in rows]

    def _all(self, section: str, sides: Sequence[Side], prompts: Sequence[torch.Tensor]) -> Iterator[Row]:
        """Rows of sides that take turns."""
        # What is new to a process is slow.
        timing.ask_in_turns(sides, prompts[:1])
        answers, length = timing.ask_in_turns(sides, prompts), prompts[0].shape[1]
        yield from timing.rows_of(answers, length=length)
        print(f"{section}, {length} tokens: {break_even(answers)}\n", flush=True)

    def first_token(self) -> Iterator[Row]:
        yield from self.prove()
        for length in self.size.lengths:
            yield from self._all("first token", self.sides(), self.prompts(length, self.size.rounds))

    def larger(self) -> Iterator[Row]:
        size, vocabulary = self.size, self.size.shape.vocabulary
        pair = Pair.random(size.shape, "gqa", self.device)
        producer: Any = copy.deepcopy(pair.plain)
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in producer.parameters():
                weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=random).to(weight) if weight.ndim > 1 else 0
        texts = random_ids(vocabulary, 4, size.texts[1], seed=2).tolist()
        codec = CacheTranslator.fit(producer, pair.switched, None, texts, progress=False, **PLAIN)
        sides = [Side(name, producer, pair, codec if name in (CODES, BYTES) else None) for name in (OWN, CODES, BYTES, RAW)]
        for length in size.larger:
            prompts = list(random_ids(vocabulary, size.larger_rounds, 1, length, seed=length).to(self.device))
            if length == size.larger[0]:
                print(timing.prove(sides, prompts[:2], "larger", trained=False)[0], flush=True)
            yield from self._all("larger", sides, prompts)


def break_even(answers: Answers) -> str:
    """The bandwidth from which on codes that the producer has pay, by the medians of `OWN` and `BYTES`, in words."""
    own, after = (statistics.median(answer.seconds for answer in answers[name]) for name in (OWN, BYTES))
    bits = 8e-9 * statistics.median(answer.nbytes for answer in answers[BYTES])
    beats = f"from {bits / (own - after):.3g} Gb/s on" if own > after else f"never, as they take {1e3 * after:.1f} ms without the transfer"
    return f"codes beat the consumer's prefill ({1e3 * own:.1f} ms) {beats}"


def bars() -> list[Bar]:
    where = {"section": "larger", "measure": "first token", "side": BYTES, "length": TOKENS}
    return [Bar(f"codes as bytes at least {FASTER:g}x as fast as the larger consumer's prefill, {TOKENS:,} tokens", where, least=FASTER)]


def panels(rows: Sequence[Row]) -> list[Panel]:
    return [
        Panel(f"{section}, times as fast as the consumer's prefill", timed, "{side}", "length", "ratio", log="xy", levels=(1.0,))
        for section in ("first token", "larger")
        for timed in [rows_where(rows, section=section, measure="first token")]
    ]


def main() -> None:
    parser = section_arguments(__doc__, SECTIONS)
    parser.add_argument("--rounds", type=int, help="prompts of each length; default: 20, and 7 for the larger model")
    args = parser.parse_args()
    device = begin_sections(args, "rounds")
    size = QUICK if args.quick else Size()
    if args.rounds is not None:
        size = replace(size, rounds=args.rounds, larger_rounds=args.rounds, proven=min(size.proven, args.rounds))
    run = Run(size, device)
    works = (run.first_token, run.larger)
    output = Output("TranslatedCache", COLUMNS, SHOWN, bars(), panels)
    run_sections(args, device, dict(zip(SECTIONS, works, strict=True)), output)


if __name__ == "__main__":
    run_script(main)

"""Times TranslatedCache: until the first token, part by part, over a network by arithmetic and over a real socket.

    python scripts/bench_translation.py [--device auto] [--csv docs/benchmarks/translation-speed.csv] [--plot FILE.png]

Before anything is timed, codes that are a model's own keys and values must change nothing, codes must be read from bytes as they were, and
diverge less than raw keys and values from what the consumer says after its own prefill. Then every prompt is produced and answered by all
sides in turns, in one process, and a ratio is taken within a prompt: the time of the consumer's prefill by that of the side. The making of
the cache, with all checks of models and prompt, is in the time; what a producer needs stands beside it.

`phases` takes both times apart. `chain` adds them up, with the transfer by arithmetic, and says where breaking even is: a producer as fast
as the consumer takes as long for its prefill as the consumer for its own, so codes pay where the prefix is read already, or once for many
consumers. `socket` has the producer in another process, and its time is that of all. `larger` is a Llama with random weights, and
a consumer that differs by a little noise. `kernel` compares the rebuilding of a layer with its two matrix products alone.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from _common import environment, run_script, table
from _equip_sides import Shape, spread
from _sections import arguments, begin, measure_each, run_sections
from _segments_report import Bar
from _segments_sides import Pair, Row, larger_model
from _translation_analysis import Kernel, kernel_rows
from _translation_timing import (
    BYTES,
    CODES,
    ONE,
    OWN,
    PAPER,
    PATCH,
    RAW,
    RAW_SOCKET,
    STREAM,
    WHOLE,
    Answer,
    Answers,
    Remote,
    Side,
    in_turns,
    phases,
    prove,
    rows_of,
)
from _warmstart_report import COLUMNS, show

from hf_kvcaches.errors import require
from hf_kvcaches.translate.translator import CacheTranslator

SECTIONS = ("first token", "phases", "socket", "larger", "kernel")
SIDES = (OWN, CODES, BYTES, ONE, PAPER, PATCH, RAW)
GBPS = (1, 10, 100, 200, 1000)
COLORS = dict(zip((*SIDES, STREAM, WHOLE, RAW_SOCKET), (f"C{number}" for number in range(10)), strict=True))
# What is promised, and at how many tokens.
FASTER, TOKENS = 3.0, 900
# Settings of translators; the default one is what users get.
SETTINGS: dict[str, dict[str, Any]] = {
    CODES: {},
    ONE: {"recompute_layers": 1},
    PAPER: {"method": "paper", "payload": 0.25, "metric": "plain", "patch_layers": None},
    PATCH: {"method": "paper", "payload": 0.25, "metric": "plain", "patch_layers": [2], "aligner": "mlp"},
}
# Random weights have neither a loss worth a gradient nor layers worth a patch.
PLAIN: dict[str, Any] = {"metric": "plain", "patch_layers": None}

LARGER = Shape(512, 8, 8, 1408, 2048)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    lengths: tuple[int, ...] = (300, 600, 900)  # of prompts, in tokens
    rounds: int = 20  # prompts of each length
    proven: int = 8  # prompts whose first token is compared before
    texts: tuple[int, int] = (32, 256)  # that translators are fitted to, and their tokens
    shape: Shape = LARGER  # of the larger model, with how many key heads
    kv_heads: int = 2
    larger: tuple[int, ...] = (1024, 2048, 4096)  # lengths of its prompts
    larger_rounds: int = 7  # how many of each
    kernels: tuple[Kernel, ...] = (Kernel(256, 64, 256), Kernel(4096, 256, 2048))  # layers to rebuild
    kernel_rounds: int = 30  # how often
    quick: bool = False  # whether numbers mean nothing


QUICK = Size(
    lengths=(40, 60),
    rounds=2,
    proven=2,
    texts=(8, 64),
    shape=Shape(64, 3, 4, 96, 128),
    larger=(80,),
    larger_rounds=2,
    kernels=(Kernel(32, 8, 64, tokens=50, head_dim=16),),
    kernel_rounds=3,
    quick=True,
)


@dataclass
class Run:
    """One run: what is measured where."""

    size: Size  # how much
    device: torch.device  # where
    rows: list[Row] = field(default_factory=list)  # what is measured so far

    def __post_init__(self) -> None:
        from tests import testbed

        producer, tokenizer = testbed.load("base")
        self.producer = producer.to(self.device)
        self.pair = Pair.of(testbed.load("tuned")[0], self.device, tokenizer)
        count, length = self.size.texts
        ids = tokenizer(testbed.held_out("prose"), verbose=False)["input_ids"]
        # Prompts come from the end, texts to fit from before.
        prompts = self.size.rounds * self.size.lengths[-1]
        self.ids, rest = ids[-prompts:], ids[:-prompts]
        self.texts = [rest[start : start + length] for start in range(0, len(rest), max(length, len(rest) // count))][:count]
        self._codecs: dict[str, CacheTranslator] = {}

    def codec(self, name: str) -> CacheTranslator | None:
        """The translator of a side, fitted when it is first asked for; None for sides without codes."""
        name = CODES if name == BYTES else name
        if name not in SETTINGS:
            return None
        if name not in self._codecs:
            options = SETTINGS[name] | ({"metric": "attention"} if self.size.quick else {})
            made = CacheTranslator.fit(self.producer, self.pair.switched, self.pair.tokenizer, self.texts, progress=False, **options)
            self._codecs[name] = made
        return self._codecs[name]

    def prompts(self, length: int, count: int) -> list[torch.Tensor]:
        """Prompts of so many tokens, each another text."""
        starts = range(0, count * length, length)
        return [torch.tensor([self.ids[start : start + length]], device=self.device) for start in starts]

    def sides(self, names: Sequence[str]) -> list[Side]:
        return [Side(name, self.producer, self.pair, self.codec(name)) for name in names]

    def go(self, sections: Sequence[str]) -> None:
        if set(sections) & {"first token", "phases", "socket"}:
            prompts = self.prompts(self.size.lengths[-1], self.size.proven)
            text, rows = prove(self.sides(SIDES), prompts, "base to tuned", trained=not self.size.quick)
            print(text, flush=True)
            if "first token" in sections:
                self.rows += [{**row, "section": "first token", "tokens": prompts[0].shape[1]} for row in rows]
        works = {
            "first token": self.first_token,
            "phases": self.phases,
            "socket": self.socket,
            "larger": self.larger,
            "kernel": self.kernel,
        }
        measure_each(self, works, sections, show_timed)

    def _all(self, section: str, sides: Sequence[Side], prompts: Sequence[torch.Tensor]) -> None:
        """Rows of sides that take turns, with the chain at each bandwidth."""
        # What is new to a process is slow.
        in_turns(sides, prompts[:1])
        answers = in_turns(sides, prompts)
        length = prompts[0].shape[1]
        self.rows += rows_of(answers, section=section, length=length)
        chained = chain(answers, section=section, length=length)
        self.rows += chained
        print(f"{chain_table(chained)}\n{section}, {length} tokens: {break_even(answers)}\n", flush=True)

    def first_token(self) -> None:
        for length in self.size.lengths:
            self._all("first token", self.sides(SIDES), self.prompts(length, self.size.rounds))

    def phases(self) -> None:
        for length in self.size.lengths:
            sides, prompts = self.sides(SIDES), self.prompts(length, self.size.rounds)
            in_turns(sides, prompts[:1])
            self.rows += phases(sides, prompts, length=length, tokens=length)
        print(breakdown(self.rows, self.size.lengths[-1]), flush=True)

    def socket(self) -> None:
        codec = self.codec(CODES)
        assert codec is not None
        with tempfile.TemporaryDirectory() as folder:
            codec.save_pretrained(folder)
            own = Side(OWN, self.producer, self.pair)
            with Remote(self.pair, codec, Path(folder), "base") as remote:
                for length in self.size.lengths:
                    prompts = self.prompts(length, self.size.rounds)
                    answers: Answers = {name: [] for name in (OWN, STREAM, WHOLE, RAW_SOCKET)}
                    for number, ids in enumerate([prompts[0], *prompts]):
                        names = list(answers)
                        for name in [*names[number % 4 :], *names[: number % 4]]:
                            answer = alone(own, ids) if name == OWN else remote.ask(name, ids)
                            # What is new to a process is slow.
                            answers[name] += [answer] if number else []
                    if [each.new for each in answers[STREAM]] != [each.new for each in answers[WHOLE]]:
                        raise SystemExit("socket: streamed codes give other tokens than codes at once")
                    self.rows += rows_of(answers, section="socket", length=length)

    def larger(self) -> None:
        size = self.size
        pair = larger_model(size.shape, size.kv_heads, self.device)
        producer: Any = copy.deepcopy(pair.plain)
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in producer.parameters():
                weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=random).to(weight) if weight.ndim > 1 else 0
        texts = torch.randint(1, size.shape.vocabulary, (4, size.texts[1]), generator=random).tolist()
        fitted = {
            name: CacheTranslator.fit(producer, pair.switched, None, texts, progress=False, **SETTINGS[name] | PLAIN)
            for name in (CODES, PAPER)
        }
        fitted[BYTES] = fitted[CODES]
        sides = [Side(name, producer, pair, fitted.get(name)) for name in (OWN, CODES, BYTES, PAPER, RAW)]
        for length in size.larger:
            prompts = torch.randint(1, size.shape.vocabulary, (size.larger_rounds, 1, length), generator=random).to(self.device)
            if length == size.larger[0]:
                text, _ = prove(sides, list(prompts[:2]), "larger", trained=False)
                print(text, flush=True)
            self._all("larger", sides, list(prompts))

    def kernel(self) -> None:
        for kernel in self.size.kernels:
            self.rows += kernel_rows(kernel, self.size.kernel_rounds, self.device)


def alone(side: Side, ids: torch.Tensor) -> Answer:
    """What needs no producer."""
    seconds, new = side.answer(ids, None)
    return Answer(seconds, 0.0, 0, ids.shape[1], new)


def chain(answers: Answers, **labels: Any) -> list[Row]:
    """From the prompt to the first token, with the producer's work and a transfer by arithmetic."""
    rows = []
    for name, own in answers.items():
        for gbps in GBPS if own[0].nbytes else ():
            whole = [each.producing + 8e-9 * each.nbytes / gbps + each.seconds for each in own]
            ratios = [base.seconds / mine for base, mine in zip(answers[OWN], whole, strict=True)]
            row = {**labels, "side": name, "measure": f"chain at {gbps} Gb/s", "count": len(own), "tokens": own[0].tokens}
            rows.append({**row, **spread("time", whole, 1e3), **spread("ratio", ratios)})
    return rows


def chain_table(rows: Sequence[Row]) -> str:
    """A line for each side, a column for each bandwidth."""
    sides = dict.fromkeys(row["side"] for row in rows)
    lines = [[side, *(f"{row['time_ms']:.2f}" for row in rows if row["side"] == side)] for side in sides]
    return table(["producer, transfer, consumer: ms", *(f"{gbps} Gb/s" for gbps in GBPS)], lines)


def break_even(answers: Answers) -> str:
    """At which bandwidths codes begin to pay, by the medians of `OWN`, `BYTES` and `RAW`, in words."""
    middle = lambda name, part: statistics.median(getattr(each, part) for each in answers[name])  # noqa: E731
    own, after = middle(OWN, "seconds"), middle(BYTES, "seconds")
    ahead, bits = middle(BYTES, "producing"), 8e-9 * middle(BYTES, "nbytes")
    found = []
    for what, gap in (("the whole chain", own - ahead - after), ("with codes at the producer", own - after)):
        beats = f"from {bits / gap:.3g} Gb/s on" if gap > 0 else f"never, as it takes {1e3 * (own - gap):.1f} ms without the transfer"
        found.append(f"{what} beats the consumer's prefill ({1e3 * own:.1f} ms) {beats}")
    raw_bits, slower = 8e-9 * middle(RAW, "nbytes"), ahead + after - middle(RAW, "producing") - middle(RAW, "seconds")
    beats = f"below {(raw_bits - bits) / slower:.3g} Gb/s" if slower > 0 else "at any bandwidth"
    return "; ".join([*found, f"the whole chain beats that of raw keys and values {beats}"])


# Phases by the columns of the paper's table 4.
PAPERS_PHASES = {
    "Prod.": ("producer's prefill",),
    "Enc.": ("encode",),
    "Reb.": ("read bytes", "run the lowest layers", "rebuild", "rebuild, around the kernel", "copy keys and values"),
    "Patch": ("patch",),
    "Dec1": ("the model's pass",),
}


def breakdown(rows: Sequence[Row], length: int) -> str:
    """The paper's table 4: medians in milliseconds, for prompts of one length."""
    own = [row for row in rows if row["section"] == "phases" and row["length"] == length]
    lines = []
    for side in dict.fromkeys(row["side"] for row in own):
        times = {row["measure"]: row["time_ms"] for row in own if row["side"] == side}
        named = [sum(times.pop(phase, 0.0) for phase in members) for members in PAPERS_PHASES.values()]
        lines.append([side, *(f"{value:.2f}" for value in (*named, sum(times.values()), sum(named) + sum(times.values())))])
    return table([f"{length} tokens, ms, without transfer", *PAPERS_PHASES, "rest", "together"], lines)


def bars() -> list[Bar]:
    chosen = {"section": "first token", "measure": "first token", "side": CODES, "length": TOKENS}
    text = f"codes in hand at least {FASTER:g}x as fast as the consumer's prefill, {TOKENS} tokens"
    return [Bar(text, chosen, lambda row: float(row["ratio"]), FASTER)]


def write_plot(path: Path, rows: Sequence[Row], device: torch.device) -> None:
    """How many times as fast sides are, what the time goes to, and the chain by bandwidth."""
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    figure, axes = plots.subplots(2, 2, figsize=(15, 10), layout="constrained")
    for axis, section in ((axes[0, 0], "first token"), (axes[0, 1], "larger")):
        own = [row for row in rows if (row["section"], row["measure"]) == (section, "first token") and "ratio" in row]
        for side in dict.fromkeys(row["side"] for row in own):
            mine = [row for row in own if row["side"] == side]
            away = [[row["ratio"] - row["ratio_q1"] for row in mine], [row["ratio_q3"] - row["ratio"] for row in mine]]
            axis.errorbar(
                [row["length"] for row in mine], [row["ratio"] for row in mine], away, capsize=3, marker="o", color=COLORS[side], label=side
            )
        axis.set(title=f"{section}: times as fast as the consumer's prefill", xlabel="tokens", xscale="log", yscale="log")
    taken = [row for row in rows if row["section"] == "phases" and row["workload"] == "first token"]
    longest = max((row["length"] for row in taken), default=0)
    below: dict[str, float] = {}
    for number, phase in enumerate(dict.fromkeys(row["measure"] for row in taken)):
        own = {row["side"]: row["time_ms"] for row in taken if (row["measure"], row["length"]) == (phase, longest)}
        heights = {"color": f"C{number % 10}", "hatch": "//" * (number // 10)}
        axes[1, 0].barh(list(own), list(own.values()), left=[below.get(side, 0.0) for side in own], label=phase, **heights)
        below |= {side: below.get(side, 0.0) + time for side, time in own.items()}
    axes[1, 0].set(title=f"time to the first token, {longest} tokens, ms")
    chained = [row for row in rows if row["section"] == "first token" and row["measure"].startswith("chain")]
    longest = max((row["length"] for row in chained), default=0)
    for side in dict.fromkeys(row["side"] for row in chained):
        own = {row["measure"]: row["time_ms"] for row in chained if (row["side"], row["length"]) == (side, longest)}
        axes[1, 1].plot(GBPS, [own[f"chain at {gbps} Gb/s"] for gbps in GBPS], marker="o", color=COLORS[side], label=side)
    axes[1, 1].set(title=f"producer, transfer and consumer, {longest} tokens, ms", xlabel="Gb/s", xscale="log")
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    where = environment(device)
    figure.suptitle(f"{where['hardware']}, {where['threads']} threads, torch {where['torch']}: TranslatedCache", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plots.close(figure)


def show_timed(rows: Sequence[Row]) -> str:
    """A table of what was timed, but for the chains."""
    return show([row for row in rows if "time_ms" in row and not row["measure"].startswith("chain")])


def main() -> None:
    help_of_rounds = "prompts of each length; default: 20, and 7 for the larger model"
    args = arguments(__doc__, SECTIONS, "rounds", help_of_rounds).parse_args()
    device = begin(args, "rounds")
    size = QUICK if args.quick else Size()
    if args.rounds is not None:
        size = replace(size, rounds=args.rounds, larger_rounds=args.rounds, proven=min(size.proven, args.rounds))
    run = Run(size, device)
    run_sections(run, COLUMNS, args, device)
    print("\n".join(bar.verdict(run.rows) for bar in bars()))
    if args.plot:
        write_plot(args.plot, run.rows, device)


if __name__ == "__main__":
    run_script(main)

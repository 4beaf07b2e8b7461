"""What pruning costs on a real model: needles, facts in words, and the text's own continuation.

    python scripts/eval_pruning.py [--model smollm2|gemma3|FOLDER] [--samples 48] [--tokens 600] [--ratios 0.5 0.25 0.125]
        [--caches NAME ...] [--codes 0.125 0.0625] [--chats [COUNT]] [--kvpress PYTHON] [--csv FILE]

Contexts of book text are read in one call and pruned before any question is known; each question is asked, with its answer in the same
call, of a copy of the pruned cache. **needles**: a number of seven digits anywhere in the text. **facts**: three facts in words, asked for
in other words. An answer is right if greedy decoding writes exactly its tokens; counted are those that the full cache gets right. **loss**:
of the next 32 tokens of the book, in nats a token beyond the full cache's. **chats**: turns of some 200 tokens in `BUDGET` slots, the
replies fed one token at a time; the fact that the first message stated is asked for in the end.

**codes**: nothing is pruned; all but 4 first and 64 newest tokens of the context are read from codes of a `KVCodec`, in place or packed.

The probe, the budgets of heads and the codec are calibrated on other parts of the text. The numbers of the documentation have seed 1; what
was chosen by measurement was chosen with seed 0. Rows are kept in `--state` as they are measured: a run that is cut off goes on where it
was.
`--kvpress` names the interpreter of an environment with kvpress, which measures its presses on the same samples.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from _pruning_samples import FACTS, Book, Chat, Sample, chats, samples
from shared import ROOT, TESTBED
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.plot import Panel
from shared.results import Row, environment, rows_where, show, write_csv
from shared.timing import synchronize
from transformers import Cache, DynamicCache

from hf_kvcaches import EquipCache, HeadBudgets, KeepProbe, KVCodec, SubspaceCache, compat
from hf_kvcaches.cli import suite
from hf_kvcaches.cli.suite import FULL_CACHE, Item, Log
from hf_kvcaches.codec.past import PackedCoding
from hf_kvcaches.core.hub import Artifact
from hf_kvcaches.core.report import measured_bytes
from hf_kvcaches.evaluate.runner import evaluating

COLUMNS = "task cache peer ratio budget samples needles of_needles facts of_facts loss bytes seconds".split()
SHOWN = {
    "cache": "{cache}",
    "ratio": "{ratio:g}",
    "budget": "{budget}",
    "needles": "{needle_share:.0%} of {of_needles}",
    "facts": "{fact_share:.0%} of {of_facts}",
    "loss": "{loss:+.3f}",
    "MiB": "{mib:.1f}",
    "seconds": "{seconds:.2f}",
}
PICTURE = "pruned contexts, by the share of their tokens that is kept"
# Of the picture: what compares heads or has measured their budgets, and what does not.
BETWEEN_HEADS = ("future", "future, refit", "kvzip", "kvzip, refit", "probe, refit", "compactor, HeadBudgets", "snapkv", "kvpress kvzip")


def mean(values: Sequence[float]) -> float:
    """The mean; not a number for nothing."""
    return fmean(values) if values else float("nan")


def answers_of(pair: tuple[Row, Row]) -> list[bool | None]:
    """Which answers are right; None where the full cache's is not."""
    row, full = pair
    return [right if possible else None for right, possible in zip(row["right"], full["right"], strict=True)]


def counted(what: str, answers: Sequence[bool | None]) -> Row:
    """Right answers of those that the full cache gets right."""
    known = [answer for answer in answers if answer is not None]
    return {f"{what}s": sum(known), f"of_{what}s": len(known), f"{what}_share": mean(known)}


def loss(pairs: Sequence[tuple[Row, Row]]) -> float:
    """What the continuation loses beyond the full cache, in nats a token."""
    return mean([row["continuation"] - full["continuation"] for row, full in pairs])


def costs(pairs: Sequence[tuple[Row, Row]]) -> Row:
    """Mean bytes and seconds, where they were measured."""
    size, seconds = (mean([row[name] for row, _ in pairs if name in row]) for name in ("bytes", "seconds"))
    return {"bytes": size, "mib": size / 2**20, "seconds": seconds}


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Needles, facts and loss of each model by the share that is kept."""
    made = []
    for model in dict.fromkeys(row["model"] for row in rows):
        kept = rows_where(rows, model=model, task="prompt")
        kept = [row | {f"{what}_share": row[f"{what}s"] / (row[f"of_{what}s"] or 1) for what in ("needle", "fact")} for row in kept]
        for chosen, heads in ((True, "budgets between heads"), (False, "other")):
            group = [row for row in kept if (row["cache"] in BETWEEN_HEADS) == chosen]
            for column, what in (("needle_share", "needles"), ("fact_share", "facts"), ("loss", "nats lost by the continuation")):
                made.append(Panel(f"{model}: {what}, {heads}", group, "{cache}", "ratio", column, "x", along="share of the tokens"))
    return made


A = TypeVar("A", bound=Artifact)
TASKS = ("needle", "facts")
BUDGET, CHAT_TOKENS = 512, 3000
CALIBRATION = (6, 700)  # texts, and tokens of each
PRESSES = ("kvzip", "compactor")
PEERS = [f"kvpress {press}" for press in PRESSES]
PROBE, HEADS = "probe", "HeadBudgets"
IN_PLACE, PACKED = "codes in place", "codes packed"
SINKS, RECENT = 4, 64  # tokens that are exact beside codes
CODEC_TEXTS = (16, 512)  # as CALIBRATION
# By name: the policy, and other arguments.
CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "future": ("future", {}),
    "future, refit": ("future", {"refit": True}),
    "kvzip": ("kvzip", {}),
    "kvzip, refit": ("kvzip", {"refit": True}),
    "kvzip, refit, compact": ("kvzip", {"refit": True, "positions": "compact"}),
    "probe, refit": (PROBE, {"refit": True}),
    "probe, refit, compact": (PROBE, {"refit": True, "positions": "compact"}),
    "probe, refit, coded": (PROBE, {"refit": True, "codec": 0.125}),
    "compactor, HeadBudgets": ("compactor", {"head_budgets": HEADS}),
    "compactor": ("compactor", {}),
    "expected_attention, layer": ("expected_attention", {"head_budgets": "layer"}),
    "keydiff": ("keydiff", {}),
    "snapkv": ("snapkv", {}),
    "streaming": ("streaming", {}),
    "h2o": ("h2o", {}),
}


class Evaluation:
    """A model and what is measured on it."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.name, self.device = args, Path(args.model).name, device
        self.model, self.tokenizer = load(args.model, device, "float32")
        self.book = Book(args.text.read_text(encoding="utf-8"), self.tokenizer)
        # Beyond a window of the model's other layers: within it those would answer alone.
        window = getattr(self.model.config, "sliding_window", None) or 0
        self.tokens = args.tokens or max(600, min(2 * window, 900))
        text = "" if args.text == TESTBED / "prose.txt" else f"-{args.text.stem}"
        self.log = Log(args.state / f"pruning-{self.name}-{self.tokens}-{args.seed}{text}.jsonl")

    def measure(self) -> list[Row]:
        """The summary rows of all that was asked for."""
        tasks = {task: list(samples(self.book, task, *self._sizes(task), self.args.seed)) for task in TASKS}
        suite.run([item for task, prompts in tasks.items() for item in self._items(task, prompts)], self.log)
        if self.args.kvpress:
            self._ask_kvpress(tasks)
        rows = [self._row(name, ratio) for ratio in self.args.ratios for name in [*self.args.caches, *PEERS]]
        rows += [self._row(name, ratio) | {"task": "codes"} for ratio in self.args.codes for name in (IN_PLACE, PACKED)]
        if self.args.chats:
            suite.run(list(self._chat_items()), self.log)
            rows += [self._chat_row(name) for name in self.args.caches if name.split(",")[0] != "kvzip"]
        return [row for row in rows if row["samples"]]

    def _sizes(self, task: str) -> tuple[int, int]:
        """How many contexts, of how many tokens; each context of facts has three."""
        if task == "chat":
            return self.args.chats, CHAT_TOKENS
        return self.args.samples if task == "needle" else -(-self.args.samples // len(FACTS)), self.tokens

    def _items(self, task: str, prompts: Sequence[Sample]) -> Iterator[Item]:
        for number, sample in enumerate(prompts):
            yield Item(task, FULL_CACHE, number, lambda sample=sample: [self._asked(sample, self._full)])
            for name in self.args.caches:
                for ratio in self.args.ratios:
                    make = lambda name=name, ratio=ratio: self.make(name, ratio)  # noqa: E731
                    yield Item(task, f"{name} {ratio:g}", number, lambda sample=sample, make=make: [self._asked(sample, make)])
            for ratio in self.args.codes:
                make = lambda ratio=ratio: SubspaceCache(self.model, self.codec.at(ratio), sinks=SINKS, recent=RECENT)  # noqa: E731
                yield Item(task, f"{IN_PLACE} {ratio:g}", number, lambda sample=sample, make=make: [self._asked(sample, make)])
                packed = lambda ratio=ratio: PackedCoding(self.codec.at(ratio), self.model, sinks=SINKS)  # noqa: E731
                ask = lambda sample=sample, packed=packed: [self._asked(sample, self._full, packed())]  # noqa: E731
                yield Item(task, f"{PACKED} {ratio:g}", number, ask)

    def _asked(self, sample: Sample, make: Callable[[], Cache], packed: PackedCoding | None = None) -> Row:
        """Read a context, keep what its packed codes say if so, and ask."""
        cache = make()  # artifacts are not part of the seconds
        start = time.perf_counter()
        suite.read_context(self.model, cache, sample.context)
        if packed is not None:
            for index, layer in enumerate(cache.layers):
                keys, values = packed.read(index, layer.keys, layer.values)
                layer.keys[:, :, SINKS:-RECENT], layer.values[:, :, SINKS:-RECENT] = (
                    states[:, :, SINKS:-RECENT] for states in (keys, values)
                )
        synchronize(self.device)
        seconds, size = time.perf_counter() - start, bytes_of(cache) if packed is None else packed.nbytes
        *asked, continued = suite.answers(self.model, cache, sample.asked)
        numbers = {"tokens": len(sample.context), "bytes": size, "seconds": seconds, "continuation": continued.loss}
        return {**numbers, "right": [answer.matches for answer in asked], "losses": [answer.loss for answer in asked]}

    def _full(self) -> Cache:
        return DynamicCache(config=compat.base_model(self.model).config)

    def make(self, name: str, budget: float) -> EquipCache:
        """An empty cache by its name in the table."""
        policy, more = CACHES[name]
        if more.get("head_budgets") == HEADS:
            more = more | {"head_budgets": self.heads}
        if "codec" in more:
            more = more | {"codec": self.codec.at(more["codec"])}
        return EquipCache(self.model, self.probe if policy == PROBE else policy, budget, **more)

    @cached_property
    def probe(self) -> KeepProbe:
        return self._kept("keep-probe", KeepProbe)

    @cached_property
    def heads(self) -> HeadBudgets:
        return self._kept("head-budgets", HeadBudgets)

    @cached_property
    def codec(self) -> KVCodec:
        return self._kept("kv-codec", KVCodec, CODEC_TEXTS)

    def _kept(self, name: str, kind: type[A], texts: tuple[int, int] = CALIBRATION) -> A:
        """An artifact from the state folder, calibrated where it is not there yet on so many texts of so many tokens."""
        folder = self.args.state / f"{self.name}.{name}"
        if not folder.exists():
            calibrate: Any = kind
            calibrate.calibrate(self.model, self.tokenizer, self.book.calibration_texts(*texts)).save_pretrained(folder)
        return kind.from_pretrained(folder)

    def _chat_items(self) -> Iterator[Item]:
        for number, chat in enumerate(chats(self.book, *self._sizes("chat"), self.args.seed)):
            makers: dict[str, Callable[[], Cache]] = {FULL_CACHE: self._full}
            makers |= {
                f"{name} {BUDGET}": lambda name=name: self.make(name, BUDGET)
                for name in self.args.caches
                if name.split(",")[0] != "kvzip"  # which reads a context again when it has ended
            }
            for name, make in makers.items():
                yield Item("chat", name, number, lambda chat=chat, make=make: [self._chatted(chat, make())])

    @torch.no_grad()
    def _chatted(self, chat: Chat, cache: Cache) -> Row:
        """Feed a chat turn by turn, and ask."""
        start = time.perf_counter()
        with evaluating(self.model):
            for message, reply in chat.turns:
                for ids in (message, *([token] for token in reply)):
                    self.model(torch.tensor([ids], device=self.device), logits_to_keep=1, **compat.cache_kwargs(self.model, cache))
        synchronize(self.device)
        seconds, size = time.perf_counter() - start, bytes_of(cache)
        right = [answer.matches for answer in suite.answers(self.model, cache, [chat.question])]
        return {
            "tokens": sum(len(message) + len(reply) for message, reply in chat.turns),
            "bytes": size,
            "seconds": seconds,
            "right": right,
        }

    def _ask_kvpress(self, tasks: dict[str, list[Sample]]) -> None:
        """Have the interpreter that kvpress is installed for measure its presses, and take its rows."""
        prompts = [
            {"task": task, "sample": number, "context": sample.context, "questions": sample.asked}
            for task, found in tasks.items()
            for number, sample in enumerate(found)
        ]
        work = {"model": str(Path(self.model.config.name_or_path).resolve()), "dtype": "float32", "prompts": prompts}
        work |= {"threads": torch.get_num_threads(), "presses": PRESSES, "budgets": self.args.ratios}
        assert self.log.path is not None
        path = self.log.path.with_suffix(".prompts.json")
        path.write_text(json.dumps(work), encoding="utf-8")
        done = subprocess.run([self.args.kvpress, ROOT / "scripts" / "_kvpress_rows.py", path, self.log.path], check=False)
        if done.returncode:
            raise SystemExit(f"error: {self.args.kvpress} ended with {done.returncode}")
        self.log = Log(self.log.path)

    def _found(self, task: str, cache: str) -> list[tuple[Row, Row]]:
        """The rows of a cache, each beside the full cache's."""
        full = {row["sample"]: row for row in self.log.rows if row["task"] == task and row["cache"] == FULL_CACHE}
        own = [row for row in self.log.rows if row["task"] == task and row["cache"] == cache]
        return [(row, full[row["sample"]]) for row in own if row["sample"] < self._sizes(task)[0]]

    def _row(self, name: str, ratio: float) -> Row:
        """A cache at a share of the context."""
        needles, facts = (self._found(task, f"{name} {ratio:g}") for task in TASKS)
        pairs = [*needles, *facts]
        row = {"task": "prompt", "cache": name, "peer": name.startswith("kvpress"), "ratio": ratio, "samples": len(pairs)}
        row |= counted("needle", [answer for pair in needles for answer in answers_of(pair)])
        row |= counted("fact", [answer for pair in facts for answer in answers_of(pair)])
        return row | {"loss": loss(pairs)} | costs(pairs)

    def _chat_row(self, name: str) -> Row:
        """A cache in chats."""
        pairs = self._found("chat", f"{name} {BUDGET}")
        row = {"task": "chat", "cache": name, "peer": False, "budget": BUDGET, "samples": len(pairs)}
        return row | counted("fact", [answer for pair in pairs for answer in answers_of(pair)]) | costs(pairs)


def bytes_of(cache: Cache) -> int:
    """The memory of a cache's keys and values and of what belongs to them."""
    if isinstance(cache, EquipCache):
        return cache.report().bytes
    return measured_bytes(tensor for layer in cache.layers for tensor in vars(layer).values() if isinstance(tensor, torch.Tensor))


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "model", "threads", "device", "csv")
    parser.set_defaults(model=str(ROOT / ".models" / "smollm2"), threads=2, device="cpu")
    parser.add_argument("--samples", type=int, default=48, help="needles, and as many facts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, help="of a context; default: 600, and more for models with windows")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 0.25, 0.125], help="shares of the context that are kept")
    parser.add_argument("--caches", nargs="*", choices=tuple(CACHES), default=list(CACHES))
    parser.add_argument(
        "--codes", nargs="*", type=float, default=[0.125, 0.0625], help="codes of unpruned contexts at these shares of the bytes"
    )
    parser.add_argument("--chats", type=int, nargs="?", const=12, default=0, help="also so many chats; default: none, or 12")
    parser.add_argument("--kvpress", help="the Python of an environment in which kvpress is installed")
    parser.add_argument("--text", type=Path, default=TESTBED / "prose.txt", help="a book")
    parser.add_argument("--state", type=Path, default=ROOT / ".eval", help="where rows and artifacts are kept between runs")
    args = parser.parse_args()
    check_counts(args, ("samples", "tokens"))
    return args


def main() -> None:
    args = parse()
    device = begin(args)
    evaluation = Evaluation(args, device)
    rows = evaluation.measure()
    print(show(rows, SHOWN))
    fixed = environment(device) | {"model": evaluation.name, "text": args.text.name, "tokens": evaluation.tokens, "seed": args.seed}
    path = args.csv or ROOT / "docs" / "benchmarks" / f"pruning-{evaluation.name}.csv"
    rounded = [
        {name: round(row[name], 4) if isinstance(row[name], float) else row[name] for name in COLUMNS if name in row} for row in rows
    ]
    write_csv(path, rounded, fixed, COLUMNS)


if __name__ == "__main__":
    run_script(main)

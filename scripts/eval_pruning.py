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
from typing import Any, TypeVar

import _pruning_report as report
import torch
from _pruning_samples import FACTS, Book, Chat, Sample, chats, samples
from shared import ROOT, TESTBED
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import Row, environment, show, write_csv
from shared.timing import synchronize
from transformers import Cache, DynamicCache

from hf_kvcaches import EquipCache, HeadBudgets, KeepProbe, KVCodec, SubspaceCache, compat
from hf_kvcaches.cli import suite
from hf_kvcaches.cli.suite import FULL_CACHE, Item, Log
from hf_kvcaches.codec.past import PackedCoding
from hf_kvcaches.core.hub import Artifact
from hf_kvcaches.core.report import measured_bytes
from hf_kvcaches.evaluate.runner import evaluating

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
    "probe, coded": (PROBE, {"codec": 0.125}),
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
        row |= report.counted("needle", [answer for pair in needles for answer in report.answers_of(pair)])
        row |= report.counted("fact", [answer for pair in facts for answer in report.answers_of(pair)])
        return row | {"loss": report.loss(pairs)} | report.costs(pairs)

    def _chat_row(self, name: str) -> Row:
        """A cache in chats."""
        pairs = self._found("chat", f"{name} {BUDGET}")
        row = {"task": "chat", "cache": name, "peer": False, "budget": BUDGET, "samples": len(pairs)}
        return row | report.counted("fact", [answer for pair in pairs for answer in report.answers_of(pair)]) | report.costs(pairs)


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
    print(show(rows, report.SHOWN))
    fixed = environment(device) | {"model": evaluation.name, "text": args.text.name, "tokens": evaluation.tokens, "seed": args.seed}
    path = args.csv or ROOT / "docs" / "benchmarks" / f"pruning-{evaluation.name}.csv"
    rounded = [
        {name: round(row[name], 4) if isinstance(row[name], float) else row[name] for name in report.COLUMNS if name in row} for row in rows
    ]
    write_csv(path, rounded, fixed, report.COLUMNS)


if __name__ == "__main__":
    run_script(main)

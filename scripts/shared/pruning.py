"""`eval.py pruning`: what pruned contexts, codes and long chats lose of needles, facts and a text's own continuation."""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache

from hf_kvcaches import EquipCache, HeadBudgets, KeepProbe, KVCodec, SubspaceCache, compat
from hf_kvcaches.cli import suite
from hf_kvcaches.cli.prompts import NeedlePrompt, encode, needle_prompts
from hf_kvcaches.cli.suite import FULL_CACHE, Log
from hf_kvcaches.cli.tables import Row
from hf_kvcaches.evaluate.measures import cache_bytes
from hf_kvcaches.evaluate.runner import evaluating, synchronize
from shared import ROOT
from shared.cli import load
from shared.past import PackedCoding
from shared.quality import kept

COLUMNS = "task cache peer ratio budget samples needles of_needles facts of_facts loss bytes seconds".split()
SHOWN = "task cache ratio budget needles of_needles facts of_facts loss bytes seconds"
TASKS = {"needle": ("digits", 1), "facts": ("words", 3)}  # kinds of needles, and how many a context has
BUDGET, CHAT_TOKENS = 512, 3000
SECTION, REPLY = 130, 20  # tokens that a user shows and that an assistant answers in a turn of a chat
CALIBRATION, CODEC_TEXTS = (6, 700), (16, 512)  # texts, and tokens of each
PRESSES = ("kvzip", "compactor")
PROBE, HEADS = "probe", "HeadBudgets"
IN_PLACE, PACKED = "codes in place", "codes packed"
SINKS, RECENT = 4, 64  # tokens that are exact beside codes
# By name: the policy, and other arguments.
CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "future": ("future", {}),
    "future, refit": ("future", {"refit": True}),
    "kvzip": ("kvzip", {}),
    "kvzip, refit": ("kvzip", {"refit": True}),
    "kvzip, refit, compact": ("kvzip", {"refit": True, "positions": "compact"}),
    "probe, refit": (PROBE, {"refit": True}),
    "probe, refit, compact": (PROBE, {"refit": True, "positions": "compact"}),
    "compactor, HeadBudgets": ("compactor", {"head_budgets": HEADS}),
    "compactor": ("compactor", {}),
    "expected_attention, layer": ("expected_attention", {"head_budgets": "layer"}),
    "keydiff": ("keydiff", {}),
    "snapkv": ("snapkv", {}),
    "streaming": ("streaming", {}),
    "h2o": ("h2o", {}),
}


class Chat(NamedTuple):
    """Turns as the user's and the assistant's token ids, and a question about the first one with its answer."""

    turns: list[tuple[list[int], list[int]]]
    question: tuple[list[int], list[int]]


def chats(tokenizer: Any, prose: str, count: int, tokens: int, seed: int) -> Iterator[Chat]:
    """Chats of about so many tokens whose first message states a fact, which is asked for in the end."""
    words = prose.split()
    for number in range(count):
        rng = random.Random(f"chat {seed} {number}")
        person, thing = rng.choice("Marta Corran Delia Edmund Greta Hollis".split()), rng.choice("violin compass kettle saddle".split())
        place = rng.choice("lighthouse greenhouse library chapel stable attic cellar bakery".split())

        def turn(message: str, reply: str, *, begins: bool = False) -> tuple[list[int], list[int]]:
            return encode(tokenizer, f"User: {message}\n\nAssistant:", begins=begins), encode(tokenizer, f" {reply}\n\n")

        turns = [turn(f"Please remember this: {person} keeps a {thing} in the {place}.", "Yes, I will remember it.", begins=True)]
        while sum(map(len, sum(turns, ()))) < tokens:
            start = rng.randrange(len(words) - SECTION)
            section, reply = (" ".join(words[start:][:SECTION]), " ".join(words[start + SECTION :][:REPLY]))
            turns.append(turn(f"What comes to your mind when you read this? {section}", reply))
        question = f"User: Where is {person}'s {thing}?\n\nAssistant: {person}'s {thing} is in the"
        yield Chat(turns, (encode(tokenizer, question), encode(tokenizer, f" {place}")))


class Pruning:
    """A model and what is measured on it. Calibration has the last fifth of the text for itself."""

    def __init__(self, args: argparse.Namespace, name: str, device: torch.device) -> None:
        self.args, self.name, self.device = args, Path(name).name, device
        self.model, self.tokenizer = load(name, device, "float32")
        text = args.text.read_text(encoding="utf-8")
        self.prose, self.others = text[: len(text) * 4 // 5], text[len(text) * 4 // 5 :]
        # Beyond a window of the model's other layers: within it those would answer alone.
        window = getattr(self.model.config, "sliding_window", None) or 0
        self.tokens = args.tokens or max(600, min(2 * window, 900))
        self.log = Log(args.state / f"pruning-{self.name}-{args.text.stem}-{self.tokens}-{args.seed}.jsonl")

    def rows(self) -> list[Row]:
        """The summary rows of all that was asked for."""
        where = {"tokens": self.tokens, "seed": self.args.seed, "prose": self.prose}
        tasks = {task: needle_prompts(self.tokenizer, self._count(task), *kind, **where) for task, kind in TASKS.items()}
        for task, made in tasks.items():
            self._measure(task, made)
        if self.args.kvpress:
            self._ask_kvpress(tasks)
        rows = [self._row(name, ratio) for ratio in self.args.ratios for name in [*self.args.caches, *(f"kvpress {p}" for p in PRESSES)]]
        rows += [self._row(name, ratio) | {"task": "codes"} for ratio in self.args.codes for name in (IN_PLACE, PACKED)]
        if self.args.chats:
            self._measure_chats()
            rows += [self._chat_row(name) for name in self.args.caches]
        return [row for row in rows if row["samples"]]

    def _count(self, task: str) -> int:
        """How many contexts; each context of facts has three."""
        return self.args.chats if task == "chat" else -(-self.args.samples // TASKS[task][1])

    def _measure(self, task: str, made: Sequence[NeedlePrompt]) -> None:
        sides: dict[str, Callable[[NeedlePrompt], list[Row]]] = {FULL_CACHE: lambda sample: self._asked(sample, self._full)}
        for name in self.args.caches:
            for ratio in self.args.ratios:
                sides[f"{name} {ratio:g}"] = lambda sample, name=name, ratio=ratio: self._asked(sample, lambda: self.make(name, ratio))
        for ratio in self.args.codes:
            sides[f"{IN_PLACE} {ratio:g}"] = lambda sample, ratio=ratio: self._asked(sample, lambda: self._coded(ratio))
            sides[f"{PACKED} {ratio:g}"] = lambda sample, ratio=ratio: self._asked(sample, self._full, ratio)
        self.log.measured_all(task, made, sides)

    def _asked(self, sample: NeedlePrompt, make: Callable[[], Cache], packed: float = 0.0) -> list[Row]:
        """Read a context and ask; with `packed`, of codes with that share of the bytes in the place of keys and values."""
        cache, size = make(), 0  # artifacts are not part of the seconds
        start = time.perf_counter()
        suite.read_context(self.model, cache, sample.context)
        synchronize(self.device)
        seconds = time.perf_counter() - start
        if packed:
            coding, middle = PackedCoding(self.codec.at(packed), self.model, sinks=SINKS), slice(SINKS, -RECENT)
            for index, layer in enumerate(cache.layers):
                keys, values = coding.read(index, layer.keys, layer.values)
                layer.keys[:, :, middle], layer.values[:, :, middle] = keys[:, :, middle], values[:, :, middle]
            size = coding.nbytes
        *asked, continued = suite.answers(self.model, cache, sample.asked)
        numbers = {"bytes": size or cache_bytes(cache), "seconds": seconds, "continuation": continued.loss}
        return [{**numbers, "right": [answer.matches for answer in asked]}]

    def _full(self) -> Cache:
        return DynamicCache(config=compat.base_model(self.model).config)

    def _coded(self, ratio: float) -> SubspaceCache:
        return SubspaceCache(self.model, self.codec.at(ratio), sinks=SINKS, recent=RECENT)

    def make(self, name: str, budget: float) -> EquipCache:
        """An empty cache by its name in the table."""
        policy, options = CACHES[name]
        if options.get("head_budgets") == HEADS:
            options = options | {"head_budgets": self.heads}
        return EquipCache(self.model, self.probe if policy == PROBE else policy, budget, **options)

    @cached_property
    def probe(self) -> KeepProbe:
        return self._kept("keep-probe", KeepProbe, CALIBRATION)

    @cached_property
    def heads(self) -> HeadBudgets:
        return self._kept("head-budgets", HeadBudgets, CALIBRATION)

    @cached_property
    def codec(self) -> KVCodec:
        return self._kept("kv-codec", KVCodec, CODEC_TEXTS)

    def _kept(self, name: str, kind: Any, sizes: tuple[int, int]) -> Any:
        """An artifact, calibrated on so many texts of so many tokens."""
        count, tokens = sizes
        ids = encode(self.tokenizer, re.sub(r"\s+", " ", self.others))
        texts = [ids[number * len(ids) // count :][:tokens] for number in range(count)]
        make = lambda: kind.calibrate(self.model, self.tokenizer, texts)  # noqa: E731
        return kept(self.args.state / f"{self.name}.{name}", kind, self.model, make)

    def _measure_chats(self) -> None:
        # kvzip reads a context again when it has ended, which a chat never does.
        named = [name for name in self.args.caches if CACHES[name][0] != "kvzip"]
        makers: dict[str, Callable[[], Cache]] = {FULL_CACHE: self._full}
        makers |= {f"{name} {BUDGET}": lambda name=name: self.make(name, BUDGET) for name in named}
        asked = chats(self.tokenizer, self.prose, self.args.chats, CHAT_TOKENS, self.args.seed)
        for number, chat in enumerate(tqdm(asked, desc="chat", total=self.args.chats)):
            for name, make in makers.items():
                self.log.measured("chat", name, number, self._chatted, chat, make)

    @torch.no_grad()
    def _chatted(self, chat: Chat, make: Callable[[], Cache]) -> list[Row]:
        """Feed a chat, the replies one token at a time, and ask."""
        cache = make()
        start = time.perf_counter()
        with evaluating(self.model):
            for message, reply in chat.turns:
                for ids in (message, *([token] for token in reply)):
                    self.model(torch.tensor([ids], device=self.device), logits_to_keep=1, **compat.cache_kwargs(self.model, cache))
        synchronize(self.device)
        numbers = {"bytes": cache_bytes(cache), "seconds": time.perf_counter() - start}
        return [{**numbers, "right": [answer.matches for answer in suite.answers(self.model, cache, [chat.question])]}]

    def _ask_kvpress(self, tasks: dict[str, list[NeedlePrompt]]) -> None:
        """Have the interpreter that kvpress is installed for measure its presses, and take its rows."""
        assert self.log.path is not None
        prompts = [
            {"task": task, "sample": number, **sample._asdict()} for task, made in tasks.items() for number, sample in enumerate(made)
        ]
        work = {"model": str(Path(self.model.config.name_or_path).resolve()), "prompts": prompts, "presses": PRESSES}
        work |= {"threads": torch.get_num_threads(), "budgets": self.args.ratios}
        path = self.log.path.with_suffix(".prompts.json")
        path.write_text(json.dumps(work), encoding="utf-8")
        done = subprocess.run([self.args.kvpress, ROOT / "scripts" / "kvpress_rows.py", path, self.log.path], check=False)
        if done.returncode:
            raise SystemExit(f"error: {self.args.kvpress} ended with {done.returncode}")
        self.log = Log(self.log.path)

    def _pairs(self, task: str, cache: str) -> list[tuple[Row, Row]]:
        """The rows of a cache, each beside the full cache's."""
        rows = [row for row in self.log.rows if row["task"] == task and row["sample"] < self._count(task)]
        full = {row["sample"]: row for row in rows if row["cache"] == FULL_CACHE}
        return [(row, full[row["sample"]]) for row in rows if row["cache"] == cache]

    def _row(self, name: str, ratio: float) -> Row:
        """A cache at a share of the context."""
        needles, facts = (self._pairs(task, f"{name} {ratio:g}") for task in TASKS)
        row = {"task": "prompt", "cache": name, "peer": name.startswith("kvpress"), "ratio": ratio, "samples": len(needles + facts)}
        lost = [row["continuation"] - full["continuation"] for row, full in needles + facts]
        return row | right("needles", needles) | right("facts", facts) | means({"loss": lost}) | costs(needles + facts)

    def _chat_row(self, name: str) -> Row:
        pairs = self._pairs("chat", f"{name} {BUDGET}")
        row = {"task": "chat", "cache": name, "peer": False, "budget": BUDGET, "samples": len(pairs)}
        return row | right("facts", pairs) | costs(pairs)


def right(what: str, pairs: Sequence[tuple[Row, Row]]) -> Row:
    """Right answers of those that the full cache gives."""
    answers = [answer for row, full in pairs for answer, possible in zip(row["right"], full["right"], strict=True) if possible]
    return {what: sum(answers), f"of_{what}": len(answers)}


def means(columns: dict[str, list[float]]) -> Row:
    return {name: round(fmean(values), 4) for name, values in columns.items() if values}


def costs(pairs: Sequence[tuple[Row, Row]]) -> Row:
    """Mean bytes and seconds."""
    return means({name: [row[name] for row, _ in pairs] for name in ("bytes", "seconds")})

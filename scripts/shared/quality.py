"""`eval.py real`: what codes, reused segments and warm starts lose on a language model, beside their peers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from tqdm import tqdm
from transformers import Cache, QuantizedCache

from hf_kvcaches import KVCodec, SegmentReuseCache, SegmentStore, SubspaceCache, WarmStartCache, WarmStartLibrary
from hf_kvcaches.cli import prompts, suite
from hf_kvcaches.cli.suite import Log
from hf_kvcaches.cli.tables import Row
from hf_kvcaches.core.files import Artifact
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.verify import verify_text
from shared import testbed
from shared.cli import load
from shared.past import CodecCoding, PackedCoding, PastCoding, compare, read_rows
from shared.peers import KiviCoding, RotatedCoding, share

TASKS = ("codes", "quantized", "requests", "pairs")
COLUMNS = "model section task cache share recent peer samples tokens kl perplexity change worst agreement saved note".split()
SHOWN = "section task cache share recent kl worst perplexity change agreement saved"
SHARES, WINDOWS, SINKS = (0.125, 0.1875, 0.25), (0, 64), 4
# Packed, for each window. Of text that was not calibrated on, some 5% more bytes are written.
PACKED = {0: (0.066, 0.122), 64: (0.0325, 0.0515)}
QUANTIZED = (256, 32)  # tokens of a prompt that is read exactly, and of steps after it
A = TypeVar("A", bound=Artifact)


@dataclass(frozen=True)
class Side:
    """One cache in the tables."""

    cache: str
    share: float  # of the bytes of keys and values in 16 bits
    recent: int = 0  # newest tokens that stay exact
    peer: bool = False  # whether it is another project's

    def __str__(self) -> str:
        return f"{self.cache} {self.share:g}{f', {self.recent} recent' if self.recent else ''}"


def codings(model: Any, codecs: Mapping[int, KVCodec], head_dim: int) -> dict[Side, PastCoding]:
    """Codes of the past by their bytes, with and without a window; each window has a codec that is calibrated for it."""
    sides: dict[Side, PastCoding] = {}
    for recent in WINDOWS:
        window = {"sinks": SINKS, "recent": recent}
        sides |= {Side("codec", ratio, recent): CodecCoding(codecs[recent].at(ratio), model, **window) for ratio in SHARES}
        sides |= {Side("packed codec", ratio, recent): PackedCoding(codecs[recent].at(ratio), model, **window) for ratio in PACKED[recent]}
        sides |= {Side(f"KIVI {bits} bit", share(bits), recent, peer=True): KiviCoding(bits, **window) for bits in (2, 4)}
    for bits in (2, 3, 4):  # and a norm in 16 bits for each head's key and value
        sides[Side(f"rotation {bits} bit", (bits + 16 / head_dim) / 16, peer=True)] = RotatedCoding(bits, sinks=SINKS)
    return sides


def quantized_caches(model: Any, codec: KVCodec) -> dict[Side, Callable[[], Cache]]:
    """Caches whose bytes are read token by token after an exact prompt, transformers' own among them."""
    sides: dict[Side, Callable[[], Cache]] = {}
    for ratio in SHARES:
        sides[Side("SubspaceCache", ratio, 64)] = lambda ratio=ratio: SubspaceCache(model, codec.at(ratio), recent=64)
    for bits in (2, 4):
        for backend, axis in (("quanto", 0), ("hqq", 1)):
            # Groups of 64 numbers with a scale and a zero in 16 bits; up to 128 tokens are exact.
            options = {"nbits": bits, "axis_key": axis, "axis_value": axis}
            side = Side(f"QuantizedCache {backend} {bits} bit", (bits + 0.5) / 16, 128, peer=True)
            sides[side] = lambda backend=backend, options=options: QuantizedCache(backend, model.config, **options)
    return sides


def kept(folder: Path, kind: type[A], model: Any, make: Callable[[], A]) -> A:
    """An artifact from a folder, made where it is not there yet."""
    if not folder.exists():
        make().save_pretrained(folder)
    return kind.from_pretrained(folder, model=model)


class Quality:
    """One model and what is measured on it."""

    def __init__(self, args: argparse.Namespace, name: str, device: torch.device) -> None:
        self.args, self.name = args, Path(name).name
        self.model, self.tokenizer = load(name, device, args.dtype)
        self.prose = testbed.held_out()
        text = self.prose if args.wikitext is None else args.wikitext.read_text(encoding="utf-8")
        self.text, self.ids = "WikiText-2" if args.wikitext else "prose.txt", prompts.encode(self.tokenizer, text)
        self.log = Log(args.state / f"real-{self.name}-{self.text}-{args.row_tokens}-{args.page}.jsonl")

    def rows(self) -> list[Row]:
        """The summary rows of all that the log holds in the end."""
        for task in self.args.tasks:
            getattr(self, task)()
        return [{"model": self.name, **row} for row in summaries(self.log.rows)]

    def _rows_of(self, ids: Sequence[int], count: int, tokens: int) -> torch.Tensor:
        """Rows from all over a text, each begun as the tokenizer begins a text, (count, tokens)."""
        begin = prompts.encode(self.tokenizer, "", begins=True)
        length, distance = tokens - len(begin), len(ids) // max(1, count)
        if distance < length:
            raise ConfigError.of("--row-tokens", f"rows that a text of {len(ids)} tokens has {count} times", tokens)
        return torch.tensor([[*begin, *ids[start * distance : start * distance + length]] for start in range(count)])

    @cached_property
    def codecs(self) -> dict[int, KVCodec]:
        """For each window a codec that is calibrated for it on the beginning of the text."""
        calibrate, state = self.args.calibrate, self.args.state
        rows = self._rows_of(self.ids[:calibrate], max(1, calibrate // 512), 512).tolist()
        make = lambda recent: KVCodec.calibrate(self.model, None, rows, bytes_ratio=0.125, recent=recent)  # noqa: E731
        folder = lambda recent: state / f"{self.name}-{self.text}-{calibrate}-{recent}.codec"  # noqa: E731
        return {recent: kept(folder(recent), KVCodec, self.model, lambda recent=recent: make(recent)) for recent in WINDOWS}

    def codes(self) -> None:
        head_dim, _ = head_sizes(self.model.config, self.model.config.num_hidden_layers - 1) or (64, 64)
        rows = self._rows_of(self.ids[self.args.calibrate :], self.args.rows, self.args.row_tokens)
        full: dict[int, torch.Tensor] = {}

        def measure(sample: int, side: Side, coding: PastCoding) -> list[Row]:
            row = rows[sample : sample + 1].to(self.model.device)
            if sample not in full:
                full.clear()
                full[sample] = read_rows(self.model, row)
            return [{"side": vars(side), **compare(full[sample], read_rows(self.model, row, coding, SINKS), row, SINKS)}]

        sides = codings(self.model, self.codecs, head_dim)
        for sample in tqdm(range(len(rows)), desc="codes"):
            for side, coding in sides.items():
                self.log.measured(f"codes {self.text}", str(side), sample, measure, sample, side, coding)

    def quantized(self) -> None:
        prompt, steps = self.args.quantized
        rows = self._rows_of(self.ids[self.args.calibrate :], max(1, self.args.rows // 2), prompt + steps)
        task = f"quantized {self.text}"

        def measure(make: Any, side: Side, row: torch.Tensor) -> list[Row]:
            report = verify_text(self.model, {"cache": make}, row[:, :prompt], row[:, prompt:])["cache"]
            return [{"side": vars(side), "tokens": report.steps, "kl": report.mean_kl, "agreement": report.agreement}]

        for side, make in tqdm(quantized_caches(self.model, self.codecs[64]).items(), desc="quantized"):
            try:
                make()
            except (ImportError, ValueError) as error:  # a library that is not installed, a model with windows
                print(f"{side}: not measured: {error}")
                continue
            for sample, row in enumerate(rows.split(1)):
                self.log.measured(task, str(side), sample, measure, make, side, row)

    def requests(self) -> None:
        requests = prompts.agent_prompts(self.tokenizer, self.args.requests_count + 1, page_tokens=self.args.page, prose=self.prose)
        sides: dict[str, Callable[[], Cache]] = {}
        for mode in ("exact", "auto", "approximate"):
            store = SegmentStore("memory")
            sides[f"segments {mode}"] = lambda mode=mode, store=store: SegmentReuseCache(self.model, store, self.tokenizer, mode)
        suite.follow_requests(self.log, self.model, requests, sides)

    def pairs(self) -> None:
        def prepare(earlier: Sequence[int]) -> Cache:
            library = WarmStartLibrary(self.model, self.tokenizer)
            library.add([list(earlier)])
            return WarmStartCache(self.model, library, self.tokenizer)

        for kind in prompts.PAIR_KINDS:
            pairs = prompts.prompt_pairs(self.tokenizer, self.args.pairs_count, kind, page_tokens=self.args.page, prose=self.prose)
            suite.follow_pairs(self.log, self.model, f"pairs {kind}", pairs, {"warm start auto": prepare})


def summaries(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each cache and task of a log."""
    for task, cache in dict.fromkeys((row["task"], row["cache"]) for row in rows):
        own = [row for row in rows if (row["task"], row["cache"]) == (task, cache)]
        section, _, kind = task.partition(" ")
        labels = own[0].get("side") or {"cache": cache, "peer": False}
        row = {"section": section, "task": kind or task, **labels, "samples": len(own)}
        row |= {"section": "reuse"} if section in ("requests", "pairs") else {}
        yield row | {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers_of(section, own).items()}


def numbers_of(section: str, rows: Sequence[Row]) -> Row:
    mean = lambda name: fmean(row[name] for row in rows)  # noqa: E731
    if section == "codes":
        loss, full_loss = mean("loss"), mean("full_loss")
        quality = {"kl": mean("kl"), "perplexity": math.exp(loss), "change": math.expm1(loss - full_loss)}
        return {"tokens": sum(row["tokens"] for row in rows), **quality}
    if section == "quantized":
        return {"tokens": sum(row["tokens"] for row in rows), "kl": mean("kl"), "agreement": mean("agreement")}
    summary = suite.reuse_summary(rows, rows[0]["cache"])
    return {name: value for name, value in summary.items() if name not in ("cache", "prompts")}

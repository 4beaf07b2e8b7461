"""Requests of agents through `SegmentReuseCache`, and what they were answered against the model alone."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from shared.results import Row
from shared.texts import encode

from hf_kvcaches import SegmentPolicy, SegmentReuseCache, SegmentStore
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.reuse.layout import Quantization, label_of
from hf_kvcaches.segments.calibration import CLOSED, next_tokens
from hf_kvcaches.segments.tiers import Mode
from tests.testbed.agents import Request, adversarial_workload, agent_workload, no_repeat_workload

APPROXIMATE = ("guarded", "repaired", "probed")
TIERS = ("exact", *APPROXIMATE, "computed")
# Seeds that policies are calibrated on begin here; those that they are measured on begin at `--seed`.
CALIBRATION_SEED = 10**6
DRIFTS = 25
# Prompts that come again with other dates and ids, and what is left out of them, so that these fit.
TEMPLATES, LEFT_OUT = 5, ("rules", "tool", "task", "volatile")


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they come, each series with a store of its own."""

    name: str
    series: tuple[tuple[Request, ...], ...]

    def __len__(self) -> int:
        return sum(map(len, self.series))


@dataclass(frozen=True)
class Side:
    """One way to prefill; of no mode: without reuse."""

    name: str
    mode: Mode | None = None
    quantization: Quantization = None
    # Of the bytes that the store takes when it may take any, in each series.
    cap: float | None = None
    # Of the store.
    cuts: int | None = None
    near_identical: bool = False
    # Neither surroundings nor probes admit anything.
    guards_alone: bool = False
    # Of the policy.
    repair_depth: float = 1.0

    def __str__(self) -> str:
        kind = "" if self.mode is None else f" {label_of(self.quantization)}"
        return f"{self.name}{kind}{'' if self.cap is None else f', {self.cap:g} of the bytes'}"


@dataclass(frozen=True)
class Answer:
    """What became of one request."""

    series: int  # number of its series
    number: int  # in the series
    drift: float
    tokens: int  # of the prompt
    prefix: int  # tokens that the longest prefix shared with an earlier prompt has, without the last one
    reused: int  # tokens of the prompt that were not run
    saved: float  # share of operations
    tiers: dict[str, int]  # tokens by tier
    partial: int  # tokens of which only the lower layers were reused
    seconds: float  # of processor time, storing included
    page: float | None  # of the page that comes in each prompt of the adversarial workload: the share that was not computed; None elsewhere
    score: float | None  # of the probe that looked at that page, or None
    kls: tuple[float, ...]  # at each place of the continuation, in nats
    difference: float  # the largest of logits
    right: int  # answers that are right
    right_alone: int  # those that are without reuse
    asked: int
    bytes: int  # in the store

    @property
    def approximate(self) -> int:
        """Tokens from behind another text."""
        return sum(self.tiers.get(tier, 0) for tier in APPROXIMATE)


def make_workloads(tokenizer: Any, requests: int, drifting: int, seed: int) -> list[Workload]:
    """All five, with half as many requests where pages hang on their headings, and fewer of templates and where nothing comes twice."""
    drifts = [adversarial_workload(tokenizer, requests=min(DRIFTS, max(3, requests)), seed=seed + number) for number in range(drifting)]
    hanging = agent_workload(tokenizer, requests=max(2, requests // 2), seed=seed + 1, hanging=True)
    return [
        Workload("agents", (tuple(agent_workload(tokenizer, requests=requests, seed=seed)),)),
        Workload("hanging", (tuple(hanging),)),
        Workload("adversarial", tuple(map(tuple, drifts))),
        Workload("templates", (tuple(template_workload(tokenizer, max(2, requests // 4), seed)),)),
        Workload("no repeats", (tuple(no_repeat_workload(tokenizer, requests=max(2, requests // 5), seed=seed)),)),
    ]


def template_workload(tokenizer: Any, requests: int, seed: int) -> list[Request]:
    """A few prompts again and again, with another date and id before every second line of their pages and nothing else that differs."""
    rng = random.Random(seed)
    bases = agent_workload(tokenizer, requests=TEMPLATES, seed=seed)
    return [_stamped(tokenizer, bases[number % TEMPLATES], rng) for number in range(requests)]


def _stamped(tokenizer: Any, base: Request, rng: random.Random) -> Request:
    lines: list[str] = []
    for part in base.parts:
        text = "" if part.kind in LEFT_OUT else tokenizer.decode(base.prompt[part.start : part.stop])
        for number, line in enumerate(text.splitlines(keepends=True)):
            if part.kind == "document" and number % 2 == 0:
                date = f"2031-04-{rng.randint(10, 28)} {rng.randint(10, 23)}:{rng.randint(10, 59)}:{rng.randint(10, 59)}"
                lines.append(f"Observation ({date}, {rng.randint(10000, 99999)}):\n")
            lines.append(line)
    return replace(base, prompt=[token for line in lines for token in encode(tokenizer, line)], kind="templates", parts=())


def calibration_prompts(tokenizer: Any, requests: int, seed: int = CALIBRATION_SEED) -> tuple[dict[str, list[list[int]]], int]:
    """Prompts by workload for `calibrate`, and how many tokens at their ends to ask for."""
    made = {
        "agents": agent_workload(tokenizer, requests=requests, seed=seed),
        "hanging": agent_workload(tokenizer, requests=max(2, requests // 2), seed=seed + 1, hanging=True),
        "adversarial": adversarial_workload(tokenizer, requests=min(DRIFTS, max(2, requests)), seed=seed),
    }
    asked = min(len(request.continuation) for own in made.values() for request in own)
    return {name: [request.prompt + request.continuation for request in own] for name, own in made.items()}, asked


def prefix_lengths(prompts: Sequence[Sequence[int]]) -> list[int]:
    """How long a prefix each prompt shares with an earlier one, counted up to its last token but one, which is always run."""
    seen: list[Sequence[int]] = []
    found = []
    for prompt in prompts:
        shared = max((_shared(prompt, other) for other in seen), default=0)
        found.append(min(shared, len(prompt) - 1))
        seen.append(prompt)
    return found


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (own, other) in pairs if own != other), min(len(first), len(second)))


class Bench:
    """A model, the policy of its `auto` mode, and what it answers without reuse."""

    def __init__(self, model: Any, tokenizer: Any, policy: SegmentPolicy) -> None:
        self.model, self.tokenizer, self.policy = model, tokenizer, policy
        self._alone: dict[tuple[str, int, int], torch.Tensor] = {}
        self._bytes: dict[tuple[str, str, Quantization, int], int] = {}

    def run(self, workload: Workload, side: Side) -> Iterator[Answer]:
        """Sends all requests of a workload to a side."""
        for index, requests in enumerate(workload.series):
            prefixes = prefix_lengths([request.prompt for request in requests])
            cap, whole = None, (workload.name, side.name, side.quantization, index)
            if side.cap is not None:
                cap = max(1, int(side.cap * self._bytes[whole]))
            size = 0
            with closing(self._store(side, cap)) as store:
                for number, (request, prefix) in enumerate(zip(requests, prefixes, strict=True)):
                    alone = self._without(workload.name, index, number, request)
                    answer = self._ask(store, side, request, alone, series=index, number=number, prefix=prefix)
                    size = answer.bytes
                    yield answer
            if side.cap is None:
                self._bytes[whole] = size

    def _store(self, side: Side, cap: int | None) -> SegmentStore:
        return SegmentStore("memory", quantization=side.quantization, max_bytes=cap, cuts=side.cuts, near_identical=side.near_identical)

    def _without(self, workload: str, index: int, number: int, request: Request) -> torch.Tensor:
        key = (workload, index, number)
        if key not in self._alone:
            self._alone[key] = next_tokens(self.model, request.prompt, request.continuation).cpu()
        return self._alone[key]

    def _ask(self, store: SegmentStore, side: Side, request: Request, alone: torch.Tensor, **known: int) -> Answer:
        right_alone = sum(request.right(alone.argmax(-1).tolist()))
        fields: Row = {**known, "drift": request.drift, "tokens": len(request.prompt), "right_alone": right_alone}
        if side.mode is None:
            nothing: Row = {"reused": 0, "saved": 0.0, "tiers": {"computed": len(request.prompt)}, "bytes": 0, "partial": 0, "seconds": 0.0}
            page = {"page": None, "score": None}
            return Answer(**fields, **nothing, **page, **_compared(request, alone, alone))
        closed = {"similarity": CLOSED, "probe": CLOSED} if side.guards_alone else {}
        policy = replace(self.policy, **{"repair_depth": side.repair_depth, **closed}) if side.repair_depth < 1 or closed else self.policy
        begin = time.process_time()
        cache = SegmentReuseCache(self.model, store, self.tokenizer, side.mode, policy)
        found = next_tokens(self.model, request.prompt, request.continuation, cache).cpu()
        store.flush()
        seconds = time.process_time() - begin
        report = cache.report()
        page, score = _page(cache, request)
        return Answer(
            **fields,
            **_compared(request, alone, found),
            reused=report.reused_tokens,
            saved=report.flops_saved,
            tiers=report.tiers or {},
            partial=sum(span.stop - span.start for span in report.spans if span.depth is not None),
            seconds=seconds,
            page=page,
            score=score,
            bytes=store.report().bytes,
        )


def _compared(request: Request, alone: torch.Tensor, found: torch.Tensor) -> Row:
    right = request.right(found.argmax(-1).tolist())
    return {
        "kls": tuple(divergence(alone, found).tolist()),
        "difference": float((alone - found).abs().max()),
        "right": sum(right),
        "asked": len(right),
    }


def _page(cache: SegmentReuseCache, request: Request) -> tuple[float | None, float | None]:
    """The share of the adversarial workload's page that was not computed, and the score of the probe that looked at most of it."""
    if request.kind != "adversarial":
        return None, None
    page = next(part for part in request.parts if part.kind == "document")
    spans = [span for span in cache.report().spans if span.tier != "computed"]
    taken = sum(max(0, min(span.stop, page.stop) - max(span.start, page.start)) for span in spans)
    over = [probe for probe in cache.probes if 2 * (min(probe.stop, page.stop) - max(probe.start, page.start)) > page.stop - page.start]
    return taken / (page.stop - page.start), over[0].score if over else None


def by_series(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Answers of each series."""
    return [list(group) for _, group in groupby(answers, key=lambda each: each.series)]

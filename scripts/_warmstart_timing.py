"""Prompts answered cold and from a library, in turns: what they are, how long they take, and what look-ups take."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from shared.models import Pair
from shared.results import Row
from shared.timing import in_turns, phase_rows, profiled, ratios, spread, synchronize
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_kvcaches import WarmStartCache, WarmStartGate, WarmStartLibrary
from hf_kvcaches.core.splicing.tokens import Ids, common_prefix
from hf_kvcaches.warmstart.entries import Entry
from hf_kvcaches.warmstart.serving import COMPARED

COLD, PREFIX, ALIGN, AUTO, SLOTS = "cold", "exact prefix", "align", "auto", "slots"
SYNC, BACKGROUND = "auto, swap sync", "auto, swap background"
# strategy and swap
SETTINGS: dict[str, tuple[Any, Any]] = {
    PREFIX: ("exact", "off"),
    ALIGN: ("align", "off"),
    AUTO: ("auto", "off"),
    SLOTS: ("slots", "off"),
    SYNC: ("auto", "sync"),
    BACKGROUND: ("auto", "background"),
}
HITS = ("exact", "align", "slots")  # what a similar prompt is used for; a common beginning alone is no such hit
# Of the answers compared before anything is timed: the least share with the same first token, and the most that identical prompts, of which
# keys and values are rounded to 8 bits, may diverge.
SAME, ROUNDING = 0.95, 0.01


@dataclass(frozen=True)
class Asked:
    """A prompt, (1, tokens), and how it differs from what the library has."""

    kind: str
    ids: torch.Tensor


class Answer(NamedTuple):
    """One request."""

    seconds: float  # until all new tokens were there, the making of the cache and the look-up included
    first: float  # until the first one was
    pause: float  # the longest time between two of them, 0 for a single one
    tokens: int  # of the prompt
    reused: int  # that were not run
    served: str  # by what: see `WarmStartReport.strategy`
    swapped: bool  # whether the exact prefill took the place of what was reused
    new: tuple[int, ...]  # the tokens


class _Moments(BaseStreamer):
    """When the prompt and each new token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Side:
    """A way to answer requests; `name` is `COLD` or a key of `SETTINGS`."""

    def __init__(self, name: str, pair: Pair, library: WarmStartLibrary, gate: WarmStartGate | None = None) -> None:
        self.name, self.pair, self.library, self.gate = name, pair, library, gate
        self.model: Any = pair.plain if name == COLD else pair.switched

    def cache(self) -> Any:
        if self.name == COLD:
            return DynamicCache(config=self.pair.plain.config)
        strategy, swap = SETTINGS[self.name]
        return WarmStartCache(self.pair.switched, self.library, strategy=strategy, swap=swap, gate=self.gate)

    def ask(self, ids: torch.Tensor, new_tokens: int = 1) -> Answer:
        """Generate exactly so many tokens greedily behind a prompt, (1, tokens)."""
        # A streamer waits for every token, so a single one is timed from outside.
        moments = _Moments() if new_tokens > 1 else None
        more = {"min_new_tokens": new_tokens, "streamer": moments} if moments else {}
        synchronize(ids.device)
        begin = time.perf_counter()
        cache = self.cache()
        out = self.model.generate(ids, past_key_values=cache, max_new_tokens=new_tokens, do_sample=False, **more)
        synchronize(ids.device)
        seconds = time.perf_counter() - begin
        # The first call has the prompt.
        times = moments.times[1:] if moments else [begin + seconds]
        pause = max((after - before for before, after in pairwise(times)), default=0.0)
        served: tuple[int, str, bool] = (0, "", False)
        if self.name != COLD:
            report = cache.report()
            # An exact prefill that goes on in the background would slow whatever is timed next.
            cache.wait()
            served = report.reused_tokens, report.strategies[0], report.swapped
        return Answer(seconds, times[0] - begin, pause, ids.shape[1], *served, tuple(out[0, ids.shape[1] :].tolist()))

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> tuple[torch.Tensor, str]:
        """Of the first new token, in float64, and what served the prompt."""
        cache = self.cache()
        out = self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].double()
        return out, "" if self.name == COLD else cache.report().strategies[0]


Answers = dict[str, list[Answer]]
MEASURES: dict[str, Callable[[Answer], float]] = {
    "first token": lambda answer: answer.first,
    "whole answer": lambda answer: answer.seconds,
    "longest pause": lambda answer: answer.pause,
}


def ask_in_turns(sides: Sequence[Side], prompts: Sequence[Asked], new_tokens: int = 1) -> Answers:
    """All prompts, each by all sides before the next."""
    return in_turns({side.name: lambda number, side=side: side.ask(prompts[number].ids, new_tokens) for side in sides}, len(prompts))


def rows_of(answers: Answers, measure: str, group: str = "all", **labels: Any) -> Iterator[Row]:
    """A row for each side, with ratios taken within a prompt: of all prompts, or of those that a similar prompt answered (`hits`)."""
    of = MEASURES[measure]
    for name, own in answers.items():
        pairs = [(base, answer) for base, answer in zip(answers[COLD], own, strict=True) if group == "all" or answer.served in HITS]
        # A single one has no quartiles.
        if len(pairs) < 2 or (group == "hits" and name == COLD):
            continue
        chosen, tokens = [answer for _, answer in pairs], sum(answer.tokens for _, answer in pairs)
        row = {**labels, "measure": measure, "group": group, "side": name, "count": len(pairs), "asked": len(own)}
        row |= {"tokens": round(tokens / len(pairs)), "reused": round(sum(answer.reused for answer in chosen) / tokens, 4)}
        row |= {"served": counted(Counter(answer.served for answer in chosen)), **spread("time", [of(answer) for answer in chosen], 1e3)}
        row |= ratios([of(base) for base, _ in pairs], [of(answer) for answer in chosen])
        row |= spread("extra", [of(answer) - of(base) for base, answer in pairs], 1e3)
        row["same"] = round(sum(base.new == answer.new for base, answer in pairs) / len(pairs), 4)
        if "swap" in name:
            row |= {"value": round(sum(answer.swapped for answer in chosen) / len(chosen), 4), "unit": "swapped"}
        yield row


def prove(sides: Sequence[Side], prompts: Sequence[Asked], what: str, *, trained: bool = True) -> str:
    """Compare the first token's distribution with that of the first side, which is cold.

    Some of the prompts are identical to what the library has. Random weights (not `trained`) say nothing about whether reuse is harmless.
    """
    cold, *others = sides
    lines = []
    for side in others:
        kls: list[float] = []
        same, served = 0, Counter[str]()
        for asked in prompts:
            (base, _), (ours, how) = cold.logits(asked.ids), side.logits(asked.ids)
            kl = float((base.softmax(-1) * (base.log_softmax(-1) - ours.log_softmax(-1))).sum())
            if asked.kind == "identical" and how == "exact" and not kl <= ROUNDING:
                raise SystemExit(f"{what}, {side.name}: an identical prompt diverges by {kl:.3g}: nothing timed")
            kls += [kl] if how in HITS else []
            served[how] += 1
            same += bool(base.argmax() == ours.argmax())
        if not kls:
            raise SystemExit(f"{what}, {side.name}: nothing was admitted: nothing timed")
        if trained and side.name == AUTO and same < SAME * len(prompts):
            raise SystemExit(f"{what}, {side.name}: {same} of {len(prompts)} prompts have cold's first token: nothing timed")
        text = f"the same first token for {same} of {len(prompts)} prompts ({counted(served)}), KL on hits mean"
        lines.append(f"{what}, {side.name} against cold: {text} {statistics.fmean(kls):.2g}, greatest {max(kls):.2g}")
    return "\n".join(lines)


def counted(served: Mapping[str, int]) -> str:
    """How often each way served, in words."""
    return ", ".join(f"{how} {count}" for how, count in sorted(served.items()) if how)


def phases(sides: Sequence[Side], prompts: Sequence[Asked], **labels: Any) -> Iterator[Row]:
    """What the time to the first token goes to, on hits: a row for each side and file of the package."""
    for side in sides:
        results = [profiled(lambda asked=asked, side=side: side.ask(asked.ids), side.pair.device) for asked in prompts]
        profiles = [seconds for answer, seconds in results if side.name == COLD or answer.served in HITS]
        if len(profiles) > 1:
            tokens = round(statistics.mean(asked.ids.shape[1] for asked in prompts))
            yield from phase_rows(profiles, side=side.name, asked=len(prompts), tokens=tokens, **labels)


# Words of a made-up prompt's topic, how many of its tokens are among them, and how many prompts have a topic in common.
_TOPIC, _OF_TOPIC, _ALIKE = 60, 0.5, 50
LENGTH = 300


class ManyPrompts:
    """A library of so many made-up prompts without keys and values, about many topics, that begin in a few ways as agents' prompts do."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, count: int) -> None:
        self.random = np.random.default_rng(0)
        vocabulary = int(model.get_input_embeddings().num_embeddings)
        shares = 1 / np.arange(10, vocabulary + 10)
        self._shares = np.cumsum(shares) / shares.sum()
        self.library = WarmStartLibrary(model, tokenizer, slots=0)
        self._topics = [self._frequent(_TOPIC) for _ in range(max(1, count // _ALIKE))]
        self._starts = [self._frequent(40) for _ in range(20)]
        self.prompts = [self._prompt() for _ in range(count)]
        before = resident()
        self.seconds: list[float] = []  # of each addition
        for number, ids in enumerate(self.prompts):
            tokens = ids.tolist()
            (vector,) = self.library.encoder.encode([""], [tokens])
            begin = time.perf_counter()
            self.library.entries.put(Entry(f"{number:08} ".ljust(4 * LENGTH, "x"), tokens, vector, {}))
            self.seconds.append(time.perf_counter() - begin)
        self.library.refresh()
        self.bytes = (resident() - before) / count if before else float("nan")  # of the library, a prompt

    def _frequent(self, tokens: int) -> Ids:
        return np.searchsorted(self._shares, self.random.random(tokens)).astype(np.uint32)

    def _prompt(self) -> Ids:
        ids, topic = self._frequent(LENGTH), self._topics[int(self.random.integers(len(self._topics)))]
        inside = self.random.random(LENGTH) < _OF_TOPIC
        ids[inside] = self.random.choice(topic, int(inside.sum()))
        return np.concatenate([self._starts[int(self.random.integers(len(self._starts)))], ids])[:LENGTH]

    def similar(self) -> tuple[Ids, Ids]:
        """A stored prompt, and one that differs from it in a tenth of its words, from some position on."""
        source = self.prompts[int(self.random.integers(len(self.prompts)))]
        target = source.copy()
        places = self.random.choice(np.arange(60, LENGTH), LENGTH // 10, replace=False)
        target[places] = self._frequent(len(places))
        return source, target


def resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def lookups(model: PreTrainedModel, tokenizer: Any, count: int, calls: int) -> Iterator[Row]:
    """A row for each part of a look-up among so many prompts, which must find the right one, and for additions."""
    many = ManyPrompts(model, tokenizer, count)
    library, nearest = many.library, 0
    seconds: dict[str, list[float]] = {}
    for _ in range(calls):
        source, ids = many.similar()
        parts = timed_parts(library, ids)
        for name, (spent, _) in parts.items():
            seconds.setdefault(name, []).append(spent)
        head = library.entries.head(parts["search"][1][0][0])
        nearest += bool(head and (head.ids == source).all())
        if parts["beginning"][1][1] < common_prefix(source, ids):
            raise SystemExit(f"look-up among {count}: a stored prompt begins like it for longer: not timed")
    if nearest < 0.9 * calls:
        raise SystemExit(f"look-up among {count}: the nearest is the right one in {nearest} of {calls}: not timed")
    labels: Row = {"workload": f"{count} prompts", "length": count, "tokens": LENGTH, "side": "library"}
    added = {**labels, "measure": "add", "count": count, **spread("time", many.seconds[-1000:], 1e3)}
    yield {**added, "value": round(many.bytes / 1024, 2), "unit": "KiB a prompt"}
    for name, spent in seconds.items():
        yield {**labels, "measure": name, "count": calls, **spread("time", spent, 1e3)}


def timed_parts(library: WarmStartLibrary, ids: Ids) -> dict[str, tuple[float, Any]]:
    """The parts of a look-up in the order in which a cache does them, with their seconds and what they found."""
    results: dict[str, tuple[float, Any]] = {}
    works: dict[str, Callable[[], Any]] = {
        "refresh": library.refresh,
        "exact": lambda: library.exact(ids),
        "beginning": lambda: library.beginning(ids),
        "encode": lambda: library.encoder.encode([""], [ids.tolist()])[0],
        "search": lambda: library.entries.near(results["encode"][1], COMPARED),
    }
    for name, work in works.items():
        begin = time.perf_counter()
        found = work()
        results[name] = (time.perf_counter() - begin, found)
    return results | {"all": (sum(seconds for seconds, _ in results.values()), None)}

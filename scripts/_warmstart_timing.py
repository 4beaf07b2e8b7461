"""Prompts answered cold and from a library, in turns: what they are, how long they take, and what the time goes to."""

from __future__ import annotations

import base64
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _common import synchronize
from _equip_sides import spread
from _segments_sides import Pair, Phases, Row
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_kvcaches import WarmStartCache, WarmStartGate, WarmStartLibrary, compat
from hf_kvcaches.core.splicing.cache import SplicingCache
from hf_kvcaches.core.splicing.tokens import Ids, common_prefix
from hf_kvcaches.warmstart import serving
from hf_kvcaches.warmstart.encoders import Encoder
from hf_kvcaches.warmstart.entries import Entry, EntryStore
from hf_kvcaches.warmstart.serving import COMPARED, Serving

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
# What a similar prompt was let in for; a common beginning alone is no such hit.
HITS = ("exact", "align", "slots")
# Of the answers compared before anything is timed: the least share with the same first token, and the most that identical prompts, of which
# keys and values are rounded to 8 bits, may diverge.
SAME, ROUNDING = 0.95, 0.01


@dataclass(frozen=True)
class Asked:
    """A prompt."""

    kind: str  # how it differs from what the library has
    ids: torch.Tensor  # (1, tokens)


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
        self.seen: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(time.perf_counter())

    def end(self) -> None:
        pass


class Side:
    """A way to answer requests."""

    def __init__(self, name: str, pair: Pair, library: WarmStartLibrary, gate: WarmStartGate | None = None) -> None:
        self.name, self.pair, self.library, self.gate = name, pair, library, gate
        self.model: Any = pair.plain if name == COLD else pair.switched

    def cache(self) -> Any:
        if self.name == COLD:
            return DynamicCache(config=self.pair.plain.config)
        strategy, swap = SETTINGS[self.name]
        return WarmStartCache(self.pair.switched, self.library, strategy=strategy, swap=swap, gate=self.gate)

    def ask(self, ids: torch.Tensor, new_tokens: int = 1) -> Answer:
        """Generates tokens greedily."""
        # A streamer waits for every token, so a single one is timed from outside.
        moments = _Moments() if new_tokens > 1 else None
        more = {"min_new_tokens": new_tokens, "streamer": moments} if moments else {}
        synchronize(ids.device)
        begin = time.perf_counter()
        cache = self.cache()
        out = self.model.generate(ids, past_key_values=cache, max_new_tokens=new_tokens, do_sample=False, **more)
        synchronize(ids.device)
        seconds = time.perf_counter() - begin
        new = tuple(out[0, ids.shape[1] :].tolist())
        # The first call has the prompt.
        seen = moments.seen[1:] if moments else [begin + seconds]
        pause = max((after - before for before, after in pairwise(seen)), default=0.0)
        if self.name == COLD:
            return Answer(seconds, seen[0] - begin, pause, ids.shape[1], 0, "", False, new)
        report = cache.report()
        # An exact prefill that goes on in the background would slow whatever is timed next.
        cache.wait()
        return Answer(seconds, seen[0] - begin, pause, ids.shape[1], report.reused_tokens, report.strategies[0], report.swapped, new)

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> tuple[torch.Tensor, str]:
        """Of the first new token, in float64, and what served the prompt."""
        cache = self.cache()
        out = self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].double()
        return out, "" if self.name == COLD else cache.report().strategies[0]


Answers = dict[str, list[Answer]]


def in_turns(sides: Sequence[Side], prompts: Sequence[Asked], new_tokens: int = 1) -> Answers:
    """All prompts, each by all sides before the next; another side is first each time."""
    answers: Answers = {side.name: [] for side in sides}
    for number, asked in enumerate(prompts):
        turn = number % len(sides)
        for side in [*sides[turn:], *sides[:turn]]:
            answers[side.name].append(side.ask(asked.ids, new_tokens))
    return answers


def prove(sides: Sequence[Side], prompts: Sequence[Asked], what: str, *, trained: bool = True) -> str:
    """Compares the first token's distribution with that of the first side, which is cold."""
    cold, *others = sides
    lines = []
    for side in others:
        kls: list[float] = []
        same, served = 0, Counter[str]()
        for asked in prompts:
            base, _ = cold.logits(asked.ids)
            ours, how = side.logits(asked.ids)
            kl = float((base.softmax(-1) * (base.log_softmax(-1) - ours.log_softmax(-1))).sum())
            if asked.kind == "identical" and how == "exact" and not kl <= ROUNDING:
                raise SystemExit(f"{what}, {side.name}: an identical prompt diverges by {kl:.3g}: nothing timed")
            if how in HITS:
                kls.append(kl)
            served[how] += 1
            same += bool(base.argmax() == ours.argmax())
        if not kls:
            raise SystemExit(f"{what}, {side.name}: nothing was let in: nothing timed")
        if trained and side.name == AUTO and same < SAME * len(prompts):
            raise SystemExit(f"{what}, {side.name}: {same} of {len(prompts)} prompts have cold's first token: nothing timed")
        found = f"the same first token for {same} of {len(prompts)} prompts ({counted(served)}), KL on hits mean"
        lines.append(f"{what}, {side.name} against cold: {found} {statistics.fmean(kls):.2g}, greatest {max(kls):.2g}")
    return "\n".join(lines)


def counted(served: Mapping[str, int]) -> str:
    """How often each way served, in words."""
    return ", ".join(f"{how} {count}" for how, count in sorted(served.items()) if how)


REST = "generate, embeddings, head"


def places_of(model: PreTrainedModel) -> list[tuple[str, Any, str]]:
    """What is timed, phase by phase."""
    return [
        ("make the cache", WarmStartCache, "__init__"),
        ("see that the model is the same", WarmStartCache, "enter_pass"),
        ("refresh the library", WarmStartLibrary, "refresh"),
        ("encode", Encoder, "encode"),
        ("search", EntryStore, "near"),
        ("find the same beginning", WarmStartLibrary, "beginning"),
        ("align", serving, "best_aligned"),
        ("read what differs", serving, "changes"),
        ("load", WarmStartLibrary, "full_of"),
        ("load the summary", WarmStartLibrary, "slots_of"),
        ("splice", SplicingCache, "write"),
        ("put slots in", WarmStartCache, "start_from"),
        ("serve, the rest", Serving, "serve"),
        ("take, the rest", WarmStartCache, "take_prefill"),
        ("layers", type(compat.decoder_layers(model)[2][0]), "forward"),
    ]


def phases(sides: Sequence[Side], prompts: Sequence[Asked], **labels: Any) -> list[Row]:
    """What the time to the first token goes to, on hits: a row for each side and phase. Timing adds a little to all."""
    rows: list[Row] = []
    for side in sides:
        places, found = places_of(side.pair.plain), []
        for asked in prompts:
            clock = Phases(side.pair.device)
            with clock.watching(places):
                answer = side.ask(asked.ids)
            clock.seconds[REST] = answer.seconds - sum(clock.seconds.values())
            if side.name == COLD or answer.served in HITS:
                found.append(clock.seconds)
        if len(found) < 2:
            continue
        whole = sum(sum(each.values()) for each in found)
        for phase in [*(place[0] for place in places), REST]:
            own = [each[phase] for each in found]
            if not any(own):
                continue  # not a phase of this side
            row = {**labels, "section": "phases", "side": side.name, "measure": phase, "count": len(found), "asked": len(prompts)}
            row["tokens"] = round(statistics.mean(asked.ids.shape[1] for asked in prompts))
            rows.append({**row, **spread("time", own, 1e3), "value": round(sum(own) / whole, 4), "unit": "of the time"})
    return rows


# Words of a made-up prompt's topic, how many of its tokens are among them, and how many prompts have a topic in common.
_TOPIC, _OF_TOPIC, _ALIKE = 60, 0.5, 50
LENGTH = 300


class ManyPrompts:
    """A library of made-up prompts without keys and values, about many topics, that begin in a few ways as agents' prompts do."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, count: int) -> None:
        self.random = np.random.default_rng(0)
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        shares = 1 / np.arange(10, self.vocabulary + 10)
        self._shares = np.cumsum(shares) / shares.sum()
        self.library = WarmStartLibrary(model, tokenizer, slots=0)
        self._topics = [self._frequent(_TOPIC) for _ in range(max(1, count // _ALIKE))]
        self._starts = [self._frequent(40) for _ in range(20)]
        self.prompts = [self.fresh() for _ in range(count)]
        made = resident()
        # Seconds of each, the look at what others did included.
        self.added: list[float] = []
        for number, ids in enumerate(self.prompts):
            tokens = ids.tolist()
            (vector,) = self.library.encoder.encode([""], [tokens])
            # As WarmStartLibrary.add stores it.
            facts = {"ids": base64.b64encode(ids.astype("<u4").tobytes()).decode(), "stored": None, "user": {}}
            begin = time.perf_counter()
            self.library.entries.put(Entry(f"{number:08} ".ljust(4 * LENGTH, "x"), tokens, vector, {}, facts))
            self.added.append(time.perf_counter() - begin)
        self.library.refresh()
        # Of the library, in bytes a prompt.
        self.bytes = (resident() - made) / count if made else float("nan")

    def _frequent(self, tokens: int) -> Ids:
        return np.searchsorted(self._shares, self.random.random(tokens)).astype(np.uint32)

    def fresh(self) -> Ids:
        ids, topic = self._frequent(LENGTH), self._topics[int(self.random.integers(len(self._topics)))]
        inside = self.random.random(LENGTH) < _OF_TOPIC
        ids[inside] = self.random.choice(topic, int(inside.sum()))
        start = self._starts[int(self.random.integers(len(self._starts)))]
        return np.concatenate([start, ids])[:LENGTH]

    def similar(self) -> tuple[Ids, Ids]:
        """A stored prompt, and one that differs from it in a tenth of its words, from some place on."""
        source = self.prompts[int(self.random.integers(len(self.prompts)))]
        target = source.copy()
        places = self.random.choice(np.arange(60, LENGTH), LENGTH // 10, replace=False)
        target[places] = self._frequent(len(places))
        return source, target


def resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def lookups(model: PreTrainedModel, tokenizer: Any, count: int, calls: int) -> list[Row]:
    """A row for each part of a look-up, with what it must find and the time that it takes."""
    many = ManyPrompts(model, tokenizer, count)
    library = many.library
    seconds: dict[str, list[float]] = {name: [] for name in ("refresh", "exact", "beginning", "encode", "search", "all")}
    nearest = 0
    for _ in range(calls):
        source, ids = many.similar()
        parts = timed_parts(library, ids)
        for name, (own, _) in parts.items():
            seconds[name].append(own)
        near: list[tuple[str, float]] = parts["search"][1]
        _, shared = parts["beginning"][1]
        nearest += bool((library._known[near[0][0]].ids == source).all())
        if shared < common_prefix(source, ids):
            raise SystemExit(f"look-up among {count}: a stored prompt begins like it for longer: not timed")
    if nearest < 0.9 * calls:
        raise SystemExit(f"look-up among {count}: the nearest is the right one in {nearest} of {calls}: not timed")
    labels: Row = {"section": "look-up", "workload": f"{count} prompts", "length": count, "tokens": LENGTH}
    rows: list[Row] = [{**labels, "side": "library", "measure": "add", "count": count, **spread("time", many.added[-1000:], 1e3)}]
    rows[0] |= {"value": round(many.bytes / 1024, 2), "unit": "KiB a prompt"}
    for name, own in seconds.items():
        rows.append({**labels, "side": "library", "measure": name, "count": calls, **spread("time", own, 1e3)})
    return rows


def timed_parts(library: WarmStartLibrary, ids: Ids) -> dict[str, tuple[float, Any]]:
    """The parts of a look-up in the order in which a cache does them, with their seconds and what they found."""
    tokens = ids.tolist()
    works: dict[str, Callable[[], Any]] = {
        "refresh": library.refresh,
        "exact": lambda: library.exact(ids),
        "beginning": lambda: library.beginning(ids),
        "encode": lambda: library.encoder.encode([""], [tokens])[0],
    }
    found: dict[str, tuple[float, Any]] = {}
    for name, work in works.items():
        begin = time.perf_counter()
        answer = work()
        found[name] = (time.perf_counter() - begin, answer)
    begin = time.perf_counter()
    near = library.entries.near(found["encode"][1], COMPARED)
    found["search"] = (time.perf_counter() - begin, near)
    found["all"] = (sum(own for own, _ in found.values()), None)
    return found

"""Prompts answered cold and from a library, in turns: how long they take, and what look-ups take."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from shared.models import Pair
from shared.results import Row
from shared.timing import in_turns, ratios, spread, synchronize
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import WarmStartCache, WarmStartGate, WarmStartLibrary
from hf_kvcaches.reuse.layout import LayerStates
from hf_kvcaches.reuse.tokens import Ids, common_prefix

COLD, PREFIX, ALIGN, AUTO = "cold", "exact prefix", "align", "auto"
STRATEGIES: dict[str, Any] = {PREFIX: "exact", ALIGN: "align", AUTO: "auto"}
HITS = ("exact", "align")  # what a similar prompt is used for; a common beginning alone is no such hit
# Of the answers compared before anything is timed: the least share with the same first token, and the most that identical prompts diverge.
SAME, ROUNDING = 0.95, 1e-4


@dataclass(frozen=True)
class Asked:
    """A prompt, (1, tokens), and how it differs from what the library has."""

    kind: str
    ids: torch.Tensor


class Answer(NamedTuple):
    """One request."""

    seconds: float  # until the first token was there, the making of the cache and the look-up included
    tokens: int  # of the prompt
    reused: int  # that were not run
    served: str  # by what: see `WarmStartReport.strategy`
    new: int  # the token


class Side:
    """A way to answer requests; `name` is `COLD` or a key of `STRATEGIES`."""

    def __init__(self, name: str, pair: Pair, library: WarmStartLibrary, gate: WarmStartGate | None = None) -> None:
        self.name, self.pair, self.library, self.gate = name, pair, library, gate
        self.model: Any = pair.plain if name == COLD else pair.switched

    def cache(self) -> Any:
        if self.name == COLD:
            return DynamicCache(config=self.pair.plain.config)
        return WarmStartCache(self.pair.switched, self.library, strategy=STRATEGIES[self.name], gate=self.gate)

    def ask(self, ids: torch.Tensor) -> Answer:
        """Generate one token behind a prompt, (1, tokens)."""
        synchronize(ids.device)
        begin = time.perf_counter()
        cache = self.cache()
        out = self.model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
        synchronize(ids.device)
        seconds = time.perf_counter() - begin
        report = None if self.name == COLD else cache.report()
        served = (0, "") if report is None else (report.reused_tokens, report.strategies[0])
        return Answer(seconds, ids.shape[1], *served, int(out[0, -1]))

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> tuple[torch.Tensor, str]:
        """Of the first new token, in float64, and what served the prompt."""
        cache = self.cache()
        out = self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].double()
        return out, "" if self.name == COLD else cache.report().strategies[0]


Answers = dict[str, list[Answer]]


def ask_in_turns(sides: Sequence[Side], prompts: Sequence[Asked]) -> Answers:
    """All prompts, each by all sides before the next."""
    return in_turns({side.name: lambda number, side=side: side.ask(prompts[number].ids) for side in sides}, len(prompts))


def rows_of(answers: Answers, group: str = "all", **labels: Any) -> Iterator[Row]:
    """A row for each side, with ratios taken within a prompt: of all prompts, or of those that a similar prompt answered (`hits`)."""
    for name, own in answers.items():
        pairs = [(base, answer) for base, answer in zip(answers[COLD], own, strict=True) if group == "all" or answer.served in HITS]
        # A single one has no quartiles.
        if len(pairs) < 2 or (group == "hits" and name == COLD):
            continue
        chosen, tokens = [answer for _, answer in pairs], sum(answer.tokens for _, answer in pairs)
        row = {**labels, "measure": "first token", "group": group, "side": name, "count": len(pairs), "asked": len(own)}
        row |= {"tokens": round(tokens / len(pairs)), "reused": round(sum(answer.reused for answer in chosen) / tokens, 4)}
        seconds = [answer.seconds for answer in chosen]
        row |= {"served": counted(Counter(answer.served for answer in chosen)), **spread("time", seconds, 1e3)}
        row |= ratios([base.seconds for base, _ in pairs], seconds)
        row |= spread("extra", [answer.seconds - base.seconds for base, answer in pairs], 1e3)
        row["same"] = round(sum(base.new == answer.new for base, answer in pairs) / len(pairs), 4)
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


_LENGTH, _ALIKE = 300, 50  # tokens of a made-up prompt, and how many prompts have a topic in common


def lookups(model: PreTrainedModel, tokenizer: Any, count: int, calls: int) -> Iterator[Row]:
    """A row for look-ups among so many made-up prompts without keys and values, which must find the right one."""
    random = np.random.default_rng(0)
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    prompts = random.integers(0, vocabulary, (count, _LENGTH), dtype=np.uint32)
    # Half of a prompt is about its topic.
    topics = random.integers(0, vocabulary, (max(1, count // _ALIKE), _LENGTH // 2), dtype=np.uint32)
    prompts[:, ::2] = topics[random.integers(0, len(topics), count)]
    library = library_of(model, tokenizer, prompts)
    seconds, nearest = [], 0
    for source in prompts[random.integers(0, count, calls)]:
        ids = source.copy()
        places = random.choice(np.arange(_LENGTH // 5, _LENGTH), _LENGTH // 10, replace=False)
        ids[places] = random.integers(0, vocabulary, len(places))
        begin = time.perf_counter()
        near, shared = look_up(library, ids)
        seconds.append(time.perf_counter() - begin)
        nearest += bool((near == source).all())
        if shared < common_prefix(source, ids):
            raise SystemExit(f"look-up among {count}: a stored prompt begins like it for longer: not timed")
    if nearest < 0.9 * calls:
        raise SystemExit(f"look-up among {count}: the nearest is the right one in {nearest} of {calls}: not timed")
    row = {"workload": f"{count} prompts", "length": count, "tokens": _LENGTH, "side": "library", "measure": "all", "count": calls}
    yield row | spread("time", seconds, 1e3)


def library_of(model: PreTrainedModel, tokenizer: Any, prompts: Any) -> WarmStartLibrary:
    """A library of prompts without keys and values, stored as `WarmStartLibrary.add` does."""
    library = WarmStartLibrary(model, tokenizer)
    for number, ids in enumerate(prompts):
        library.keep(ids, [LayerStates(torch.zeros(1, len(ids), 1), torch.zeros(1, len(ids), 1))], f"{number:08} ".ljust(4 * _LENGTH, "x"))
    return library


def look_up(library: WarmStartLibrary, ids: Ids) -> tuple[Ids, int]:
    """The tokens of the nearest prompt, and how long a stored one begins like it: what a cache asks for, in its order."""
    library.refresh()
    _, shared = library.beginning(ids)
    return library.near(ids)[0][0].ids, shared

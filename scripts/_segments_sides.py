"""Requests answered with and without reuse of segments: what they are, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from shared.models import Pair, random_ids
from shared.results import Row
from shared.timing import in_turns, ratios, spread, synchronize
from transformers import DynamicCache

from hf_kvcaches import SegmentPolicy, SegmentReuseCache, SegmentStore

NONE, PREFIX, AUTO, APPROXIMATE = "no reuse", "prefix caching", "auto", "approximate"
MODES = {PREFIX: "exact", AUTO: "auto", APPROXIMATE: "approximate"}
TOLERANCE = 1e-4
SEGMENT = 100  # tokens of what a prompt of `moved` shares with earlier ones


class Answer(NamedTuple):
    """One request."""

    seconds: float  # until all new tokens were there, the making of the cache included
    storing: float  # seconds that storing took after that, with nobody waiting for it
    tokens: int  # of the prompt
    reused: int  # that were not run


class Side:
    """A way to answer requests, with a store of its own; `name` is `NONE` or a key of `MODES`."""

    def __init__(self, name: str, pair: Pair, policy: SegmentPolicy, location: str = "memory") -> None:
        self.name, self.pair, self.policy = name, pair, policy
        self.store = None if name == NONE else SegmentStore(location)

    def cache(self) -> Any:
        if self.store is None:
            return DynamicCache(config=self.pair.plain.config)
        return SegmentReuseCache(self.pair.switched, self.store, self.pair.tokenizer, mode=MODES[self.name], policy=self.policy)

    def ask(self, ids: torch.Tensor, new_tokens: int = 1) -> Answer:
        """Generate exactly so many tokens greedily behind a prompt, (1, tokens), and wait until all is stored."""
        model = self.pair.plain if self.store is None else self.pair.switched
        lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens if new_tokens > 1 else None}
        synchronize(ids.device)
        begin = time.perf_counter()
        cache = self.cache()
        model.generate(ids, past_key_values=cache, do_sample=False, **lengths)
        synchronize(ids.device)
        seconds = time.perf_counter() - begin
        reused = 0 if self.store is None else cache.report().reused_tokens
        begin = time.perf_counter()
        del cache  # what it computed goes to the store when it goes
        if self.store is not None:
            self.store.flush()
        return Answer(seconds, time.perf_counter() - begin, ids.shape[1], reused)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


Answers = dict[str, list[Answer]]


def ask_in_turns(sides: Sequence[Side], prompts: Sequence[torch.Tensor], new_tokens: int = 1) -> Answers:
    """All prompts, each by all sides before the next."""
    return in_turns({side.name: lambda number, side=side: side.ask(prompts[number], new_tokens) for side in sides}, len(prompts))


def passes(
    names: Sequence[str], pair: Pair, policy: SegmentPolicy, prompts: Sequence[torch.Tensor], new_tokens: int = 1,
    *, count: int = 1, first: Sequence[torch.Tensor] = (),
) -> Answers:  # fmt: skip
    """The prompts several times, each time with new stores; answers to the first ones do not count: what is new to a process is slow."""
    answers: Answers = {name: [] for name in names}
    for turn, asked in enumerate([first, *[prompts] * count]):
        sides = [Side(name, pair, policy) for name in names]
        for name, more in ask_in_turns(sides, asked, new_tokens).items():
            answers[name] += more if turn else []
        for side in sides:
            side.close()
    return answers


def rows_of(answers: Answers, measure: str, **labels: Any) -> Iterator[Row]:
    """A row for the time of each side, with ratios taken within a prompt, and one for what storing took."""
    for name, own in answers.items():
        whole = sum(answer.tokens for answer in own)
        row = {"tokens": round(whole / len(own)), **labels, "side": name, "count": len(own)}
        row["reused"] = round(sum(answer.reused for answer in own) / whole, 4)
        seconds = [answer.seconds for answer in own]
        yield row | {"measure": measure, **spread("time", seconds, 1e3), **ratios([base.seconds for base in answers[NONE]], seconds)}
        if name != NONE:
            yield row | {"measure": f"storing after {measure}", **spread("time", [answer.storing for answer in own], 1e3)}


@torch.no_grad()
def prove(pair: Pair, prompts: Sequence[torch.Tensor], what: str) -> str:
    """Compare logits of prefix caching, bit-equal in its store, with those of no reuse; each prompt comes twice."""
    worst, reused = 0.0, 0
    with SegmentStore(quantization=None) as store:
        for ids in [*prompts, *prompts]:
            cache = SegmentReuseCache(pair.switched, store, pair.tokenizer, mode="exact")
            ours = pair.switched(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
            full = pair.plain(input_ids=ids, past_key_values=DynamicCache(config=pair.plain.config), logits_to_keep=1).logits
            worst = max(worst, float((ours.float() - full.float()).abs().max()))
            reused += cache.report().reused_tokens
            del cache
    if not worst <= TOLERANCE:
        raise SystemExit(f"{what}: logits differ by {worst:.3g}, more than {TOLERANCE:.0e}: nothing timed")
    if not reused:
        raise SystemExit(f"{what}: prompts came twice, and nothing of them was reused: nothing timed")
    return f"{what}: prefix caching gives the logits of no reuse, to {worst:.1e}, with {reused} tokens reused"


def moved(tokens: int, count: int, vocabulary: int, device: torch.device) -> list[torch.Tensor]:
    """Prompts of which four fifths are the same segments in another order each time, behind and before what is new."""
    random = torch.Generator().manual_seed(0)
    pool = random_ids(vocabulary, tokens * 4 // 5 // SEGMENT * SEGMENT, seed=1).split(SEGMENT)
    rest, prompts = tokens - SEGMENT * len(pool), []
    for number in range(count):
        new = random_ids(vocabulary, rest, seed=2 + number)
        # The new start has another length each time, so that segments move even where their order is the same.
        head = rest // 2 + int(torch.randint(-rest // 4, rest // 4, (1,), generator=random))
        order = torch.randperm(len(pool), generator=random).tolist()
        prompts.append(torch.cat([new[:head], *(pool[index] for index in order), new[head:]])[None].to(device))
    return prompts

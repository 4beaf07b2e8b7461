"""Requests answered with and without reuse of segments, in turns: what they are, how long they take, and what the time goes to."""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from _common import synchronize
from _equip_sides import Shape, spread
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_kvcaches import SegmentPolicy, SegmentReuseCache, SegmentStore, compat
from hf_kvcaches.segments import taking
from hf_kvcaches.segments.resembling import Resembling
from hf_kvcaches.segments.stages import Stages
from hf_kvcaches.segments.taking import Taking

NONE, PREFIX, AUTO, APPROXIMATE = "no reuse", "prefix caching", "auto", "approximate"
MODES = {PREFIX: "exact", AUTO: "auto", APPROXIMATE: "approximate"}
TOLERANCE = 1e-4
# Tokens of what a prompt of `moved` shares with earlier ones.
SEGMENT = 100

Row = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """The same weights twice: with the model's own attention, and with what caches switch it to."""

    plain: PreTrainedModel  # for the side without reuse
    switched: PreTrainedModel  # for the others
    tokenizer: Any = None  # theirs, or None

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device, tokenizer: Any = None) -> Pair:
        model = model.to(device).eval()
        shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
        return cls(model, copy.deepcopy(model, shared), tokenizer)

    @property
    def device(self) -> torch.device:
        return self.plain.device


class Answer(NamedTuple):
    """One request."""

    seconds: float  # until all new tokens were there, the making of the cache included
    storing: float  # seconds that storing took after that, with nobody waiting for it
    tokens: int  # of the prompt
    reused: int  # that were not run


class Side:
    """A way to answer requests, with a store of its own."""

    def __init__(self, name: str, pair: Pair, policy: SegmentPolicy, location: str = "memory") -> None:
        self.name, self.pair, self.policy = name, pair, policy
        self.store = None if name == NONE else SegmentStore(location)

    def cache(self) -> Any:
        if self.store is None:
            return DynamicCache(config=self.pair.plain.config)
        return SegmentReuseCache(self.pair.switched, self.store, self.pair.tokenizer, mode=MODES[self.name], policy=self.policy)

    def ask(self, ids: torch.Tensor, new_tokens: int = 1) -> Answer:
        """Generates tokens greedily, and waits until all is stored."""
        model = self.pair.plain if self.store is None else self.pair.switched
        least = {"min_new_tokens": new_tokens} if new_tokens > 1 else {}
        synchronize(ids.device)
        begin = time.perf_counter()
        cache = self.cache()
        model.generate(ids, past_key_values=cache, max_new_tokens=new_tokens, do_sample=False, **least)
        synchronize(ids.device)
        seconds = time.perf_counter() - begin
        reused = 0 if self.store is None else cache.report().reused_tokens
        begin = time.perf_counter()
        # What is computed goes to the store when its cache goes.
        del cache
        if self.store is not None:
            self.store.flush()
        return Answer(seconds, time.perf_counter() - begin, ids.shape[1], reused)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


Asked = dict[str, list[Answer]]


def in_turns(sides: Sequence[Side], prompts: Sequence[torch.Tensor], new_tokens: int = 1) -> Asked:
    """All prompts, each by all sides before the next; another side is first each time."""
    asked: Asked = {side.name: [] for side in sides}
    for number, ids in enumerate(prompts):
        turn = number % len(sides)
        for side in [*sides[turn:], *sides[:turn]]:
            asked[side.name].append(side.ask(ids, new_tokens))
    return asked


def passes(
    names: Sequence[str],
    pair: Pair,
    policy: SegmentPolicy,
    prompts: Sequence[torch.Tensor],
    new_tokens: int = 1,
    *,
    count: int = 1,
    first: Sequence[torch.Tensor] = (),
) -> Asked:
    """The prompts several times, each time with new stores."""
    asked: Asked = {name: [] for name in names}
    for turn, these in enumerate([first, *[prompts] * count]):
        sides = [Side(name, pair, policy) for name in names]
        for name, answers in in_turns(sides, these, new_tokens).items():
            asked[name] += answers if turn else []
        for side in sides:
            side.close()
    return asked


def rows_of(asked: Asked, measure: str, **labels: Any) -> list[Row]:
    """A row for the time of each side, and one for what storing took."""
    rows = []
    for name, answers in asked.items():
        whole = sum(answer.tokens for answer in answers)
        own = {**labels, "side": name, "count": len(answers), "reused": round(sum(answer.reused for answer in answers) / whole, 4)}
        own.setdefault("tokens", round(whole / len(answers)))
        seconds = [answer.seconds for answer in answers]
        ratios = [base.seconds / mine for base, mine in zip(asked[NONE], seconds, strict=True)]
        rows.append({**own, "measure": measure, **spread("time", seconds, 1e3), **spread("ratio", ratios)})
        if name != NONE:
            stored = spread("time", [answer.storing for answer in answers], 1e3)
            rows.append({**own, "measure": f"storing after {measure}", **stored})
    return rows


@torch.no_grad()
def prove(pair: Pair, prompts: Sequence[torch.Tensor], what: str) -> str:
    """Compares logits of prefix caching, bit-equal in its store, with those of no reuse; each prompt comes twice."""
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


def larger_model(shape: Shape, kv_heads: int, device: torch.device) -> Pair:
    """A Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Pair.of(LlamaForCausalLM(config), device)


def moved(tokens: int, count: int, vocabulary: int, device: torch.device, seed: int = 0) -> list[torch.Tensor]:
    """Prompts of which four fifths are the same segments in another order each time, behind and before what is new."""
    random = torch.Generator().manual_seed(seed)
    fresh = lambda length: torch.randint(1, vocabulary, (length,), generator=random)  # noqa: E731
    pool = fresh(tokens * 4 // 5 // SEGMENT * SEGMENT).split(SEGMENT)
    rest = tokens - SEGMENT * len(pool)
    prompts = []
    for _ in range(count):
        # The new start has another length each time, so that segments move even where their order is the same.
        head = rest // 2 + int(torch.randint(-rest // 4, rest // 4, (1,), generator=random))
        order = torch.randperm(len(pool), generator=random).tolist()
        parts = [fresh(head), *(pool[index] for index in order), fresh(rest - head)]
        prompts.append(torch.cat(parts)[None].to(device))
    return prompts


class Phases:
    """Own times of named functions: that of what is called inside of one, and has a name too, does not count for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: Counter[str] = Counter()
        self._inside: list[float] = []
        self._thread = threading.current_thread()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time being counted where it is called in the thread of this object."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not self._thread:  # the store's
                return function(*args, **kwargs)
            synchronize(self.device)
            begin = time.perf_counter()
            self._inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                synchronize(self.device)
                whole = time.perf_counter() - begin
                self.seconds[name] += whole - self._inside.pop()
                if self._inside:
                    self._inside[-1] += whole

        call.only_observes = True  # type: ignore[attr-defined]  # caches go on sharing what they compute
        return call

    @contextmanager
    def watching(self, places: Sequence[tuple[str, Any, str]]) -> Iterator[None]:
        """While open, functions are timed."""
        before = [(owner, attribute, getattr(owner, attribute)) for _, owner, attribute in places]
        try:
            for (name, owner, attribute), (_, _, function) in zip(places, before, strict=True):
                setattr(owner, attribute, self.timed(name, function))
            yield
        finally:
            for owner, attribute, function in before:
                setattr(owner, attribute, function)


REST = "generate, embeddings, head"


def places_of(model: PreTrainedModel) -> list[tuple[str, Any, str]]:
    """What is timed, phase by phase."""
    return [
        ("make the cache", SegmentReuseCache, "__init__"),
        ("fingerprint", SegmentReuseCache, "enter_pass"),
        ("refresh the store", SegmentStore, "refresh"),
        ("look up", taking, "plan_row"),
        ("look up what is similar", Resembling, "runs"),
        ("load", SegmentStore, "tensors"),
        ("splice", Taking, "_open"),
        ("probes and stages", Stages, "run"),
        ("take, the rest", Taking, "take"),
        ("layers", type(compat.decoder_layers(model)[2][0]), "forward"),
    ]


def phases(names: Sequence[str], pair: Pair, policy: SegmentPolicy, prompts: Sequence[torch.Tensor], workload: str) -> list[Row]:
    """What the time to the first token goes to: a row for each side and phase. Timing adds a little to all."""
    rows = []
    for name in names:
        side, found = Side(name, pair, policy), []
        for ids in prompts:
            clock = Phases(pair.device)
            with clock.watching(places_of(pair.plain)):
                answer = side.ask(ids)
            clock.seconds[REST] = answer.seconds - sum(clock.seconds.values())
            found.append(clock.seconds)
        side.close()
        whole = sum(sum(each.values()) for each in found)
        for phase in [*(place[0] for place in places_of(pair.plain)), REST]:
            own = [each[phase] for each in found]
            if not any(own):
                continue  # not a phase of this side
            row = {"section": "phases", "workload": workload, "side": name, "measure": phase, "count": len(prompts)}
            row |= {"tokens": round(statistics.mean(ids.shape[1] for ids in prompts))}
            rows.append({**row, **spread("time", own, 1e3), "value": round(sum(own) / whole, 4), "unit": "of the time"})
    return rows

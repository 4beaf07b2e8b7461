"""Parts of segment reuse: look-ups among many segments, and sharing them between processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from _segments_sides import AUTO, Answer, Side
from shared.models import Pair
from shared.numbers import mean
from shared.results import Row
from shared.timing import spread

from hf_kvcaches import SegmentPolicy, SegmentStore
from hf_kvcaches.reuse.index import Chain, Record, TokenIndex

POLICY = SegmentPolicy(similarity=0.0)  # what calibration chooses for the model of this repository
SEGMENTS, LENGTH, VOCABULARY = 8, 100, 32_000  # segments of a prompt, tokens of a segment


def lookups(segments: int, calls: int) -> Iterator[Row]:
    """A row for each kind of look-up among so many random segments, which must find what is stored."""
    random = np.random.default_rng(0)
    new_prompts = lambda count: random.integers(0, VOCABULARY, (count, SEGMENTS, LENGTH), dtype=np.uint32)  # noqa: E731
    prompts = new_prompts(segments // SEGMENTS)
    index = stored(prompts)
    moved = random.permutation(prompts.reshape(-1, LENGTH))[: calls // SEGMENTS * SEGMENTS].reshape(-1, SEGMENTS, LENGTH)
    prefix = lambda ids: sum(span.stop - span.start for span in index.prefix(ids.reshape(-1), Chain(), 0, exact_only=False)[0])  # noqa: E731
    runs = lambda ids: sum(map(len, index.runs(ids.reshape(-1), 0, SegmentPolicy().shortest)))  # noqa: E731
    kinds: list[tuple[str, str, Any, Callable[[Any], int], int]] = [
        ("prefix", "all stored", random.permutation(prompts)[:calls], prefix, SEGMENTS * LENGTH),
        ("prefix", "nothing stored", new_prompts(calls), prefix, 0),
        ("runs", "all moved", moved, runs, SEGMENTS * LENGTH),
        ("runs", "nothing stored", new_prompts(calls), runs, 0),
    ]
    for measure, side, asked, look, expected in kinds:
        seconds, found = [], []
        for value in asked:
            begin = time.perf_counter()
            found.append(look(value))
            seconds.append(time.perf_counter() - begin)
        # Some prompts begin alike by chance.
        if abs(mean(found) - expected) > 0.01 * SEGMENTS * LENGTH:
            raise SystemExit(f"look-up {measure}, {side}: found {mean(found):g} where there are {expected}")
        row = {"side": side, "measure": measure, "tokens": SEGMENTS * LENGTH, "count": len(asked), "value": segments, "unit": "segments"}
        yield row | spread("time", seconds, 1e3)


def stored(prompts: Any) -> TokenIndex:
    """An index of all segments of prompts."""
    index = TokenIndex()
    for prompt in prompts:
        chain, ids = Chain(), prompt.reshape(-1)
        for start in range(0, len(ids), LENGTH):
            left, segment = chain, ids[start : start + LENGTH]
            chain = chain.extend(segment)
            before = ids[max(0, start - 128) : start]
            record = Record("scope", segment, left.name, chain.name, start, before, "exact", True)
            index.add(record.key, record)
    return index


def sharing(backend: str, location: str, pair: Pair, prompts: Sequence[torch.Tensor]) -> Iterator[Row]:
    """How much of the second half of the prompts is reused by the process that had the first half too, and by another one."""
    half = len(prompts) // 2
    ask_all(location, pair, prompts[:half])
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        second = pool.submit(ask_second_half, location, len(prompts), pair.device, torch.get_num_threads()).result()
    with SegmentStore(location) as store:
        store.clear()
    alone = ask_all(location, pair, prompts)[half:]
    shares: list[float] = []
    for name, answers in (("one process", alone), ("the second of two processes", second)):
        tokens = sum(answer.tokens for answer in answers)
        row = {"workload": backend, "side": name, "measure": "hit rate", "count": len(answers), "tokens": round(tokens / len(answers))}
        row |= spread("time", [answer.seconds for answer in answers], 1e3)
        shares.append(round(sum(answer.reused for answer in answers) / tokens, 4))
        yield {**row, "reused": shares[-1]}
    yield {"workload": backend, "side": "", "measure": "hit rate lost", "value": round(max(shares) - min(shares), 4)}


def ask_all(location: str, pair: Pair, prompts: Sequence[torch.Tensor]) -> list[Answer]:
    side = Side(AUTO, pair, POLICY, location)
    answers = [side.ask(ids) for ids in prompts]
    side.close()
    return answers


def ask_second_half(location: str, requests: int, device: torch.device, threads: int) -> list[Answer]:
    """The work of the second process."""
    torch.set_num_threads(threads)
    pair, prompts = agents(requests, device)
    return ask_all(location, pair, prompts[requests // 2 :])


def agents(requests: int, device: torch.device) -> tuple[Pair, list[torch.Tensor]]:
    """The model of this repository, and what agents ask it."""
    from tests import testbed
    from tests.testbed.agents import agent_workload

    model, tokenizer = testbed.load()
    prompts = [torch.tensor([request.prompt], device=device) for request in agent_workload(tokenizer, requests=requests)]
    return Pair.of(model, device, tokenizer), prompts

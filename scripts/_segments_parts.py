"""Parts of segment reuse: look-ups among many segments, and sharing them between processes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from _segments_sides import AUTO, Answer, Side
from shared.cli import pick_device, run_script
from shared.models import Pair
from shared.numbers import mean
from shared.results import Row
from shared.timing import spread

from hf_kvcaches import SegmentPolicy, SegmentStore
from hf_kvcaches.segments.index import NEAR, SegmentIndex
from hf_kvcaches.segments.records import Chain, Record
from hf_kvcaches.stores.signatures import SignatureIndex

SEGMENTS, LENGTH, VOCABULARY, PERMUTATIONS = 8, 100, 32_000, 64  # segments of a prompt, tokens of a segment


def lookups(segments: int, calls: int) -> Iterator[Row]:
    """A row for each kind of look-up among so many random segments, which must find what is stored."""
    random = np.random.default_rng(0)
    new_prompts = lambda count: random.integers(0, VOCABULARY, (count, SEGMENTS, LENGTH), dtype=np.uint32)  # noqa: E731
    new_signatures = lambda count: random.integers(0, 2**32, (count, PERMUTATIONS), dtype=np.uint32)  # noqa: E731
    prompts, signatures = new_prompts(segments // SEGMENTS), new_signatures(segments)
    index, similar = stored(prompts, signatures)
    changed = random.permutation(signatures)[:calls]
    changed[:, : PERMUTATIONS // 5] += np.uint32(1)
    moved = random.permutation(prompts.reshape(-1, LENGTH))[: calls // SEGMENTS * SEGMENTS].reshape(-1, SEGMENTS, LENGTH)
    prefix = lambda ids: sum(span.stop - span.start for span in index.prefix(ids.reshape(-1), Chain(), 0, exact_only=False)[0])  # noqa: E731
    runs = lambda ids: sum(map(len, index.runs(ids.reshape(-1), 0, SegmentPolicy().shortest)))  # noqa: E731
    near = lambda signature: len(similar.near(signature))  # noqa: E731
    kinds: list[tuple[str, str, Any, Callable[[Any], int], int]] = [
        ("prefix", "all stored", random.permutation(prompts)[:calls], prefix, SEGMENTS * LENGTH),
        ("prefix", "nothing stored", new_prompts(calls), prefix, 0),
        ("runs", "all moved", moved, runs, SEGMENTS * LENGTH),
        ("runs", "nothing stored", new_prompts(calls), runs, 0),
        ("near", "one resembles", changed, near, 1),
        ("near", "none resembles", new_signatures(calls), near, 0),
    ]
    for measure, side, asked, look, expected in kinds:
        seconds, found = [], []
        for value in asked:
            begin = time.perf_counter()
            found.append(look(value))
            seconds.append(time.perf_counter() - begin)
        # Some prompts begin alike by chance, and a few signatures are missed.
        if abs(mean(found) - expected) > (0.1 if look is near else 0.01 * SEGMENTS * LENGTH):
            raise SystemExit(f"look-up {measure}, {side}: found {mean(found):g} where there are {expected}")
        row = {"side": side, "measure": measure, "tokens": SEGMENTS * LENGTH, "count": len(asked), "value": segments, "unit": "segments"}
        yield row | spread("time", seconds, 1e3)


def stored(prompts: Any, signatures: Any) -> tuple[SegmentIndex, SignatureIndex[str]]:
    """Indices of all segments of prompts."""
    index, similar = SegmentIndex(), SignatureIndex(NEAR)
    rest = iter(signatures)
    for prompt in prompts:
        chain, ids = Chain(), prompt.reshape(-1)
        for start in range(0, len(ids), LENGTH):
            left, segment, signature = chain, ids[start : start + LENGTH], next(rest)
            chain = chain.extend(segment)
            before = ids[max(0, start - 128) : start]
            record = Record("scope", segment, left.name, chain.name, start, before, "exact", True, {}, signature)
            index.add(record.key, record)
            similar.add(record.key, signature)
    return index, similar


def sharing(backend: str, location: str, pair: Pair, requests: int, policy: str | None, prompts: Sequence[torch.Tensor]) -> Iterator[Row]:
    """How much of the second half of the prompts is reused by the process that had the first half too, and by another one."""
    half = len(prompts) // 2
    side = Side(AUTO, pair, load_policy(policy), location)
    for ids in prompts[:half]:
        side.ask(ids)
    side.close()
    command = [sys.executable, __file__, location, "--requests", str(requests), "--first", str(half), "--device", str(pair.device)]
    command += ["--threads", str(torch.get_num_threads()), *(["--policy", policy] if policy else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{backend}: the second process failed: {done.stderr.strip()[-2000:]}")
    second = [Answer(*answer) for answer in json.loads(done.stdout.splitlines()[-1])]
    with SegmentStore(location) as store:
        store.clear()
    side = Side(AUTO, pair, load_policy(policy), location)
    alone = [side.ask(ids) for ids in prompts][half:]
    side.close()
    shares: list[float] = []
    for name, answers in (("one process", alone), ("the second of two processes", second)):
        tokens = sum(answer.tokens for answer in answers)
        row = {"workload": backend, "side": name, "measure": "hit rate", "count": len(answers), "tokens": round(tokens / len(answers))}
        row |= spread("time", [answer.seconds for answer in answers], 1e3)
        shares.append(round(sum(answer.reused for answer in answers) / tokens, 4))
        yield {**row, "reused": shares[-1]}
    yield {"workload": backend, "side": "", "measure": "hit rate lost", "value": round(max(shares) - min(shares), 4)}


def load_policy(folder: str | None) -> SegmentPolicy:
    """The policy in a folder, or one that suits the model of this repository."""
    if folder is not None:
        return SegmentPolicy.from_pretrained(folder, local_files_only=True)
    return SegmentPolicy(check_layer=2, probe=0.995, similarity=0.5)


def agents(requests: int, device: torch.device) -> tuple[Pair, list[torch.Tensor]]:
    """The model of this repository, and what agents ask it."""
    from tests import testbed
    from tests.testbed.agents import agent_workload

    model, tokenizer = testbed.load()
    prompts = [torch.tensor([request.prompt], device=device) for request in agent_workload(tokenizer, requests=requests)]
    return Pair.of(model, device, tokenizer), prompts


def main() -> None:
    """The second process of `sharing`: answers the last prompts, and prints what came of it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("location")
    for name in ("requests", "first", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--policy")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pair, prompts = agents(args.requests, pick_device(args.device))
    side = Side(AUTO, pair, load_policy(args.policy), args.location)
    answers = [side.ask(ids) for ids in prompts[args.first :]]
    side.close()
    print(json.dumps(answers))


if __name__ == "__main__":
    run_script(main)

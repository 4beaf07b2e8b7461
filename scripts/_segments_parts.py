"""What reuse of segments is made of, each by itself: look-ups among many segments, writing them into a cache, and sharing them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from _segments_sides import AUTO, Answer, Side
from shared.cli import pick_device, run_script
from shared.models import Pair
from shared.results import Row
from shared.timing import Clock, in_turns, spread

from hf_kvcaches import SegmentPolicy, SegmentStore
from hf_kvcaches.core.splicing import codec
from hf_kvcaches.core.splicing.codec import LayerStates
from hf_kvcaches.core.splicing.tokens import Ids
from hf_kvcaches.kernels.splice import Packed, splice
from hf_kvcaches.kernels.splice_reference import splice as splice_reference
from hf_kvcaches.segments.index import BANDS, WIDTH, SegmentIndex
from hf_kvcaches.segments.records import Chain, Record
from hf_kvcaches.stores.signatures import SignatureIndex

# A prompt of the index: so many segments of so many tokens.
SEGMENTS, LENGTH, VOCABULARY, PERMUTATIONS = 8, 100, 32_000, 64
POPULAR = 10  # how many segments with the same tokens an index looks at at most; some are stored that often
TOLERANCE = 1e-4

Shape4 = tuple[int, int, int, int]  # (layers, heads, tokens, dim)


class ManySegments:
    """Indices of so many random segments, in prompts one behind another, with random signatures.

    As in texts, some tokens are far more frequent than others, and segments have many lengths: they begin at any position, often with the
    same token.
    """

    def __init__(self, count: int) -> None:
        self.random = np.random.default_rng(0)
        shares = 1 / np.arange(10, VOCABULARY + 10)
        self._shares = np.cumsum(shares) / shares.sum()
        self.index, self.similar = SegmentIndex(), SignatureIndex(BANDS, WIDTH)
        self.seconds: dict[str, list[float]] = {"one to the index": [], "one to the signatures": []}
        self.prompts = [self.prompt() for _ in range(max(2 * SEGMENTS, count // SEGMENTS))]
        self.cuts = [self._cuts() for _ in self.prompts]
        self.signatures = self.random.integers(0, 2**32, (len(self.prompts) * SEGMENTS, PERMUTATIONS), dtype=np.uint32)
        for number, (ids, cuts) in enumerate(zip(self.prompts, self.cuts, strict=True)):
            self._add(ids, cuts, self.signatures[number * SEGMENTS : (number + 1) * SEGMENTS])
        # The segments of one prompt, each behind several other texts.
        self.popular = self.prompt().reshape(SEGMENTS, LENGTH)
        for segment in np.concatenate([self.popular] * POPULAR):
            before = int(self.random.integers(LENGTH // 2, LENGTH))
            self._add(np.concatenate([self.tokens(before), segment]), [0, before, before + LENGTH])

    def tokens(self, count: int) -> Ids:
        return np.searchsorted(self._shares, self.random.random(count)).astype(np.uint32)

    def prompt(self) -> Ids:
        return self.tokens(SEGMENTS * LENGTH)

    def pick(self) -> Ids:
        """A prompt that is stored."""
        return self.prompts[int(self.random.integers(len(self.prompts)))]

    def moved(self) -> Ids:
        """Segments of several prompts, the last one cut off."""
        parts: list[Ids] = []
        while sum(map(len, parts)) < SEGMENTS * LENGTH:
            number, place = (int(self.random.integers(below)) for below in (len(self.prompts), SEGMENTS))
            start, stop = self.cuts[number][place : place + 2]
            parts.append(self.prompts[number][start:stop])
        return np.concatenate(parts)[: SEGMENTS * LENGTH]

    def popular_moved(self) -> Ids:
        """Segments that are stored many times, in any order."""
        return self.random.permutation(self.popular).reshape(-1)

    def signature(self) -> Any:
        return self.random.integers(0, 2**32, PERMUTATIONS, dtype=np.uint32)

    def resembling(self) -> Any:
        """A signature like a stored one in four of five places."""
        signature = self.signatures[int(self.random.integers(len(self.signatures)))].copy()
        signature[self.random.choice(PERMUTATIONS, PERMUTATIONS // 5, replace=False)] += np.uint32(1)
        return signature

    def _cuts(self) -> list[int]:
        """Where the segments of a prompt begin, and where the last one ends."""
        away = self.random.integers(-LENGTH * 2 // 5, LENGTH * 2 // 5, SEGMENTS - 1)
        return [0, *(np.arange(1, SEGMENTS) * LENGTH + away).tolist(), SEGMENTS * LENGTH]

    def _add(self, ids: Ids, cuts: Sequence[int], signatures: Any = None) -> None:
        chain = Chain()
        for number, (start, stop) in enumerate(pairwise(cuts)):
            segment, left = ids[start:stop], chain
            chain = chain.extend(segment)
            signature = None if signatures is None else signatures[number]
            record = Record("scope", segment, left.name, chain.name, start, ids[max(0, start - 128) : start], "exact", True, {}, signature)
            key = record.key
            self.seconds["one to the index"].append(_seconds(lambda key=key, record=record: self.index.add(key, record))[0])
            if signature is not None:
                add = lambda key=key, signature=signature: self.similar.add(key, signature)  # noqa: E731
                self.seconds["one to the signatures"].append(_seconds(add)[0])


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def lookups(segments: int, calls: int) -> Iterator[Row]:
    """A row for each kind of look-up among so many segments, which must find what is stored, and for additions."""
    many = ManySegments(segments)
    index, shortest = many.index, SegmentPolicy().shortest
    prefix = lambda ids: sum(span.stop - span.start for span in index.prefix(ids, Chain(), 0, exact_only=False)[0])  # noqa: E731
    runs = lambda ids: sum(map(len, index.runs(ids, 0, shortest)))  # noqa: E731
    near = lambda signature: len(many.similar.near(signature))  # noqa: E731
    whole = SEGMENTS * LENGTH
    kinds: list[tuple[str, Callable[[], Any], Callable[[Any], int], int]] = [
        ("prefix, all stored", many.pick, prefix, whole),
        ("prefix, nothing stored", many.prompt, prefix, 0),
        ("runs, all moved", many.moved, runs, whole),
        ("runs, all moved, each stored 10 times", many.popular_moved, runs, whole),
        ("runs, nothing stored", many.prompt, runs, 0),
        ("near, one resembles", many.resembling, near, 1),
        ("near, none resembles", many.signature, near, 0),
    ]
    labels = {"value": len(index.records), "unit": "segments"}
    for name, seconds in many.seconds.items():
        yield {**labels, "side": name, "measure": "add", "tokens": LENGTH, "count": len(seconds), **spread("time", seconds, 1e3)}
    for name, make, look, expected in kinds:
        results = [_seconds(lambda asked=asked, look=look: look(asked)) for asked in (make() for _ in range(calls))]
        mean = sum(count for _, count in results) / calls
        # A few signatures resemble by chance and a few are missed; some prompts begin alike, and ends of segments are short.
        if not expected * 0.9 <= mean <= expected * 1.1 + (0.05 if look is near else 0.01 * whole):
            raise SystemExit(f"look-up {name}: found {mean:g} where there are {expected}")
        row = {**labels, "side": name, "measure": name.split(",")[0], "tokens": whole, "count": calls}
        yield {**row, **spread("time", [seconds for seconds, _ in results], 1e3)}


class Splicing:
    """Stored keys, rotated, and values, written into the buffers of all layers at so many places, in another order."""

    def __init__(self, quantization: codec.Quantization, shape: Shape4, pieces: int, device: torch.device) -> None:
        layers, heads, tokens, dim = shape
        dtype, random = torch.bfloat16 if device.type == "cuda" else torch.float32, torch.Generator().manual_seed(0)
        states = [LayerStates(*(torch.randn(shape[1:], generator=random).to(dtype) for _ in range(2))) for _ in range(layers)]
        (pile,) = codec.piles(*codec.encode(states, {}, quantization), 0, tokens)
        self.packed = [
            Packed(*(None if part is None else part.contiguous().to(device) for part in packed[:3]), packed.group)
            for packed in (pile.keys, pile.values)
        ]
        self.outs = [[torch.zeros(heads, tokens + 64, dim, dtype=dtype, device=device) for _ in range(layers)] for _ in range(2)]
        self.slots = (torch.cat(torch.arange(tokens).chunk(pieces)[::-1]) + 37).to(device)
        angles = torch.full((tokens, 1), 37.0) / 10_000 ** (torch.arange(0, dim, 2) / dim)
        self.tables = [(angles.cos().to(device), angles.sin().to(device)), (None, None)]

    def __call__(self) -> None:
        for packed, outs, (cos, sin) in zip(self.packed, self.outs, self.tables, strict=True):
            splice(packed, outs, self.slots, cos=cos, sin=sin, check=False)

    @property
    def bytes(self) -> int:
        """Read and written."""
        read = sum(part.nbytes for packed in self.packed for part in packed[:3] if part is not None)
        return read + sum(len(self.slots) * out[:, 0].nbytes for outs in self.outs for out in outs)

    def prove(self) -> float:
        """The greatest difference from the slow reference, for a few tokens of a few layers."""
        worst, slots = 0.0, self.slots[:8].cpu()
        for packed, outs, tables in zip(self.packed, self.outs, self.tables, strict=True):
            parts = (None if part is None else part[:2, :, :8].cpu() for part in packed[:3])
            expected = [torch.zeros_like(out, device="cpu") for out in outs[:2]]
            cos, sin = (None if table is None else table[:8].cpu() for table in tables)
            splice_reference(Packed(*parts, packed.group), expected, slots, cos=cos, sin=sin)
            for out, right in zip(outs[:2], expected, strict=True):
                worst = max(worst, float((out.cpu()[:, slots].float() - right[:, slots].float()).abs().max()))
        return worst


def splices(shape: Shape4, rounds: int, clock: Clock) -> Iterator[Row]:
    """A row for each way in which segments are stored, and into how many places they go."""
    sides = {
        f"{kind or 'plain'}, {pieces} piece{'s' * (pieces > 1)}": Splicing(kind, shape, pieces, clock.device)
        for kind in ("int8", "int4", None)
        for pieces in (1, 8)
    }
    # bfloat16 rounds to 8 bits of a number below 8.
    allowed = TOLERANCE if clock.device.type == "cpu" else 0.04
    for name, side in sides.items():
        side()
        error = side.prove()
        if not error <= allowed:
            raise SystemExit(f"splice {name}: differs from the reference by {error:.3g}: not timed")
    seconds = in_turns({name: lambda _, side=side: clock.of(side) for name, side in sides.items()}, rounds)
    for name, times in seconds.items():
        speed = spread("time", times, 1e3)
        per_second = sides[name].bytes / speed["time_ms"] * 1e3
        row = {"side": name, "measure": "splice", "tokens": shape[2], "count": rounds, **speed}
        yield {**row, "value": round(per_second / 1e9, 3), "unit": "GB/s", "floor_share": round(per_second / clock.bandwidth, 4)}


def sharing(backend: str, location: str, pair: Pair, requests: int, policy: str | None, prompts: Sequence[torch.Tensor]) -> Iterator[Row]:
    """How much of the second half of the prompts is reused by the process that had the first half too, and by another one.

    Args:
        backend: A name for the store.
        location: Of an empty store; it is cleared.
        pair: The models.
        requests: How many prompts there are, for the other process.
        policy: A folder, or None.
        prompts: The prompts.
    """
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
    for name, answers in (("one process", alone), ("the second of two processes", second)):
        tokens = sum(answer.tokens for answer in answers)
        row = {"workload": backend, "side": name, "measure": "hit rate", "count": len(answers), "tokens": round(tokens / len(answers))}
        row |= spread("time", [answer.seconds for answer in answers], 1e3)
        yield {**row, "reused": round(sum(answer.reused for answer in answers) / tokens, 4)}


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

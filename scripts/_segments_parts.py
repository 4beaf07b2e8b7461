"""What reuse of segments is made of, each by itself: look-ups among many segments, writing them into a cache, and sharing them."""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from _common import pick_device, run_script
from _equip_sides import spread
from _segments_sides import AUTO, Answer, Pair, Row, Side
from _subspace_sides import Clock

from hf_kvcaches import SegmentPolicy, SegmentStore
from hf_kvcaches.core.splicing import codec
from hf_kvcaches.core.splicing.codec import LayerStates
from hf_kvcaches.core.splicing.tokens import Ids
from hf_kvcaches.errors import require
from hf_kvcaches.kernels.splice import Packed, splice, splice_reference
from hf_kvcaches.segments.index import NEAR, SegmentIndex
from hf_kvcaches.segments.records import Chain, Record
from hf_kvcaches.stores.signatures import SignatureIndex

# A prompt of the index: so many segments of so many tokens.
SEGMENTS, LENGTH, VOCABULARY, PERMUTATIONS = 8, 100, 32_000, 64
# How many segments with the same tokens an index looks at at most; some are stored that often and more.
POPULAR = 10
TOLERANCE = 1e-4
_SEED = 0

Shape4 = tuple[int, int, int, int]


class ManySegments:
    """Indices of random segments, in prompts one behind another, with random signatures.

    As in texts, some tokens are far more frequent than others, and segments have many lengths: they begin at any place, often with the
    same token.
    """

    def __init__(self, count: int) -> None:
        self.random = np.random.default_rng(_SEED)
        shares = 1 / np.arange(10, VOCABULARY + 10)
        self._shares = np.cumsum(shares) / shares.sum()
        self.index, self.similar = SegmentIndex(), SignatureIndex(NEAR)
        # Seconds of each.
        self.added: dict[str, list[float]] = {"one to the index": [], "one to the signatures": []}
        self.prompts = [self.prompt() for _ in range(max(2 * SEGMENTS, count // SEGMENTS))]
        self.cuts = [self._cuts() for _ in self.prompts]
        self.signatures = self.random.integers(0, 2**32, (len(self.prompts) * SEGMENTS, PERMUTATIONS), dtype=np.uint32)
        for number, (ids, cuts) in enumerate(zip(self.prompts, self.cuts, strict=True)):
            self._add(ids, cuts, self.signatures[number * SEGMENTS : (number + 1) * SEGMENTS])
        # The segments of one prompt, each behind several other texts.
        self.popular = self.prompt().reshape(SEGMENTS, LENGTH)
        for _ in range(POPULAR):
            for segment in self.popular:
                before = int(self.random.integers(LENGTH // 2, LENGTH))
                self._add(np.concatenate([self.fresh(before), segment]), [0, before, before + LENGTH])

    def __len__(self) -> int:
        return len(self.index.records)

    def fresh(self, tokens: int) -> Ids:
        return np.searchsorted(self._shares, self.random.random(tokens)).astype(np.uint32)

    def prompt(self) -> Ids:
        return self.fresh(SEGMENTS * LENGTH)

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

    def resembling(self) -> Any:
        """A signature like a stored one in four of five places."""
        signature = self.signatures[int(self.random.integers(len(self.signatures)))].copy()
        others = self.random.choice(PERMUTATIONS, PERMUTATIONS // 5, replace=False)
        signature[others] += np.uint32(1)
        return signature

    def _cuts(self) -> list[int]:
        """Where the segments of a prompt begin, and where the last one ends."""
        away = self.random.integers(-LENGTH * 2 // 5, LENGTH * 2 // 5, SEGMENTS - 1)
        return [0, *(np.arange(1, SEGMENTS) * LENGTH + away).tolist(), SEGMENTS * LENGTH]

    def _add(self, ids: Ids, cuts: Sequence[int], signatures: Any = None) -> None:
        chain = Chain()
        for number, (start, stop) in enumerate(pairwise(cuts)):
            own, left = ids[start:stop], chain
            chain = chain.extend(own)
            signature = None if signatures is None else signatures[number]
            record = Record("scope", own, left.name, chain.name, start, ids[max(0, start - 128) : start], "exact", True, {}, signature)
            key = record.key
            begin = time.perf_counter()
            self.index.add(key, record)
            middle = time.perf_counter()
            self.added["one to the index"].append(middle - begin)
            if signature is not None:
                self.similar.add(key, signature)
                self.added["one to the signatures"].append(time.perf_counter() - middle)


def lookups(segments: int, calls: int) -> list[Row]:
    """A row for each kind of look-up, with what it must find and the time that it takes."""
    many = ManySegments(segments)
    index, shortest = many.index, SegmentPolicy().shortest
    prefix = lambda ids: sum(piece.stop - piece.start for piece in index.prefix(ids, Chain(), 0, exact_only=False)[0])  # noqa: E731
    runs = lambda ids: sum(map(len, index.runs(ids, 0, shortest)))  # noqa: E731
    whole = SEGMENTS * LENGTH
    signature = lambda: many.random.integers(0, 2**32, PERMUTATIONS, dtype=np.uint32)  # noqa: E731
    near = lambda each: len(many.similar.near(each))  # noqa: E731
    kinds: list[tuple[str, Callable[[], Any], Callable[[Any], int], int]] = [
        ("prefix, all stored", many.pick, prefix, whole),
        ("prefix, nothing stored", many.prompt, prefix, 0),
        ("runs, all moved", many.moved, runs, whole),
        ("runs, all moved, each stored 10 times", many.popular_moved, runs, whole),
        ("runs, nothing stored", many.prompt, runs, 0),
        ("near, one resembles", many.resembling, near, 1),
        ("near, none resembles", signature, near, 0),
    ]
    labels = {"section": "look-up", "value": len(many), "unit": "segments"}
    rows: list[Row] = []
    for name, seconds in many.added.items():
        rows.append({**labels, "side": name, "measure": "add", "tokens": LENGTH, "count": len(seconds), **spread("time", seconds, 1e3)})
    for name, make, look, expected in kinds:
        seconds, found = [], 0
        for _ in range(calls):
            asked = make()
            begin = time.perf_counter()
            answer = look(asked)
            seconds.append(time.perf_counter() - begin)
            found += answer
        # A few signatures resemble by chance and a few are missed; some prompts begin alike, and ends of segments are short.
        if not expected * 0.9 <= found / calls <= expected * 1.1 + (0.05 if look is near else 0.01 * whole):
            raise SystemExit(f"look-up {name}: found {found / calls:g} where there are {expected}")
        row = {**labels, "side": name, "measure": name.split(",")[0], "tokens": whole, "count": calls}
        rows.append({**row, **spread("time", seconds, 1e3)})
    return rows


def packed_like(kind: codec.Quantization, shape: Shape4, dtype: torch.dtype, device: torch.device) -> list[Packed]:
    """Random keys and values of all layers, as they are stored."""
    random = torch.Generator().manual_seed(_SEED)
    layers, *rest = shape
    states = [LayerStates(*(torch.randn(rest, generator=random).to(dtype) for _ in range(2))) for _ in range(layers)]
    tensors, stored = codec.encode(states, {}, kind)
    (pile,) = codec.piles(tensors, stored, 0, shape[2])
    moved = []
    for packed in (pile.keys, pile.values):
        data, scale, zero = (None if part is None else part.contiguous().to(device) for part in packed[:3])
        assert data is not None
        moved.append(Packed(data, scale, zero, packed.group))
    return moved


class Splicing:
    """Keys, turned, and values, written into the buffers of all layers."""

    def __init__(self, quantization: codec.Quantization, shape: Shape4, pieces: int, device: torch.device) -> None:
        layers, heads, tokens, dim = shape
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.packed = packed_like(quantization, shape, dtype, device)
        self.outs = [[torch.zeros(heads, tokens + 64, dim, dtype=dtype, device=device) for _ in range(layers)] for _ in range(2)]
        parts = torch.arange(tokens).chunk(pieces)
        self.slots = (torch.cat(parts[::-1]) + 37).to(device)
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
        worst = 0.0
        for packed, outs, (cos, sin) in zip(self.packed, self.outs, self.tables, strict=True):
            data, scale, zero = (None if part is None else part[:2, :, :8].cpu() for part in packed[:3])
            assert data is not None
            slots = self.slots[:8].cpu()
            mine = [torch.zeros_like(out, device="cpu") for out in outs[:2]]
            table = None if cos is None else cos[:8].cpu(), None if sin is None else sin[:8].cpu()
            splice_reference(Packed(data, scale, zero, packed.group), mine, slots, cos=table[0], sin=table[1])
            differences = ((a.cpu()[:, slots].float() - b[:, slots].float()).abs().max() for a, b in zip(outs[:2], mine, strict=True))
            worst = max(worst, *map(float, differences))
        return worst


def splices(shape: Shape4, rounds: int, clock: Clock) -> list[Row]:
    """A row for each way in which segments are stored, and into how many places they go."""
    kinds: list[tuple[codec.Quantization, int]] = [(kind, pieces) for kind in ("int8", "int4", None) for pieces in (1, 8)]
    names = [f"{kind or 'plain'}, {pieces} piece{'s' * (pieces > 1)}" for kind, pieces in kinds]
    sides = {name: Splicing(kind, shape, pieces, clock.device) for name, (kind, pieces) in zip(names, kinds, strict=True)}
    # bfloat16 rounds to 8 bits of a number below 8.
    allowed = TOLERANCE if clock.device.type == "cpu" else 0.04
    for name, side in sides.items():
        side()
        error = side.prove()
        if not error <= allowed:
            raise SystemExit(f"splice {name}: differs from the reference by {error:.3g}: not timed")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(clock.of(side))
    rows = []
    for name, own in seconds.items():
        speed = spread("time", own, 1e3)
        gigabytes = sides[name].bytes / speed["time_ms"] / 1e6
        row = {"section": "splice", "side": name, "measure": "splice", "tokens": shape[2], "count": rounds, **speed}
        rows.append({**row, "value": round(gigabytes, 3), "unit": "GB/s", "floor_share": round(gigabytes * 1e9 / clock.bandwidth, 4)})
    return rows


@contextmanager
def redis_server() -> Iterator[str | None]:
    """The location of a server on a free port of this computer that keeps nothing on disk, or None where none can be started."""
    program = shutil.which("redis-server")
    try:
        require("redis", "distributed", "A store in Redis")
    except ImportError:
        program = None
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        try:
            yield f"redis://127.0.0.1:{port}/0" if _answers(server, port) else None
        finally:
            server.terminate()
            server.wait()


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    """Whether a server comes up, and not another program that took its port meanwhile."""
    deadline = time.monotonic() + 20
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as asking:
            asking.sendall(b"INFO server\r\n")
            if f"process_id:{server.pid}\r".encode() in asking.recv(8192):
                return True
        time.sleep(0.02)
    return False


def sharing(backend: str, location: str, pair: Pair, requests: int, policy: str | None, prompts: Sequence[torch.Tensor]) -> list[Row]:
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
    second = [Answer(*each) for each in json.loads(done.stdout.splitlines()[-1])]
    with SegmentStore(location) as store:
        store.clear()
    side = Side(AUTO, pair, load_policy(policy), location)
    alone = [side.ask(ids) for ids in prompts][half:]
    side.close()
    rows = []
    for name, answers in (("one process", alone), ("the second of two processes", second)):
        tokens = sum(answer.tokens for answer in answers)
        row = {"section": "sharing", "workload": backend, "side": name, "measure": "hit rate", "count": len(answers)}
        row |= {"tokens": round(tokens / len(answers)), **spread("time", [answer.seconds for answer in answers], 1e3)}
        rows.append({**row, "reused": round(sum(answer.reused for answer in answers) / tokens, 4)})
    return rows


def load_policy(folder: str | None) -> SegmentPolicy:
    """The policy in a folder, or one that keeps what is told by the line before a page, with the model of this repository."""
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

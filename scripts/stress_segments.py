"""Several processes with one store of segments, some of them killed: hit rates, bytes, handles, and whether all answers are right.

    python scripts/stress_segments.py [--processes 4] [--requests 200] [--mode exact] [--redis URL]

Each process asks the requests of its own sessions of agents, one after the other, on a store in a folder (and on the Redis that `--redis`
names, an empty database, which is cleared) with a cap. One process is killed with SIGKILL when it is half done, at whatever it is doing,
and started again for the rest of its requests. Every tenth request is compared with the same model without reuse.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _segments_parts import POLICY
from shared.bars import bar
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import Row, show, write_csv
from tqdm import tqdm

from hf_kvcaches import SegmentReuseCache, SegmentStore
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.stores.location import open_blobs

COMPARED = 10  # of so many requests one is compared
KL = 0.05
EXACT = 1e-3  # the most that logits may differ in mode "exact"


def serve(args: Any) -> None:
    """The work of one process: a line of JSON for each request."""
    from tests.testbed.agents import agent_workload

    device = begin(args)
    model, tokenizer = load(args.model, device)
    requests = agent_workload(tokenizer, requests=args.requests * args.processes)[args.worker :: args.processes]
    policy = None if args.mode == "exact" else POLICY
    with SegmentStore(args.location, max_bytes=args.cap) as store, torch.no_grad():
        for number, request in enumerate(requests):
            if number < args.first:
                continue
            ids = torch.tensor([request.prompt], device=device)
            cache = SegmentReuseCache(model, store, tokenizer, mode=args.mode, policy=policy)
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            difference = None
            if number % COMPARED == 0:
                plain = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
                exact = args.mode == "exact"
                difference = float((plain - logits).abs().max()) if exact else float(divergence(plain, logits))
            line = {"number": number, "tokens": ids.shape[1], "reused": cache.report().reused_tokens, "difference": difference}
            print(json.dumps({**line, "handles": len(os.listdir("/proc/self/fd"))}), flush=True)


class Worker:
    """A process, and what it has answered."""

    def __init__(self, args: Any, number: int, location: str, folder: Path) -> None:
        self.args, self.number, self.location, self.path = args, number, location, folder / f"answers-{number}.jsonl"
        self.start(0)

    def start(self, first: int) -> None:
        command = [sys.executable, __file__, "--worker", str(self.number), "--first", str(first), "--location", self.location]
        for name in ("model", "processes", "requests", "mode", "cap", "device"):
            command += [f"--{name}", str(getattr(self.args, name))]
        with open(self.path, "a", encoding="utf-8") as out:
            self.process = subprocess.Popen(command, stdout=out, env={**os.environ, "OMP_NUM_THREADS": "1"})

    @property
    def answers(self) -> list[dict[str, Any]]:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def run(args: Any, place: str, location: str, folder: Path) -> Row:
    """All processes on one store."""
    folder.mkdir()
    workers = [Worker(args, number, location, folder) for number in range(args.processes)]
    killed, total = False, args.requests * args.processes
    with tqdm(total=total, unit=" requests", desc=place) as progress:
        while any(worker.process.poll() is None for worker in workers):
            if new := sum(len(worker.answers) for worker in workers) - progress.n:
                progress.update(new)
            if not killed and len(workers[-1].answers) >= args.requests // 2:
                workers[-1].kill()
                killed = True
                workers[-1].start(len(workers[-1].answers))
            time.sleep(0.2)
    failed = [worker.number for worker in workers if worker.process.returncode]
    if failed:
        raise RuntimeError(f"the processes {failed} failed")
    return row_of(args, place, location, [worker.answers for worker in workers])


def row_of(args: Any, place: str, location: str, answers: Sequence[Sequence[dict[str, Any]]]) -> Row:
    halves: list[list[dict[str, Any]]] = [[], []]
    for group in answers:
        for answer in group:
            halves[2 * answer["number"] >= args.requests].append(answer)
    rates = [sum(answer["reused"] for answer in half) / sum(answer["tokens"] for answer in half) for half in halves]
    handles = [(min(counts), max(counts)) for group in answers if (counts := [answer["handles"] for answer in group[len(group) // 4 :]])]
    store = open_blobs(location)
    stored = sum(blob.bytes for blob in store.changes().added)
    store.close()
    return {
        "place": place,
        "mode": args.mode,
        "processes": args.processes,
        "requests": sum(map(len, answers)),
        "first_half": rates[0],
        "second_half": rates[1],
        "bytes": stored,
        "cap": args.cap,
        "handles": max(most - least for least, most in handles),
        "compared": sum(answer["difference"] is not None for group in answers for answer in group),
        "difference": max(answer["difference"] or 0.0 for group in answers for answer in group),
    }


def bars(rows: Sequence[Row]) -> str:
    lines = ["Bars"]
    for row in rows:
        where, rates = f"{row['place']}, {row['mode']}", f"{row['first_half']:.1%}, {row['second_half']:.1%}"
        lines.append(
            bar(f"{where}: hit rate of the second half at least that of the first", row["second_half"] >= row["first_half"], rates)
        )
        lines.append(bar(f"{where}: bytes under the cap", row["bytes"] <= row["cap"], f"{row['bytes']:,} of {row['cap']:,}"))
        # One for a file that is being read or written while they are counted.
        lines.append(bar(f"{where}: handles are flat", row["handles"] <= 2, f"{row['handles']} more at most"))
        most = EXACT if row["mode"] == "exact" else KL
        claim = f"{where}: answers are right, also where a process was killed"
        lines.append(bar(claim, row["difference"] <= most, f"{row['difference']:.2g} at most in {row['compared']}"))
    return "\n".join(lines)


SHOWN = {"mode": "{mode}", "first half": "{first_half:.1%}", "second half": "{second_half:.1%}", "bytes": "{bytes:,}"}
SHOWN |= {"handles": "{handles}", "difference": "{difference:.2g}"}


def main() -> None:
    parser = arguments(__doc__, "model", "device", "csv", "quick")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200, help="of each process")
    parser.add_argument("--mode", choices=("exact", "auto"), default="exact")
    parser.add_argument("--cap", type=int, default=768 << 20, help="in bytes; default: about half of what all requests take")
    parser.add_argument("--redis", metavar="URL", help="an empty database; it is cleared")
    for name, kind in (("worker", int), ("first", int), ("location", str)):
        parser.add_argument(f"--{name}", type=kind, help="of one process; used by the script itself")
    args = parser.parse_args()
    check_counts(args, ["processes", "requests", "cap"])
    if args.quick:
        args.processes, args.requests, args.cap = 2, 4, 32 << 20
    if args.worker is not None:
        serve(args)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        places = [("disk", f"disk:{folder}/store"), *([("Redis", args.redis)] if args.redis else [])]
        for place, location in places:
            store = open_blobs(location)
            store.clear()
            rows.append(run(args, place, location, Path(folder) / place))
            store.clear()
            store.close()
    print(f"{show(rows, {'place': '{place}', **SHOWN})}\n\n{bars(rows)}")
    if args.csv:
        write_csv(args.csv, rows, {})


if __name__ == "__main__":
    run_script(main)

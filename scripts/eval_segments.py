"""What reuse of segments saves and costs, on requests as agents send them, against the same model without reuse.

    python scripts/eval_segments.py [--requests 200] [--policy FOLDER] [--csv FOLDER] [--plot FOLDER]

Each request's prompt is prefilled, then its true answers and further questions are fed in; compared are the distributions of these
tokens. **agents**: sessions over shared tools and pages. **hanging**: the same, and the first fact of each page leaves its name to the
heading, which differs from session to session. **adversarial**: one page behind a text that drifts away from under it. **no repeats**:
nothing comes twice.

`prefix caching` is `mode="exact"`; shared prefixes are counted apart, by comparing prompts. `auto` takes a policy from `--policy`, or
calibrates one on requests of other seeds. Operations are counted, in the decoder layers; times are in `bench_segments.py`. A cap is a
share of the bytes that the same side takes when it may store everything.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from _common import add_common, check_counts, environment, load, pick_device, prepare, run_script
from _segments_quality import Answer, Bench, Side, Workload, calibration_prompts, make_workloads
from _segments_verdicts import ALONE, AUTO, BLIND, HALF, PLAIN, PREFIX, bars, show, summary, write_csv, write_plot
from tqdm import tqdm

from hf_kvcaches import SegmentPolicy
from hf_kvcaches.segments.calibration import calibrate

SIDES = (ALONE, PLAIN, PREFIX, AUTO, BLIND)
# On the first workload only.
VARIANTS = (
    Side("auto", "auto", "int4"),
    Side("auto", "auto", None),
    *(Side(side.name, side.mode, side.quantization, HALF) for side in (PREFIX, AUTO, BLIND)),
)


def plan(workloads: list[Workload]) -> list[tuple[Workload, Side]]:
    """What is run, in this order: a side without a cap comes before the same with one."""
    runs = [(workload, side) for workload in workloads for side in SIDES]
    return runs + [(workloads[0], side) for side in VARIANTS]


def policy_of(args: argparse.Namespace, model: Any, tokenizer: Any) -> SegmentPolicy:
    """The given policy, or a calibrated one."""
    if args.policy is not None:
        return SegmentPolicy.from_pretrained(args.policy, model=model, tokenizer=tokenizer)
    prompts, asked = calibration_prompts(tokenizer, args.calibration_requests)
    return calibrate(model, tokenizer, prompts, asked=asked, bound=args.bound)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--requests", type=int, default=200, help="of agents; half as many hang, a fifth do not repeat")
    parser.add_argument("--drifting", type=int, default=4, help="series of 25 adversarial requests")
    parser.add_argument("--policy", help="a folder or a hub id; default: one is calibrated")
    parser.add_argument("--calibration-requests", type=int, default=40)
    parser.add_argument("--bound", type=float, default=0.05, help="for the calibration: the most that the mean KL divergence may be")
    parser.add_argument("--csv", type=Path, help="write tables into this folder")
    parser.add_argument("--plot", type=Path, help="write a picture into this folder (needs matplotlib)")
    args = parser.parse_args()
    check_counts(args, ["requests", "drifting", "calibration_requests"])
    return args


@torch.no_grad()
def main() -> None:
    args = parse()
    prepare(args)
    device = pick_device(args.device)
    model, tokenizer = load(args.model, device)
    policy = policy_of(args, model, tokenizer)
    print(f"{policy}\n")
    bench = Bench(model, tokenizer, policy)
    runs = plan(make_workloads(tokenizer, args.requests, args.drifting, args.seed))
    found: dict[tuple[str, Side], list[Answer]] = {}
    with tqdm(total=sum(len(workload) for workload, _ in runs), unit=" requests") as bar:
        for workload, side in runs:
            bar.set_postfix_str(f"{workload.name}, {side}")
            answers = found[workload.name, side] = []
            for answer in bench.run(workload, side):
                answers.append(answer)
                bar.update()
    rows = [summary(workload, side, answers) for (workload, side), answers in found.items()]
    print(f"{show(rows)}\n")
    print("\n".join(bars(found, policy.bound if policy.bound is not None else args.bound)))
    if args.csv:
        settings = {"model": Path(args.model).name, "seed": args.seed, "check_layer": policy.check_layer, "probe": policy.probe}
        settings |= {"similarity": policy.similarity, "repair": policy.repair, "repair_by": policy.repair_by}
        write_csv(args.csv, rows, found, {**environment(device), **settings})
    if args.plot:
        write_plot(args.plot, found)


if __name__ == "__main__":
    run_script(main)

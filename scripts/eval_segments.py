"""What reuse of segments saves and costs, on requests as agents send them, against the same model without reuse.

    python scripts/eval_segments.py [--requests 200] [--policy FOLDER] [--csv FOLDER] [--plot FOLDER]

Each request's prompt is prefilled, then its true answers and further questions are fed in; compared are the distributions of these
tokens. **agents**: sessions over shared tools and pages. **hanging**: the same, and the first fact of each page leaves its name to the
heading. **adversarial**: one page behind a text that drifts away from under it. **no repeats**: nothing comes twice.

`prefix caching` is `mode="exact"`. `auto` takes a policy from `--policy`, or calibrates one on requests of other seeds. Operations are
counted in the decoder layers. A cap is a share of the bytes that the same side takes when it may store everything.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from _segments_quality import Answer, Bench, Side, calibration_prompts, make_workloads
from _segments_verdicts import ALONE, AUTO, BLIND, HALF, PLAIN, PREFIX, bars, report, summary, write_files, write_plot
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import environment
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


def policy_of(args: argparse.Namespace, model: Any, tokenizer: Any) -> SegmentPolicy:
    """The policy that is named, or a calibrated one."""
    if args.policy is not None:
        return SegmentPolicy.from_pretrained(args.policy, model=model, tokenizer=tokenizer)
    prompts, asked = calibration_prompts(tokenizer, args.calibration_requests)
    return calibrate(model, tokenizer, prompts, asked=asked, bound=args.bound)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "model", "seed", "device", "csv", "plot")
    parser.add_argument("--requests", type=int, default=200, help="of agents; half as many hang, a fifth do not repeat")
    parser.add_argument("--drifting", type=int, default=4, help="series of 25 adversarial requests")
    parser.add_argument("--policy", help="a folder or a hub id; default: one is calibrated")
    parser.add_argument("--calibration-requests", type=int, default=40)
    parser.add_argument("--bound", type=float, default=0.05, help="for the calibration: the most that the mean KL divergence may be")
    args = parser.parse_args()
    check_counts(args, ["requests", "drifting", "calibration_requests"])
    return args


@torch.no_grad()
def main() -> None:
    args = parse()
    device = begin(args)
    model, tokenizer = load(args.model, device)
    policy = policy_of(args, model, tokenizer)
    print(f"{policy}\n")
    bench = Bench(model, tokenizer, policy)
    workloads = make_workloads(tokenizer, args.requests, args.drifting, args.seed)
    # A side without a cap comes before the same with one.
    plan = [(workload, side) for workload in workloads for side in SIDES] + [(workloads[0], side) for side in VARIANTS]
    answers: dict[tuple[str, Side], list[Answer]] = {}
    with tqdm(total=sum(len(workload) for workload, _ in plan), unit=" requests") as progress:
        for workload, side in plan:
            progress.set_postfix_str(f"{workload.name}, {side}")
            answers[workload.name, side] = list(bench.run(workload, side))
            progress.update(len(workload))
    rows = [summary(workload, side, group) for (workload, side), group in answers.items()]
    print(f"{report(rows)}\n")
    print("\n".join(bars(answers, policy.bound if policy.bound is not None else args.bound)))
    if args.csv:
        names = ("check_layer", "probe", "similarity", "repair", "repair_by")
        settings = {"model": Path(args.model).name, "seed": args.seed, **{name: getattr(policy, name) for name in names}}
        write_files(args.csv, rows, answers, {**environment(device), **settings})
    if args.plot:
        write_plot(args.plot, rows, answers)


if __name__ == "__main__":
    run_script(main)

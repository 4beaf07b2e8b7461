"""What reuse of segments saves and costs, on requests as agents send them, against the same model without reuse.

    python scripts/eval_segments.py [--requests 200] [--policy FOLDER] [--csv FOLDER] [--plot FOLDER]

Each request's prompt is prefilled, then its true answers and further questions are fed in; compared are the distributions of these
tokens. **agents**: sessions over shared tools and pages. **hanging**: the same, and the first fact of each page leaves its name to the
heading. **adversarial**: one page behind a text that drifts away from under it. **templates**: prompts that come again with other dates
and ids. **no repeats**: nothing comes twice.

`prefix caching` is `mode="exact"`. `auto` takes a policy from `--policy`, or calibrates one on requests of other seeds, the guards of the
lower layers included. `guards alone` admits nothing but by these. Operations are counted in the decoder layers. A cap is a share of the
bytes that the same side takes when it may store everything. Stores are bit-equal where nothing else is said.

With `--codecs 0.125 0.25` other stores are measured instead, on the requests of agents: those that hold the codes of a `KVCodec` with these
shares of the bytes, each with a policy that is calibrated for it. The codec is calibrated on prose and on generated documents.

With `--repair-depths 0.25 0.5 1` approximate reuse alone is measured, with repair in these shares of the layers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from _segments_codecs import POLICY_COLUMNS, codecs_of, store_rows
from _segments_codecs import report as report_of_stores
from _segments_defaults import default_texts, verdict
from _segments_quality import Answer, Bench, Side, calibration_prompts, make_workloads
from _segments_verdicts import (
    ALONE,
    AUTO,
    BLIND,
    CUTS,
    GUARDS,
    HALF,
    HALF_REPAIR,
    NEAR,
    PREFIX,
    bars,
    report,
    summary,
    write_files,
    write_plot,
)
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.results import environment, write_csv
from tqdm import tqdm

from hf_kvcaches import KVCodec, SegmentPolicy
from hf_kvcaches.segments.calibration import calibrate

SIDES = (ALONE, PREFIX, AUTO, BLIND, HALF_REPAIR, NEAR, CUTS, GUARDS)
# On the first workload only.
VARIANTS = (
    Side("auto", "auto", "int8"),
    Side("auto", "auto", "int4"),
    *(Side(side.name, side.mode, cap=HALF) for side in (PREFIX, AUTO, BLIND)),
)


def policy_of(args: argparse.Namespace, model: Any, tokenizer: Any, codec: KVCodec | None = None) -> SegmentPolicy:
    """The policy that is named, or one that is calibrated for a store: a bit-equal one with cuts, or one of codes."""
    if args.policy is not None:
        return SegmentPolicy.from_pretrained(args.policy, model=model, tokenizer=tokenizer)
    prompts, asked = calibration_prompts(tokenizer, args.calibration_requests)
    return calibrate(model, tokenizer, prompts, asked=asked, bound=args.bound, quantization=codec, cuts=None if codec else 1)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "model", "seed", "device", "csv", "plot")
    parser.add_argument(
        "--requests", type=int, default=200, help="of agents; half as many hang, a quarter are of templates, a fifth do not repeat"
    )
    parser.add_argument("--drifting", type=int, default=4, help="series of 25 adversarial requests")
    parser.add_argument("--policy", help="a folder or a hub id; default: one is calibrated")
    parser.add_argument("--calibration-requests", type=int, default=40)
    parser.add_argument("--bound", type=float, default=0.05, help="for the calibration: the most that the mean KL divergence may be")
    parser.add_argument("--codecs", type=float, nargs="+", help="measure stores of a KVCodec with these shares of the bytes")
    parser.add_argument("--repair-depths", type=float, nargs="+", help="measure repair in these shares of the layers")
    parser.add_argument("--codec-documents", type=int, default=16, help="generated documents that it is calibrated on, beside prose")
    args = parser.parse_args()
    check_counts(args, ["requests", "drifting", "calibration_requests"])
    return args


def measure_codecs(args: argparse.Namespace, model: Any, tokenizer: Any, device: torch.device) -> None:
    """Measures agents with stores of codes."""
    (workload, *_) = make_workloads(tokenizer, args.requests, 0, args.seed)
    codecs = codecs_of(model, tokenizer, args.codecs, args.codec_documents)
    rows = list(store_rows(model, tokenizer, workload, codecs, lambda codec: policy_of(args, model, tokenizer, codec)))
    print(report_of_stores(rows))
    if args.csv:
        fixed = {**environment(device), "model": Path(args.model).name, "seed": args.seed}
        write_csv(args.csv / "segments-codecs.csv", rows, fixed)


def measure_repair(args: argparse.Namespace, model: Any, tokenizer: Any, device: torch.device) -> None:
    """Measures approximate reuse with repair in some shares of the layers."""
    bench, rows = Bench(model, tokenizer, SegmentPolicy()), []
    for workload in make_workloads(tokenizer, args.requests, args.drifting, args.seed)[:3]:
        for share in args.repair_depths:
            side = Side(f"approximate, {share:g} of the layers", "approximate", repair_depth=share)
            rows.append(summary(workload.name, side, list(bench.run(workload, side))))
    print(report(rows))
    if args.csv:
        fixed = {**environment(device), "model": Path(args.model).name, "seed": args.seed}
        write_csv(args.csv / f"segments-repair-{Path(args.model).name}.csv", rows, fixed)


@torch.no_grad()
def main() -> None:
    args = parse()
    device = begin(args)
    model, tokenizer = load(args.model, device)
    if args.codecs:
        measure_codecs(args, model, tokenizer, device)
        return
    if args.repair_depths:
        measure_repair(args, model, tokenizer, device)
        return
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
    print(verdict(default_texts(model, tokenizer, workloads[0])))
    if args.csv:
        settings = {"model": Path(args.model).name, "seed": args.seed, **{name: getattr(policy, name) for name in POLICY_COLUMNS}}
        write_files(args.csv, rows, answers, {**environment(device), **settings})
    if args.plot:
        write_plot(args.plot, rows, answers)


if __name__ == "__main__":
    run_script(main)

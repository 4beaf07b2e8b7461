"""Measures translators between SmolLM2 and a fine-tune of it: divergence, loss and needles behind codes, against raw keys and values.

    python scripts/real_models.py smollm2 && python scripts/tune_smollm2.py
    python scripts/eval_translation_real.py [--tokens 16384] [--prompts 8] [--csv FILE.csv]

Both models read the calibration once; each line is the translator of a payload and a number of layers that the consumer runs. Divergences
are of the 24 tokens that follow prompts of 300, half verse and half prose, against the consumer's own prefill; shares are the bytes of
messages, of bfloat16 keys and values. A payload of 2 sends coefficients as they are: what is lost is what linear maps lose.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean

import torch
from shared.cli import arguments, begin, run_script
from shared.results import environment, show, write_csv

from tests.real.pair import PROMPT_TOKENS, RealPair

SETTINGS = ("0.025:0", "0.07:0", "0.125:0", "0.07:1", "2:0")
COLUMNS = {"": "{side}", "share": "{share:.4f}", "KL": "{kl:.4f}", "loss": "{loss:+.4f}", "needles": "{needles} of {asked}"}


def main() -> None:
    parser = arguments(__doc__, "device")
    parser.add_argument("--tokens", type=int, default=16384, help="of the calibration")
    parser.add_argument("--prompts", type=int, default=8, help="of verse, and as many of prose")
    parser.add_argument("--needles", type=int, default=8, help="questions")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, metavar="PAYLOAD:LAYERS", help="with the layers that the consumer runs")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    device, pair = begin(args), RealPair(args.tokens)
    prompts, began = pair.prompts(args.prompts), time.process_time()
    seconds = dict(pair.fitting.seconds)
    print(f"fit in {time.process_time() - began:.0f} s of processor time: {seconds}", flush=True)
    sides = {"own prefill": pair.read_by(pair.consumer), "raw keys and values": pair.read_by(pair.producer)}
    rows = [
        {"side": name, "share": 1.0, **pair.measure(prompts, make), "needles": pair.needles(make, args.needles), "asked": args.needles}
        for name, make in sides.items()
    ]
    for setting in args.settings:
        payload, lowest = float(setting.split(":")[0]), int(setting.split(":")[1])
        translator = pair.translator(payload, lowest)
        make, shares = pair.translated(translator), list[float]()

        def counted(ids: torch.Tensor, make=make, shares=shares) -> object:
            cache = make(ids)
            shares.append(cache.report().payload_share)
            return cache

        row = {"side": f"payload {payload:g}, {lowest} layers run", **pair.measure(prompts, counted)}
        rows.append(row | {"share": fmean(shares), "needles": pair.needles(make, args.needles), "asked": args.needles})
        print(show(rows[-1:], COLUMNS), flush=True)
    print(show(rows, COLUMNS))
    if args.csv:
        write_csv(args.csv, rows, {**environment(device), "tokens": args.tokens, "prompt": PROMPT_TOKENS})


if __name__ == "__main__":
    run_script(main)

"""How the errors of `SubspaceCache` grow with a text, and what happens where a text becomes another one.

    python scripts/eval_subspace_length.py [--model FOLDER_OR_HUB_ID ...] [--texts FILE ...] [--csv FILE] [--plot FILE]

Codecs are calibrated as by `eval_subspace.py`. Rows of the first text are read up to `--tokens`, and rows of half of `--switch` tokens of
the first text are followed by as many of the second one. `--step` tokens are fed in at a time behind 4 exact tokens: they attend exactly
to themselves and to the codes of all before them. **KL** is the mean divergence of a window's predictions from those of the full cache, in
nats; the perplexity is that of the full cache, which says how far the model itself can follow a text of that length.

With `--csv` what the file has already is not measured again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _subspace_quality import read_rows
from _subspace_variants import VARIANTS, Setting, add_setting_options
from shared.cli import arguments, begin, check_counts, run_script
from shared.plot import Panel, draw
from shared.results import Results, Row, rows_where, table
from tqdm import tqdm
from transformers import DynamicCache

COLUMNS = "model text calibrated_on text_rows row_tokens step variant window kl perplexity".split()
COUNTS = "rows tokens switch window step calibrate length bytes_tokens".split()
COMPARED = ("codec 0.1", "codec 0.1, adaptive", "adaptive 0.25", "KIVI 2 bit")


def texts_of(setting: Setting, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Rows of token ids: one text at length, and one that another one follows."""
    (name, first), *others = setting.texts.items()
    found = {name: read_rows(first, args.rows, args.tokens)}
    for other, ids in others[:1]:
        halves = [read_rows(each, args.switch_rows, args.switch // 2) for each in (first, ids)]
        found[f"{name}, then {other}"] = torch.cat(halves, 1)
    return found


@torch.no_grad()
def windows(model: Any, cache: Any, ids: torch.Tensor, first: int, step: int, window: int) -> Iterator[Row]:
    """Divergence, and the full cache's perplexity, of each window of a row.

    Args:
        first: So many tokens are a prompt of which nothing is measured.
        step: Tokens that are fed in at a time behind it.
    """
    full, tokens, ids = DynamicCache(config=model.config), ids.shape[1] - 1, ids.to(model.device)
    read = lambda block, past: model(input_ids=block, past_key_values=past, use_cache=True).logits.float().log_softmax(-1)  # noqa: E731
    sums, counts = torch.zeros(-(-tokens // window), 2, dtype=torch.float64), torch.zeros(-(-tokens // window))
    for past in (full, cache):
        read(ids[:, :first], past)
    start = first
    while start < tokens:
        # No pass lies in two windows.
        end = min(start + step, tokens, (start // window + 1) * window)
        expected, found = (read(ids[:, start:end], past) for past in (full, cache))
        losses = -expected.gather(2, ids[:, start + 1 : end + 1, None])
        sums[start // window] += torch.stack([each.double().sum().cpu() for each in (expected.exp() * (expected - found), losses)])
        counts[start // window] += losses.numel()
        start = end
    for index, ((divergence, loss), count) in enumerate(zip(sums.tolist(), counts.tolist(), strict=True)):
        if count:
            yield {"window": index * window, "kl": float(f"{divergence / count:.4g}"), "perplexity": round(math.exp(loss / count), 3)}


def measure(args: argparse.Namespace, name: str, device: torch.device, results: Results) -> None:
    """Adds rows for each variant and text."""
    setting = Setting(args, name, device)
    chosen = [variant for variant in VARIANTS if variant.name in args.variants]
    texts = texts_of(setting, args)
    for text, variant in (progress := tqdm([(text, variant) for text in texts for variant in chosen], unit="cache")):
        progress.set_postfix_str(f"{Path(name).name}, {text}, {variant.name}")
        row: Row = {"model": Path(name).name, "text": text, "calibrated_on": setting.calibrated_on, "step": args.step}
        row |= {"text_rows": len(texts[text]), "row_tokens": texts[text].shape[1], "variant": variant.name}
        if not results.has(**row):
            found = windows(setting.model, setting.workshop.make(variant), texts[text], variant.exact, args.step, args.window)
            results.add([row | each for each in found])


def report(rows: Sequence[Row]) -> str:
    """For each model and text a table with a line for each window."""
    parts = []
    for model, text in dict.fromkeys((row["model"], row["text"]) for row in rows):
        own = rows_where(rows, model=model, text=text)
        variants = list(dict.fromkeys(row["variant"] for row in own))
        lines = []
        for window in sorted({row["window"] for row in own}):
            cells = {row["variant"]: row for row in rows_where(own, window=window)}
            full = next(iter(cells.values()))
            divergences = [f"{cells[name]['kl']:.5f}" if name in cells else "" for name in variants]
            lines.append([str(window), *divergences, f"{full['perplexity']:.1f}"])
        parts.append(table([f"{model}, {text}: KL from", *variants, "perplexity"], lines))
    return "\n\n".join(parts)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """KL by the position in the text, of each model and text."""
    names = dict.fromkeys((row["model"], row["text"]) for row in rows)
    return [
        Panel(f"{model}, {text}: KL, nats", rows_where(rows, model=model, text=text), "{variant}", "window", "kl", log="y")
        for model, text in names
    ]


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "length", "seed", "device", "threads", "csv", "plot", "quick")
    add_setting_options(parser)
    parser.add_argument("--variants", nargs="+", choices=[variant.name for variant in VARIANTS], default=list(COMPARED))
    parser.add_argument("--rows", type=int, default=2, help="how many places of the first text are read")
    parser.add_argument("--tokens", type=int, default=4608, help="how far each row is read")
    parser.add_argument("--switch-rows", type=int, default=4, help="how many rows become another text")
    parser.add_argument("--switch", type=int, default=2048, help="their length")
    parser.add_argument("--window", type=int, default=512, help="tokens that a mean is of")
    parser.add_argument("--step", type=int, default=16, help="tokens that are fed in at a time")
    args = parser.parse_args()
    check_counts(args, [*COUNTS, "switch_rows"])
    if args.quick:
        small = {"rows": 1, "tokens": 96, "switch_rows": 1, "switch": 64, "window": 32, "calibrate": 1024, "calibration_documents": 0}
        vars(args).update(small, variants=["codec 0.1", "codec 0.1, adaptive"])
    return args


def main() -> None:
    args = parse()
    device = begin(args)
    results = Results(args.csv, COLUMNS, device)
    for name in args.model:
        measure(args, name, device, results)
    print(report(results.rows))
    if args.plot:
        draw(args.plot, "SubspaceCache over long texts", panels(results.rows))


if __name__ == "__main__":
    run_script(main)

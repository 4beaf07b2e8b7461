"""What low-rank keys and values cost in quality, against their bytes, and whether the paper's claims hold on a model.

    python scripts/eval_subspace.py [--model FOLDER_OR_HUB_ID] [--text FILE] [--csv FOLDER] [--plot FOLDER]

Bases are calibrated on the first `--calibrate` tokens of the text and on generated documents; everything is measured behind these tokens,
and on other documents.

**perplexity**: rows of text are fed in one token at a time; printed is the change against the full cache, in all and by position in the
row. Bytes are those of all tensors of a cache of 4,096 tokens in bfloat16. `aware` and `post`: keys projected before or after rotation;
`[4+64]`: that many first and last tokens exact. **recall**: questions about facts outside of the exact window of a document that was read.
**spectra**: the share of the energy that the best subspace of each rank keeps. **bounds**: how well the bounds of
`hf_kvcaches.subspace.bounds` order the errors of logits and outputs on real queries.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from _subspace_quality import make_quiz, perplexity_rows, read_rows, recall_row
from _subspace_theory import bounds_rows, spectra_rows
from _subspace_variants import ENDS, NAMES, VARIANTS, Run, Workshop, runs_of
from _subspace_verdicts import verdicts
from shared import TESTBED
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.plot import Panel, draw
from shared.results import Row, environment, show, table, write_csv
from shared.texts import encode, make_documents
from tqdm import tqdm

from hf_kvcaches import KVCacheError

COLUMNS = {
    "perplexity": [*NAMES, "from", "to", "tokens", "perplexity", "change_percent"],
    "recall": [*NAMES, "questions", "right", "share"],
    "spectra": ["layer", "what", "rank", "energy"],
    "bounds": "layer what points spearman error share_of_bound above_bound".split(),
}
TASKS = tuple(COLUMNS)
COUNTS = "rows tokens calibrate documents questions length bytes_tokens".split()
# Seeds of the documents that bases are calibrated on; those with questions begin at `--seed`.
CALIBRATION_SEED = 10**6
RANKS = (4, 8, 16, 24, 32, 48, 64, 96, 128)  # in the table of spectra, where a head has so many


class Evaluation:
    """The model, what it is calibrated on and what is measured, and the rows so far."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        self.model, self.tokenizer = load(args.model, device)
        text = torch.tensor(encode(self.tokenizer, args.text.read_text(encoding="utf-8")))
        texts, self.ids = [text[: args.calibrate].tolist()], text[args.calibrate :]
        if args.calibration_documents:
            book = self.tokenizer.decode(texts[0])
            documents = make_documents(self.tokenizer, book, args.calibration_documents, args.length, CALIBRATION_SEED)
            texts += [encode(self.tokenizer, document.text()) for document in documents]
        window = getattr(self.model.config, "max_position_embeddings", None) or 1024
        self.workshop = Workshop(self.model, texts, min(window, 1024), args.bytes_tokens)
        # Named after the file, so that a folder of this computer does not get into the tables.
        self.fixed = environment(device) | {"model": Path(args.model).name, "text": args.text.name}
        self.fixed["calibrated_on"] = f"{len(texts[0])} tokens of {args.text.name} and {args.calibration_documents} documents"
        self.rows: dict[str, list[Row]] = {task: [] for task in args.tasks}
        self.refused: list[str] = []

    def add(self, task: str, rows: Sequence[Row]) -> None:
        self.rows[task] += rows
        if self.args.csv:
            write_csv(self.args.csv / f"subspace-{task}.csv", self.rows[task], self.fixed, COLUMNS[task])

    def measure_runs(self, runs: list[Run]) -> None:
        """Perplexity and recall, one cache after the other."""
        args, full = self.args, None
        ids = read_rows(self.ids, args.rows, args.tokens) if "perplexity" in args.tasks else None
        quizzes = []
        if "recall" in args.tasks:
            documents = make_documents(self.tokenizer, self.tokenizer.decode(self.ids), args.documents, args.length, args.seed)
            quizzes = [make_quiz(self.tokenizer, document, ENDS[1], args.questions) for document in documents]
        for run in (progress := tqdm(runs, unit="cache")):
            progress.set_postfix_str(str(run))
            try:
                if ids is not None:
                    loss, rows = perplexity_rows(self.workshop, run, ids, full)
                    full = loss if full is None else full
                    self.add("perplexity", rows)
                if quizzes:
                    self.add("recall", [recall_row(self.workshop, run, quizzes)])
            except KVCacheError as error:  # a model or a budget that a variant can't do
                if run.variant.mode == "full":
                    raise
                self.refused.append(f"{run}: {error}")

    def measure(self) -> None:
        args = self.args
        if {"perplexity", "recall"} & set(args.tasks):
            self.measure_runs(runs_of(args.variants, args.quick))
        if "spectra" in args.tasks:
            self.add("spectra", spectra_rows(self.workshop))
        if "bounds" in args.tasks:
            ids = read_rows(self.ids, min(args.rows, 4), min(args.tokens, 512))
            head = min(layer.key_energies.shape[-1] for layer in self.workshop.bases({"rank": 1}).layers if layer is not None)
            ranks = sorted({max(1, head * share // 8) for share in ((2, 4) if args.quick else (1, 2, 4, 6))})
            self.add("bounds", list(tqdm(bounds_rows(self.workshop, ids, ranks), desc="bounds", unit="row")))

    def report(self) -> str:
        tables = [TABLES[task](rows) for task, rows in self.rows.items() if rows]
        texts = self.rows.get("perplexity")
        return "\n\n".join([*tables, "\n".join([*verdicts(self.rows, texts[0]["to"] if texts else 0), *self.refused])])


def name_of(row: Row) -> str:
    """The variant, with its window."""
    return row["variant"] if row["mode"] == "full" else f"{row['variant']} [{row['sinks']}+{row['recent']}]"


def _texts(rows: Sequence[Row]) -> str:
    """The perplexity of all tokens, and by position the change against the full cache."""
    groups = [(name, list(group)) for name, group in itertools.groupby(rows, key=name_of)]
    lines = []
    for name, group in groups:
        changes = ["" if row["mode"] == "full" else f"{row['change_percent']:+.2f}%" for row in group]
        lines.append([name, f"{group[0]['bytes_ratio']:.3f}", f"{group[0]['perplexity']:.3f}", *changes])
    return table(["perplexity", "bytes", "all", "change", *(f"to {row['to']:,}" for row in groups[0][1][1:])], lines)


def _answers(rows: Sequence[Row]) -> str:
    columns = {"recall": "{name}", "bytes": "{bytes_ratio:.3f}", "questions": "{questions}", "right": "{share:.1%}"}
    return show((row | {"name": name_of(row)} for row in rows), columns)


def _spectra(rows: Sequence[Row]) -> str:
    lines = []
    for (what, layer), group in itertools.groupby(rows, key=lambda row: (row["what"], row["layer"])):
        kept = {row["rank"]: row["energy"] for row in group}
        most = next(rank for rank, share in kept.items() if share >= min(0.99, max(kept.values())))
        lines.append([f"{what}, layer {layer}", *(f"{kept[rank]:.3f}" if rank in kept else "" for rank in RANKS), str(most)])
    return table(["energy kept by rank", *map(str, RANKS), "rank for 99%"], lines)


def _bounds(rows: Sequence[Row]) -> str:
    columns = {"bounds": "layer {layer}, {what}", "rank correlation": "{spearman:.2f}", "error / bound": "{share_of_bound:.3f}"}
    return show(rows, columns | {"above": "{above_bound}"})


TABLES = {"perplexity": _texts, "recall": _answers, "spectra": _spectra, "bounds": _bounds}


def write_plots(folder: Path, found: dict[str, list[Row]]) -> None:
    """One picture a task, `subspace-TASK.png`."""
    texts, kind = found.get("perplexity", []), "{mode} {rotation} {metric} {gamma} {share} {coefficients} {sinks}+{recent}"
    first = [row for row in texts if (row["from"], row["to"]) == (texts[0]["from"], texts[0]["to"])]
    later = [row for row in texts if row not in first and row["mode"] != "full" and not row["recent"]]
    panels = {
        "perplexity": [
            Panel("change of perplexity, %, by the share of bytes", first, kind, "bytes_ratio", "change_percent", log="y"),
            # Those without exact tokens show how errors grow.
            Panel("change of perplexity, %, by position in the text", later, "{variant}", "to", "change_percent", log="xy"),
        ],
        "recall": [Panel("facts recalled by the share of bytes", found.get("recall", []), kind, "bytes_ratio", "share")],
        "spectra": [Panel("share of the energy kept", found.get("spectra", []), "{what}, layer {layer}", "rank", "energy")],
        "bounds": [Panel("rank correlation with errors", found.get("bounds", []), "{what}", "layer", "spearman")],
    }
    for task, rows in found.items():
        if rows:
            draw(folder / f"subspace-{task}.png", f"SubspaceCache: {task}", panels[task])


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "model", "length", "seed", "device", "csv", "plot", "quick")
    parser.add_argument("--text", type=Path, default=TESTBED / "prose.txt", help="what is read")
    parser.add_argument("--calibrate", type=int, default=16384, help="tokens of text to calibrate on")
    parser.add_argument("--calibration-documents", type=int, default=16, help="generated documents to calibrate on besides; 0 for none")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--variants", nargs="+", choices=[variant.name for variant in VARIANTS], help="default: all")
    parser.add_argument("--rows", type=int, default=24, help="how many places of the text are read at once")
    parser.add_argument("--tokens", type=int, default=512, help="how far each row is read")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--questions", type=int, default=10, help="of each document, at most")
    parser.add_argument("--bytes-tokens", type=int, default=4096, help="read before bytes are counted")
    args = parser.parse_args()
    check_counts(args, COUNTS)
    if args.quick:
        small = {"rows": 2, "tokens": 96, "calibrate": 1024, "calibration_documents": 1, "documents": 1, "questions": 2, "length": 300}
        vars(args).update(small, bytes_tokens=256)
    return args


@torch.no_grad()
def main() -> None:
    args = parse()
    evaluation = Evaluation(args, begin(args))
    evaluation.measure()
    print(evaluation.report())
    if args.plot:
        write_plots(args.plot, evaluation.rows)


if __name__ == "__main__":
    run_script(main)

"""What low-rank keys and values cost in quality, against their bytes, and whether the paper's claims hold on a model.

    python scripts/eval_subspace.py [--model FOLDER_OR_HUB_ID] [--text FILE] [--csv FOLDER] [--plot FOLDER]

Bases are calibrated on the first `--calibrate` tokens of the text (or of `--calibration FILE`) and on generated documents; everything is
measured behind these tokens, and on other documents.

**perplexity**: rows of text are fed in one token at a time. Printed is the change against the full cache, for all tokens and by position
in the row, which shows whether errors grow with the context. Bytes are those of all tensors of a cache of 4,096 tokens in bfloat16, bases
and scales included. `aware` and `post`: keys projected before or after rotation; `[4+64]`: that many first and last tokens exact.
**recall**: a generated document is read; then each question about a fact outside of the exact window is asked from there, and an answer
counts if each of its tokens is the most likely one.
**spectra**: the share of the energy that the best subspace of each rank keeps of keys before and after rotation and of values.
**bounds**: how well the bounds of `hf_kvcaches.subspace.bounds` order the errors of logits and outputs that are measured on real queries,
and how well what a sketch guarantees does.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from _common import TESTBED, add_common, check_counts, environment, load, pick_device, prepare, run_script
from _subspace_quality import make_documents, make_quiz, perplexity_rows, read_rows, recall_row
from _subspace_report import show, write_csv, write_plots
from _subspace_theory import bounds_rows, sketch_rows, spectra_rows
from _subspace_variants import ENDS, VARIANTS, Run, Workshop, runs_of
from _subspace_verdicts import verdicts
from tqdm import tqdm

from hf_kvcaches import KVCacheError

TASKS = ("perplexity", "recall", "spectra", "bounds")
COUNTS = "rows tokens calibrate documents questions length bytes_tokens".split()
# Seeds of the documents that bases are calibrated on; those with questions begin at `--seed`.
_CALIBRATION_SEED = 10**6


class Evaluation:
    """The model, what it is calibrated on and what is measured, and the rows found so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        device = pick_device(args.device)
        self.model, self.tokenizer = load(args.model, device)
        self.window = getattr(self.model.config, "max_position_embeddings", None) or 1024
        text = self._encode(args.text)
        if args.calibration is None:
            learned, self.ids = text[: args.calibrate], text[args.calibrate :]
        else:
            learned, self.ids = self._encode(args.calibration)[: args.calibrate], text
        texts = [learned.tolist()]
        if args.calibration_documents:
            documents = make_documents(
                self.tokenizer, self.tokenizer.decode(learned), args.calibration_documents, args.length, _CALIBRATION_SEED
            )
            texts += [self.tokenizer(each.text(), add_special_tokens=False)["input_ids"] for each in documents]
        self.workshop = Workshop(self.model, texts, min(self.window, 1024), args.bytes_tokens)
        # Named after the file, so that a folder of this computer does not get into the tables.
        source = args.text.name if args.calibration is None else args.calibration.name
        self.fixed = {
            **environment(device),
            "model": Path(args.model).name,
            "text": args.text.name,
            "calibrated_on": f"{len(learned)} tokens of {source} and {args.calibration_documents} documents",
        }
        self.found: dict[str, list[dict[str, Any]]] = {task: [] for task in args.tasks}
        self.refused: list[str] = []

    def _encode(self, path: Path) -> torch.Tensor:
        return torch.tensor(self.tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"])

    def save(self, task: str) -> None:
        if self.args.csv:
            write_csv(self.args.csv, task, self.found[task], self.fixed)

    def measure_runs(self, runs: list[Run]) -> None:
        """Perplexity and recall, one cache after the other."""
        args, full = self.args, None
        rows = read_rows(self.ids, args.rows, args.tokens) if "perplexity" in args.tasks else None
        quizzes = []
        if "recall" in args.tasks:
            documents = make_documents(self.tokenizer, self.tokenizer.decode(self.ids), args.documents, args.length, args.seed)
            quizzes = [make_quiz(self.tokenizer, each, ENDS[1], args.questions) for each in documents]
        bar = tqdm(runs, unit="cache")
        for run in bar:
            bar.set_postfix_str(str(run))
            try:
                if rows is not None:
                    loss, found = perplexity_rows(self.workshop, run, rows, full)
                    full = loss if full is None else full
                    self.found["perplexity"] += found
                    self.save("perplexity")
                if quizzes:
                    self.found["recall"].append(recall_row(self.workshop, run, quizzes))
                    self.save("recall")
            except KVCacheError as error:  # a model or a budget that a variant can't do
                if run.variant.mode == "full":
                    raise
                self.refused.append(f"{run}: {error}")

    def measure(self) -> None:
        args = self.args
        if {"perplexity", "recall"} & set(args.tasks):
            self.measure_runs(runs_of(args.variants, args.quick))
        if "spectra" in args.tasks:
            self.found["spectra"] = spectra_rows(self.workshop)
            self.save("spectra")
        if "bounds" in args.tasks:
            rows = read_rows(self.ids, min(args.rows, 4), min(args.tokens, 512))
            head = min(each.key_energies.shape[-1] for each in self.workshop.bases({"rank": 1}).layers if each is not None)
            ranks = sorted({max(1, head * share // 8) for share in ((2, 4) if args.quick else (1, 2, 4, 6))})
            measured = itertools.chain(bounds_rows(self.workshop, rows, ranks), sketch_rows(self.workshop, rows, ranks))
            self.found["bounds"] = list(tqdm(measured, desc="bounds", unit="row"))
            self.save("bounds")

    def report(self) -> str:
        tables = [show(task, rows) for task, rows in self.found.items() if rows]
        texts = self.found.get("perplexity")
        judged = verdicts(dict(self.found), texts[0]["to"] if texts else 0)
        return "\n\n".join([*tables, "\n".join([*judged, *self.refused])])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--text", type=Path, default=TESTBED / "prose.txt", help="what is read")
    parser.add_argument("--calibration", type=Path, help="calibrate on this text instead of the beginning of the other")
    parser.add_argument("--calibrate", type=int, default=16384, help="tokens of text to calibrate on")
    parser.add_argument("--calibration-documents", type=int, default=16, help="generated documents to calibrate on besides; 0 for none")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--variants", nargs="+", choices=[each.name for each in VARIANTS], help="default: all")
    parser.add_argument("--rows", type=int, default=24, help="how many places of the text are read at once")
    parser.add_argument("--tokens", type=int, default=512, help="how far each row is read")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--questions", type=int, default=10, help="of each document, at most")
    parser.add_argument("--bytes-tokens", type=int, default=4096, help="read before bytes are counted")
    parser.add_argument("--csv", type=Path, help="write every number into this folder, a file for each task")
    parser.add_argument("--plot", type=Path, help="write pictures into this folder (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="few variants and little text, to see that everything runs")
    args = parser.parse_args()
    check_counts(args, COUNTS)
    if args.quick:
        small = {"rows": 2, "tokens": 96, "calibrate": 1024, "calibration_documents": 1, "documents": 1, "questions": 2, "length": 300}
        vars(args).update(small, bytes_tokens=256)
    return args


@torch.no_grad()
def main() -> None:
    args = parse()
    prepare(args)
    evaluation = Evaluation(args)
    evaluation.measure()
    print(evaluation.report())
    if args.plot:
        write_plots(args.plot, evaluation.found)


if __name__ == "__main__":
    run_script(main)

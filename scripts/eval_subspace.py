"""What `SubspaceCache` costs in quality against its bytes, beside plain quantization, on any model.

    python scripts/eval_subspace.py [--model FOLDER_OR_HUB_ID ...] [--texts FILE ...] [--csv FILE] [--plot FILE]

A codec is calibrated on the first `--calibrate` tokens of the first text and on generated documents with facts. Measured is what comes
behind these tokens, the other texts, which are of another domain, and other documents. Rows of text are fed in one token at a time behind
4 exact tokens, so that all others are read as they were coded, the newest included. Without a codec nothing is coded before a first
basis is made: what stands before it is no part of the mean, and the row's `tokens` are fewer.

**share**: bytes of a long text over those of keys and values in 16 bits. **owned**: bytes of all that a cache of 8,192 tokens keeps, over
those of the full cache in bfloat16. **KL**: the mean divergence of predictions from those of the full cache, in nats. **recall**: questions
about facts in a document that was read, outside of its last 64 tokens; only with models that answer half of them from the full cache.

transformers' `QuantizedCache` is measured where quanto or HQQ is installed; up to 128 of its newest tokens are exact, and it answers no
questions. With `--csv` what the file has already is not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _subspace_quality import make_quiz, quality, read_rows, recall
from _subspace_variants import FULL, RATIOS, VARIANTS, Setting, Variant, add_setting_options
from shared.bars import Bar, verdicts
from shared.cli import arguments, begin, check_counts, run_script
from shared.plot import Panel, draw
from shared.results import Results, Row, rows_where, show
from shared.texts import make_documents
from tqdm import tqdm

from hf_kvcaches import KVCacheError

COLUMNS = (
    "model text calibrated_on text_rows row_tokens variant kind recent share owned tokens kl perplexity change_percent "
    "questions right recall"
).split()
COUNTS = "rows tokens calibrate documents questions length bytes_tokens".split()
WINDOW = 64  # facts are outside of it, for all caches alike
LEAST_RECALL = 0.5  # of the full cache, where recall is measured


class Evaluation:
    """A model, what its codecs are calibrated on, and what is measured."""

    def __init__(self, args: argparse.Namespace, name: str, device: torch.device, results: Results) -> None:
        self.name, self.results, self.setting = Path(name).name, results, Setting(args, name, device)
        self.texts = {text: read_rows(ids, args.rows, args.tokens) for text, ids in self.setting.texts.items()}
        tokenizer, first = self.setting.tokenizer, next(iter(self.setting.texts.values()))
        documents = make_documents(tokenizer, tokenizer.decode(first), args.documents, args.length, args.seed)
        self.quizzes = [make_quiz(tokenizer, document, WINDOW, args.questions) for document in documents]

    def measure(self, variants: Sequence[Variant]) -> list[str]:
        """Adds a row for each variant and text, the full cache first; returns why some could not be measured."""
        refused = []
        for variant in (progress := tqdm(variants, unit="cache")):
            progress.set_postfix_str(f"{self.name}, {variant.name}")
            try:
                for text in list(self.texts)[: None if variant.other_texts else 1]:
                    settings = {"model": self.name, "text": text, "calibrated_on": self.setting.calibrated_on}
                    settings |= {"text_rows": len(self.texts[text]), "row_tokens": self.texts[text].shape[1], "variant": variant.name}
                    if not self.results.has(**settings):
                        self.results.add([settings | self._row(variant, text)])
            except (KVCacheError, ImportError) as error:  # a model that a variant can't do; a back-end that is not installed
                if variant.kind == "full":
                    raise
                refused.append(f"{self.name}, {variant.name}: {error}")
        return refused

    def _row(self, variant: Variant, text: str) -> Row:
        workshop, model, is_full = self.setting.workshop, self.setting.model, variant.kind == "full"
        make = lambda: workshop.make(variant)  # noqa: E731
        row = {"kind": variant.kind, "recent": variant.recent, "share": round(workshop.share(variant), 5)}
        row |= quality(model, None if is_full else make, self.texts[text], variant.exact)
        if text != next(iter(self.texts)):
            return row
        owned = workshop.owned(variant)
        row |= {} if owned is None else {"owned": round(owned, 5)}
        full = rows_where(self.results.rows, model=self.name, text=text, variant=FULL)
        if is_full or (variant.kind != "transformers" and full[0]["recall"] >= LEAST_RECALL):
            row |= recall(model, make, self.quizzes)
        return row


def bars(rows: Sequence[Row]) -> list[Bar]:
    """What is promised of each model, on the text of its codec's domain."""
    promised = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = rows_where(rows, model=model)
        text = own[0]["text"]

        def add(claim: str, variant: str, value: Any, unit: str = "", model: str = model, text: str = text, **limit: float) -> None:
            promised.append(Bar(f"{model}, {claim}", {"model": model, "text": text, "variant": variant}, value, unit=unit, **limit))

        found = {row["variant"]: row for row in rows_where(own, text=text)}
        if "KIVI 4 bit" in found:
            add("KL at 0.125 at most that of KIVI 4 bit", "codec 0.125", "kl", most=found["KIVI 4 bit"]["kl"])
        if "KIVI 2 bit" in found:
            add("KL at 0.1875 at most 1/20 of that of KIVI 2 bit", "codec 0.1875", "kl", most=found["KIVI 2 bit"]["kl"] / 20)
        for ratio, most in ((0.125, 0.3), (0.07, 1.5)):
            add(f"perplexity at {ratio:g} at most {most:g}% higher", f"codec {ratio:g}", "change_percent", "%", most=most)
        add("perplexity at 0.1 with 64 recent at most 0.2% higher", "codec 0.1, 64 recent", "change_percent", "%", most=0.2)
        full = found.get(FULL, {}).get("recall", 0.0)
        for ratio, points in ((0.14, 0.01), (0.10, 0.03)) if full >= LEAST_RECALL else ():
            claim = f"recall at {ratio:g} within {100 * points:g} points of the full cache's {full:.1%}"
            add(claim, f"codec {ratio:g}", "recall", least=round(full - points, 6))
        if full >= LEAST_RECALL and "codec 0.125" in found:
            least = found["codec 0.125"]["recall"] - 0.01
            claim = "recall at 0.125 with bases that follow within 1 point of the codec's own"
            add(claim, "codec 0.125, adaptive", "recall", least=round(least, 6))
        for ratio in RATIOS:
            claim = f"all that the cache owns at {ratio:g} at most 1.03 of its share"
            add(claim, f"codec {ratio:g}", lambda row: row["owned"] / row["share"], "x", most=1.03)
    return promised


def report(rows: Sequence[Row]) -> str:
    """A table of each model, and the bars."""
    shown = {"share": "{share:.4f}", "owned": "{owned:.4f}", "KL": "{kl:.5f}", "perplexity": "{perplexity:.3f}"}
    shown |= {"change": "{change_percent:+.3f}%", "recall": "{right} of {questions}"}
    models = dict.fromkeys((row["model"], row["text"]) for row in rows)
    parts = [show(rows_where(rows, model=model, text=text), {f"{model}, {text}": "{variant}", **shown}) for model, text in models]
    return "\n\n".join([*parts, verdicts(bars(rows), rows)])


def panels(rows: Sequence[Row]) -> list[Panel]:
    """KL and recall by bytes, of each model."""
    made = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows_where(rows, model=model, recent=0) if row["kind"] in ("codec", "kivi")]
        bare = [row for row in own if row["variant"].startswith(("codec", "KIVI"))]
        made.append(
            Panel(f"{model}: KL, nats, by the share of bytes", bare, "{kind}, {text}", "share", "kl", log="xy", along="share of bytes")
        )
        made.append(Panel(f"{model}: facts recalled", bare, "{kind}", "share", "recall", along="share of bytes"))
    return made


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "length", "seed", "device", "threads", "csv", "plot", "quick")
    add_setting_options(parser)
    parser.add_argument("--variants", nargs="+", choices=[variant.name for variant in VARIANTS], help="default: all")
    parser.add_argument("--rows", type=int, default=16, help="how many places of a text are read at once")
    parser.add_argument("--tokens", type=int, default=512, help="how far each row is read")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--questions", type=int, default=10, help="of each document, at most")
    args = parser.parse_args()
    check_counts(args, COUNTS)
    if args.quick:
        small = {"rows": 2, "tokens": 80, "calibrate": 1024, "calibration_documents": 1, "documents": 1, "questions": 2, "length": 300}
        vars(args).update(small, bytes_tokens=512, texts=args.texts[:1])
    return args


def main() -> None:
    args = parse()
    device = begin(args)
    results = Results(args.csv, COLUMNS, device)
    names, refused = args.variants, []
    chosen = [each for each in VARIANTS if each.kind == "full" or (each.name in names if names else each.quick or not args.quick)]
    for name in args.model:
        refused += Evaluation(args, name, device, results).measure(chosen)
    print("\n".join([report(results.rows), *refused]))
    if args.plot:
        draw(args.plot, "SubspaceCache with a codec, and plain quantization", panels(results.rows))


if __name__ == "__main__":
    run_script(main)

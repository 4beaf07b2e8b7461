"""What caches lose on real language models, beside their peers: codes, segments, warm starts. `eval_pruning.py` measures pruning.

    python scripts/eval_real.py [--model .models/smollm2 .models/gemma3] [--tasks ...] [--wikitext FILE] [--mixture FILE ...] [--codes NAME]
        [--csv FOLDER] [--plot FILE]

`make models` makes the folders of the two models. Rows are kept in `--state` as they are measured: a run that is cut off goes on where it
was. Texts are this repository's prose unless `--wikitext` names a file of WikiText-2 (CC BY-SA, not part of this repository).

**codes**: rows of text are read in one pass,
in which each token sees a coded past, the newest token included, but for 4 first tokens. **quantized**: the same token by token behind a
prompt of 256 tokens that is read exactly, for caches that can't be read in one pass. **requests**: an agent's prompts with the same pages
in other orders. **pairs**: prompts that resemble the one that was served before. The last two compare the 16 tokens behind a prompt.

Peers: KIVI and random rotations are written anew here (`_kivi.py`, `_real_sides.py`); `QuantizedCache` needs `optimum-quanto` and `hqq`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import _real_sides as sides
import torch
from _real_sides import row_summary
from shared import ROOT, TESTBED
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.plot import Panel, draw
from shared.results import environment, rows_where, show, write_csv
from transformers import Cache

from hf_kvcaches import KVCacheError, KVCodec
from hf_kvcaches.cli import prompts, suite
from hf_kvcaches.cli.suite import Item, Log, Row
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.verify import verify_text

COLUMNS = ("model section task cache share recent peer samples tokens kl perplexity change worst agreement saved note").split()
_NAMED = re.compile(r"(?P<cache>.+?) (?P<share>[\d.]+)(?:, (?P<recent>\d+) recent)?$")
SHOWN: dict[str, Mapping[str, str]] = {
    "codes": {
        "codes": "{cache}",
        "bytes": "{share:.4g}",
        "recent": "{recent}",
        "text": "{task}",
        "KL": "{kl:.4f}",
        "perplexity": "{perplexity:.2f}",
        "more": "{change:+.1%}",
    },
    "quantized": {
        "token by token": "{cache}",
        "bytes": "{share:.4g}",
        "recent": "{recent}",
        "text": "{task}",
        "KL": "{kl:.4f}",
        "agreement": "{agreement:.1%}",
        "": "{note}",
    },
    "reuse": {
        "reuse": "{cache}",
        "prompts": "{task}",
        "saved": "{saved:.1%}",
        "KL": "{kl:.2g}",
        "worst prompt": "{worst:.2g}",
        "agreement": "{agreement:.1%}",
    },
}
# The item number of rows that say why there are no others.
NOT_MEASURED = -2
PEERS = ("KIVI", "rotation", "QuantizedCache")


PICTURE = "Caches and their peers on real language models"


def columns_of(name: str) -> Row:
    """Cache, share and window of a side's name."""
    found = _NAMED.match(name)
    peer = name.startswith(PEERS)
    if found is None:
        return {"cache": name, "peer": peer}
    return {"cache": found["cache"], "share": float(found["share"]), "recent": int(found["recent"] or 0), "peer": peer}


def summaries(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each cache and task, of what a log holds."""
    for task in dict.fromkeys(row["task"] for row in rows):
        section, _, kind = task.partition(" ")
        own = [row for row in rows if row["task"] == task]
        notes, own = [row for row in own if "note" in row], [row for row in own if "note" not in row]
        named = {row["cache"] for row in own}
        for row in notes:
            if row["cache"] not in named:
                yield {"section": section, "task": kind, **columns_of(row["cache"]), "note": row["note"]}
        for name in dict.fromkeys(row["cache"] for row in own):
            mine = [row for row in own if row["cache"] == name]
            named_row = {"section": section, "task": kind or task, **columns_of(name), "samples": len(mine)}
            yield {**named_row, **_numbers(section, own, mine, name)}


def _numbers(section: str, own: Sequence[Row], mine: Sequence[Row], name: str) -> Row:
    if section == "codes":
        found = row_summary(own, name)
    elif section == "quantized":
        found = {"tokens": sum(row["tokens"] for row in mine)} | {each: fmean(row[each] for row in mine) for each in ("kl", "agreement")}
    else:
        found = {**suite.reuse_summary(own, name), "section": "reuse"}
        found.pop("prompts")
    return {column: round(value, 6) if isinstance(value, float) else value for column, value in found.items() if column != "cache"}


def tables(rows: Sequence[Row]) -> str:
    """A table of each section."""
    parts = [f"{section}\n{show(rows_where(rows, section=section), columns)}" for section, columns in SHOWN.items()]
    models = ", ".join(dict.fromkeys(row["model"] for row in rows))
    return "\n\n".join([models, *parts])


def write(path: Path, rows: Sequence[Row], fixed: Mapping[str, Any]) -> None:
    """The rows as a file."""
    write_csv(path, [{name: value for name, value in row.items() if value is not None} for row in rows], fixed, COLUMNS)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """For each model: codes by their bytes."""
    made = []
    for model in dict.fromkeys(row["model"] for row in rows):
        codes = rows_where(rows, model=model, section="codes", recent=0)
        text = codes[-1]["task"] if codes else ""
        kinds = [row | {"kind": re.sub(r" \d bit$", "", row["cache"])} for row in codes if row["task"] == text]
        title = f"{model}: KL behind codes, nats, {text}"
        made.append(Panel(title, kinds, "{kind}", "share", "kl", "xy", along="share of the bytes", unit="KL, nats"))
    return made


def draw_all(path: Path, rows: Sequence[Row]) -> None:
    """One picture of all models."""
    draw(path, PICTURE, panels(rows))


TASKS = ("codes", "quantized", "requests", "pairs")


class Evaluation:
    """One model and what is measured on it."""

    def __init__(self, args: argparse.Namespace, name: str, device: torch.device) -> None:
        self.args, self.name = args, Path(name).name
        self.model, self.tokenizer = load(name, device, args.dtype)
        self.folder = name
        self.prose = (TESTBED / "prose.txt").read_text(encoding="utf-8")
        text = self.prose if args.wikitext is None else args.wikitext.read_text(encoding="utf-8")
        self.texts = {"WikiText-2" if args.wikitext else "prose.txt": text}
        self.texts |= {path.stem: path.read_text(encoding="utf-8") for path in args.mixture}
        self.log = Log(args.state and args.state / f"{self.name}-{args.row_tokens}.jsonl")

    def measure(self) -> list[Row]:
        """The summary rows of all that the log holds in the end."""
        for task in () if self.args.report else self.args.tasks:
            suite.run(list(getattr(self, task)()), self.log)
        return [{"model": self.name, **row} for row in summaries(self.log.rows)]

    def _note(self, task: str, cache: str, note: str) -> None:
        """Keeps the reason why something was not measured."""
        item = Item(task, cache, NOT_MEASURED, list)
        if not self.log.has(item):
            self.log.add(item, [{"note": note}])

    @cached_property
    def ids(self) -> dict[str, list[int]]:
        """The texts that codecs are calibrated and measured on, by name."""
        return {name: prompts.encode(self.tokenizer, text) for name, text in self.texts.items()}

    @property
    def calibrated(self) -> int:
        """Tokens at the beginning of each text that codecs are calibrated on."""
        return self.args.calibrate // len(self.texts)

    def _rows(self, ids: Sequence[int], count: int, tokens: int) -> torch.Tensor:
        """Rows from all over a text, each begun as the tokenizer begins a text, (count, tokens)."""
        begin = prompts.encode(self.tokenizer, "", begins=True)
        length, distance = tokens - len(begin), len(ids) // max(1, count)
        if distance < length:
            raise ConfigError.of("--row-tokens", f"rows that a text of {len(ids)} tokens has {count} times", tokens)
        return torch.tensor([[*begin, *ids[start * distance : start * distance + length]] for start in range(count)])

    @cached_property
    def codecs(self) -> dict[int, KVCodec]:
        """For each window a codec calibrated for it on the beginning of the text, kept in the state folder."""
        count = max(1, self.calibrated // 512)
        rows = [row for ids in self.ids.values() for row in self._rows(ids[: self.calibrated], count, 512).tolist()]
        return {recent: self._codec(recent, rows) for recent in sides.WINDOWS}

    def _codec(self, recent: int, rows: list[list[int]]) -> KVCodec:
        text = "+".join(self.texts)
        folder = self.args.state and self.args.state / f"{self.name}-{text}-{self.args.calibrate}-{recent}.codec"
        if folder and folder.exists():
            return KVCodec.from_pretrained(folder, model=self.model)
        codec = KVCodec.calibrate(self.model, None, rows, bytes_ratio=0.125, recent=recent)
        if folder:
            codec.save_pretrained(folder)
        return codec

    def codes(self) -> Iterator[Item]:
        head_dim, _ = head_sizes(self.model.config, self.model.config.num_hidden_layers - 1) or (64, 64)
        found = {str(side): coding for side, coding in sides.codings(self.model, self.codecs, head_dim).items()}
        found = {name: coding for name, coding in found.items() if self.args.codes in name}
        mixed = ", mixture" if len(self.texts) > 1 else ""
        for text, ids in self.ids.items():
            rows = self._rows(ids[self.calibrated :], self.args.rows, self.args.row_tokens)
            yield from sides.row_items(self.model, f"codes {text}{mixed}", rows, found)

    def quantized(self) -> Iterator[Item]:
        prompt, steps = self.args.quantized
        text, ids = next(iter(self.ids.items()))
        rows = self._rows(ids[self.calibrated :], max(1, self.args.rows // 2), prompt + steps)
        for side, make in sides.quantized(self.model, self.codecs[64]).items():
            found = [
                Item(f"quantized {text}", str(side), sample, lambda make=make, row=row: self._step_by_step(make, row, prompt))
                for sample, row in enumerate(rows.split(1))
            ]
            # What another environment has measured needs no back-end here.
            reason = "" if all(map(self.log.has, found)) else _why_not(make)
            if reason:
                self._note(f"quantized {text}", str(side), reason)
            else:
                yield from found

    def _step_by_step(self, make: Any, row: torch.Tensor, prompt: int) -> list[Row]:
        found = verify_text(self.model, {"cache": make}, row[:, :prompt], row[:, prompt:])["cache"]
        return [{"tokens": found.steps, "kl": found.mean_kl, "agreement": found.agreement}]

    def requests(self) -> Iterator[Item]:
        found = prompts.agent_prompts(self.tokenizer, self.args.requests_count, page_tokens=self.args.page, prose=self.prose)
        yield from suite.request_items(self.model, "requests", found, sides.segments(self.model, self.tokenizer))

    def pairs(self) -> Iterator[Item]:
        for kind in prompts.PAIR_KINDS:
            found = prompts.prompt_pairs(self.tokenizer, self.args.pairs_count, kind, page_tokens=self.args.page, prose=self.prose)
            yield from suite.pair_items(self.model, found, sides.warm_starts(self.model, self.tokenizer))


def _why_not(make: Callable[[], Cache]) -> str:
    """Why a peer's cache can't be made here; "" if it can."""
    try:
        make()
    except (KVCacheError, ImportError, ValueError) as error:
        return " ".join(str(error).split())[:120]
    return ""


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "dtype", "threads", "device", "quick")
    parser.set_defaults(dtype="float32")
    parser.add_argument("--model", nargs="+", default=[str(ROOT / ".models" / name) for name in ("smollm2", "gemma3")], help="folders")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--wikitext", type=Path, help="WikiText-2, as one file of text")
    parser.add_argument("--mixture", nargs="*", type=Path, default=[], help="more texts: codecs are calibrated on equal parts of all")
    parser.add_argument("--codes", default="", help="of the codes only those with this in their names, such as 'packed'")
    parser.add_argument("--state", type=Path, default=ROOT / ".eval", help="where rows and codecs are kept between runs")
    parser.add_argument("--report", action="store_true", help="measure nothing: tables, files and picture of what --state holds")
    parser.add_argument("--csv", type=Path, help="the folder for real-NAME.csv")
    parser.add_argument("--plot", type=Path, help="write a picture here (needs matplotlib)")
    parser.add_argument("--rows", type=int, default=6, help="rows of a text that are read with coded past")
    parser.add_argument("--row-tokens", type=int, default=384)
    parser.add_argument("--calibrate", type=int, default=16384, help="tokens at the beginning of a text that a codec is calibrated on")
    parser.add_argument("--requests-count", type=int, default=6, help="of an agent, the first one not counted")
    parser.add_argument("--pairs-count", type=int, default=3, help="of each kind")
    parser.add_argument("--page", type=int, default=100, help="tokens of a page in requests and pairs")
    args = parser.parse_args()
    args.quantized = (sides.QUANTIZED_PROMPT, sides.QUANTIZED_STEPS)
    check_counts(args, ("rows", "row_tokens", "calibrate", "requests_count", "pairs_count", "page"))
    if args.quick:
        small: dict[str, Any] = {"rows": 1, "row_tokens": 64, "calibrate": 1024, "page": 40}
        vars(args).update(small, requests_count=2, pairs_count=1, quantized=(32, 4))
    return args


def main() -> None:
    args = parse()
    device = begin(args)
    args.requests_count += 1
    rows: list[Row] = []
    for name in args.model:
        found = Evaluation(args, name, device).measure()
        rows += found
        print(tables(found))
        if args.csv:
            write(
                args.csv / f"real-{Path(name).name}.csv",
                found,
                environment(device) | {"dtype": args.dtype, "calibrated_tokens": args.calibrate},
            )
    if args.plot:
        draw_all(args.plot, rows)


if __name__ == "__main__":
    run_script(main)

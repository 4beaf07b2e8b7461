"""What pruning costs in quality: perplexity far beyond the trained window, and facts recalled from documents, by policy and budget.

    python scripts/eval_equip.py [--model FOLDER_OR_HUB_ID] [--text FILE] [--csv FILE] [--plot FILE]

**Perplexity**: rows of text are fed in from their beginning, one token at a time (`--chunk` for more), and the loss is averaged over
spans of the position in the text: up to half of the trained window, up to the whole, up to twice and so on. The full cache goes along
for `--full` tokens: beyond the trained window it shows why pruning is wanted even where there is memory.

**Recall**: a generated document is read and pruned to a share of its tokens; then each of its questions is asked from there, and an
answer counts if each of its tokens is the most likely one. With `--ask within` the question is part of what is read before pruning,
but for its last token: what is pruned then may depend on what is asked.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _common import TESTBED, add_common, check_counts, environment, load, pick_device, prepare, run_script, table, write_table
from tqdm import tqdm
from transformers import Cache, DynamicCache

from hf_kvcaches import KVCacheError
from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.errors import ConfigError, require
from tests.testbed.documents import Filler, fit_document

FULL_CACHE = "full cache"
POLICIES = ("streaming", "h2o", "tova", "snapkv", "lagkv", "knorm", "random")
FIELDS = "task policy positions budget from to tokens perplexity questions right share".split()


@dataclass(frozen=True)
class Setting:
    """One cache: a policy with its budget and positions, or the full one."""

    policy: str
    positions: str = ""
    budget: int | float = 0

    def make(self, model: Any) -> Cache:
        if self.policy == FULL_CACHE:
            return DynamicCache(config=model.config)
        return EquipCache(model, self.policy, self.budget, positions=self.positions)

    @property
    def columns(self) -> dict[str, Any]:
        return {"policy": self.policy, "positions": self.positions, "budget": self.budget or ""}

    def __str__(self) -> str:
        return " ".join(str(value) for value in (self.policy, self.positions, self.budget or "") if value)


@dataclass(frozen=True)
class Texts:
    """Rows of one text and the places up to which their loss is averaged."""

    ids: torch.Tensor  # (rows, tokens)
    ends: tuple[int, ...]


def read_texts(tokenizer: Any, path: Path, rows: int, tokens: int, full: int, window: int) -> Texts:
    ids = torch.tensor(tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])
    if len(ids) < rows * 2:
        raise ConfigError.of("--text", f"a text of at least {2 * rows} tokens for {rows} rows", len(ids), "Name a longer file.")
    length = min(tokens, len(ids) // rows)
    # Rows begin at equal distances, so that they are different text.
    starts = [row * (len(ids) // rows) for row in range(rows)]
    ends = {end for end in (full, *(int(window * 2.0**power) for power in range(-1, 12))) if end < length}
    return Texts(torch.stack([ids[start : start + length] for start in starts]), (*sorted(ends), length))


def losses(model: Any, cache: Cache, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """The loss of each token but the first, (rows, tokens - 1), as the text is fed in chunk by chunk."""
    found = []
    for part in ids.split(chunk, 1):
        logits = model(input_ids=part, past_key_values=cache, use_cache=True).logits.float()
        place = sum(each.shape[1] for each in found)
        targets = ids[:, place + 1 : place + 1 + part.shape[1]]
        loss = torch.nn.functional.cross_entropy(logits[:, : targets.shape[1]].flatten(0, 1), targets.flatten(), reduction="none")
        found.append(loss.view(targets.shape))
    return torch.cat(found, 1)


def perplexities(model: Any, texts: Texts, settings: Sequence[Setting], chunk: int, full: int) -> Iterator[dict[str, Any]]:
    """One row for each setting and span of the text."""
    for setting in settings:
        is_full = setting.policy == FULL_CACHE
        ids = (texts.ids[:, :full] if is_full else texts.ids).to(model.device)
        # Whatever the pieces, the full cache gives the same; larger ones are faster.
        loss = losses(model, setting.make(model), ids, max(chunk, 64) if is_full else chunk)
        start = 0
        for end in texts.ends:
            span = loss[:, start : min(end, ids.shape[1]) - 1]
            if span.numel():
                seen = {"from": start + 1, "to": start + span.shape[1] + 1, "tokens": span.numel()}
                yield {"task": "perplexity", **setting.columns, **seen, "perplexity": round(math.exp(float(span.mean())), 4)}
            start = end - 1


@dataclass(frozen=True)
class Quiz:
    """A document's tokens up to the questions, and each question with its answer."""

    context: torch.Tensor
    questions: tuple[tuple[torch.Tensor, torch.Tensor], ...]


def make_quizzes(tokenizer: Any, count: int, tokens: int, questions: int, seed: int) -> list[Quiz]:
    filler = Filler((TESTBED / "prose.txt").read_text(encoding="utf-8"))
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    quizzes: list[Quiz] = []
    for drawn in range(seed, seed + 40 * count):
        facts = max(questions, tokens // 80)
        document = fit_document(random.Random(drawn), filler, lambda text: len(encode(text)), tokens, facts=facts)
        # Now and then the generator ends far below the length asked for, and shares of unlike lengths can't be averaged.
        if len(encode(document.text())) < 0.85 * tokens:
            continue
        chosen = [document.facts[each] for each in document.asked[:questions]]
        asked = tuple((torch.tensor([encode(fact.question)]), torch.tensor([encode(fact.answer)])) for fact in chosen)
        quizzes.append(Quiz(torch.tensor([encode(document.context())]), asked))
        if len(quizzes) == count:
            return quizzes
    raise ConfigError.of("--length", "a length that documents can have", tokens, "Ask for longer documents or fewer questions.")


def right_answers(model: Any, quiz: Quiz, setting: Setting, ask: str) -> int:
    """How many questions are answered exactly."""
    device, right = model.device, 0
    read = None
    if ask == "after":
        read = setting.make(model)
        model(input_ids=quiz.context.to(device), past_key_values=read, use_cache=True, logits_to_keep=1)
    for question, answer in quiz.questions:
        if read is None:
            cache, behind = setting.make(model), question[:, -1:]
            before = torch.cat([quiz.context, question[:, :-1]], 1).to(device)
            model(input_ids=before, past_key_values=cache, use_cache=True, logits_to_keep=1)
        else:
            cache, behind = copy.deepcopy(read), question
        # One token after the other, as they would be written, and each pruned.
        ids = torch.cat([behind, answer[:, :-1]], 1).to(device)
        guesses = [model(input_ids=each, past_key_values=cache, use_cache=True).logits[0, -1].argmax() for each in ids.split(1, 1)]
        right += bool((torch.stack(guesses[-answer.shape[1] :]) == answer[0].to(device)).all())
    return right


def recalls(model: Any, quizzes: Sequence[Quiz], settings: Sequence[Setting], ask: str) -> Iterator[dict[str, Any]]:
    """One row for each setting."""
    for setting in settings:
        asked = sum(len(quiz.questions) for quiz in quizzes)
        right = sum(right_answers(model, quiz, setting, ask) for quiz in quizzes)
        yield {"task": f"recall, asked {ask}", **setting.columns, "questions": asked, "right": right, "share": round(right / asked, 4)}


def settings_of(args: argparse.Namespace, budgets: Sequence[int | float]) -> list[Setting]:
    points = itertools.product(args.policies, args.positions, budgets)
    return [Setting(FULL_CACHE), *(Setting(policy, positions, budget) for policy, positions, budget in points)]


def show(rows: Sequence[dict[str, Any]]) -> str:
    parts = []
    texts = [row for row in rows if row["task"] == "perplexity"]
    if texts:
        spans = sorted({row["to"] for row in texts})
        lines = []
        for name, group in itertools.groupby(texts, key=_name):
            found = {row["to"]: f"{row['perplexity']:.2f}" for row in group}
            lines.append([name, *(found.get(span, "-") for span in spans)])
        parts.append(table(["perplexity up to token", *(f"{span:,}" for span in spans)], lines))
    answered = [row for row in rows if row["task"] != "perplexity"]
    if answered:
        lines = [[_name(row), str(row["questions"]), f"{100 * row['share']:.1f}%"] for row in answered]
        parts.append(table([answered[0]["task"], "questions", "right"], lines))
    return "\n\n".join(parts)


def _name(row: dict[str, Any]) -> str:
    return str(Setting(row["policy"], row["positions"], row["budget"] or 0))


def write_plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    figure, (left, right) = plots.subplots(1, 2, figsize=(14, 6), layout="constrained")
    for name, group in itertools.groupby((row for row in rows if row["task"] == "perplexity"), key=_name):
        points = [(row["to"], row["perplexity"]) for row in group]
        left.plot(*zip(*points, strict=True), marker="o", label=name, color="black" if name == FULL_CACHE else None)
    left.set(title="perplexity by position in the text", xlabel="tokens", ylabel="perplexity", xscale="log", yscale="log")
    answered = [row for row in rows if row["task"] != "perplexity"]
    by_policy = lambda row: f"{row['policy']} {row['positions']}".strip()  # noqa: E731
    for name, group in itertools.groupby(answered, key=by_policy):
        members = list(group)
        if name == FULL_CACHE:
            right.axhline(members[0]["share"], color="black", label=name)
        else:
            right.plot([float(row["budget"]) for row in members], [row["share"] for row in members], marker="o", label=name)
    right.set(title="facts recalled", xlabel="budget, share of the document", ylabel="share of questions", ylim=(-0.02, 1.02))
    for axis in (left, right):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plots.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--text", type=Path, default=TESTBED / "prose.txt", help="what perplexity is measured on")
    parser.add_argument("--tasks", nargs="+", choices=("perplexity", "recall"), default=["perplexity", "recall"])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--positions", nargs="+", choices=("compact", "original"), default=["compact", "original"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[256, 512], help="tokens kept, for perplexity")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.25, 0.5], help="of a document, kept for recall")
    parser.add_argument("--rows", type=int, default=4, help="how many places of the text are read at once")
    parser.add_argument("--tokens", type=int, default=4096, help="how far each row is read")
    parser.add_argument("--full", type=int, default=4096, help="how far the full cache goes along")
    parser.add_argument("--chunk", type=int, default=1, help="tokens fed at a time")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--questions", type=int, default=8, help="of each document")
    parser.add_argument("--ask", choices=("after", "within"), default="after")
    parser.add_argument("--csv", type=Path, help="write every number here")
    parser.add_argument("--plot", type=Path, help="write a picture here (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="a few tokens and questions, to see that everything runs")
    args = parser.parse_args()
    check_counts(args, ("rows", "tokens", "full", "chunk", "documents", "questions", "length"))
    if args.quick:
        small = {"rows": 2, "tokens": 96, "full": 64, "chunk": 8, "budgets": [32], "shares": [0.25], "documents": 1, "questions": 2}
        vars(args).update(small, length=300, policies=[p for p in args.policies if p in ("streaming", "h2o")])
    return args


@torch.no_grad()
def main() -> None:
    args = parse()
    prepare(args)
    device = pick_device(args.device)
    model, tokenizer = load(args.model, device)
    window = getattr(model.config, "max_position_embeddings", None) or 1024
    rows: list[dict[str, Any]] = []
    refused: list[str] = []
    works: list[tuple[Setting, Callable[[], Iterator[dict[str, Any]]]]] = []
    if "perplexity" in args.tasks:
        texts, settings = read_texts(tokenizer, args.text, args.rows, args.tokens, args.full, window), settings_of(args, args.budgets)
        works += [(each, lambda each=each: perplexities(model, texts, [each], args.chunk, args.full)) for each in settings]
    if "recall" in args.tasks:
        quizzes = make_quizzes(tokenizer, args.documents, args.length, args.questions, args.seed)
        works += [(each, lambda each=each: recalls(model, quizzes, [each], args.ask)) for each in settings_of(args, args.shares)]
    where = environment(device)
    fixed = {**where, "model": Path(args.model).name, "text": args.text.name, "chunk": args.chunk, "document_tokens": args.length}
    for setting, work in tqdm(works, unit="setting"):
        try:
            rows += work()
        except KVCacheError as error:  # a budget too small for this policy, a model that it can't be used with
            refused.append(f"{setting}: {error}")
        if args.csv:
            write_table(args.csv, FIELDS, rows, fixed)
    print("\n".join([show(rows), *refused]))
    if args.plot:
        write_plot(args.plot, rows)


if __name__ == "__main__":
    run_script(main)

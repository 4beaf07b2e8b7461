"""What pruning costs in quality: perplexity far beyond the trained window, and facts recalled from documents, by policy and budget.

    python scripts/eval_equip.py [--model FOLDER_OR_HUB_ID] [--text FILE] [--csv FILE] [--plot FILE]

**Perplexity**: rows of text are fed in from their beginning, one token at a time (`--chunk` for more), and the loss is averaged over
spans of the position in the text: up to half of the trained window, up to the whole, up to twice and so on. The full cache goes along
for `--full` tokens: beyond the trained window it shows why pruning is wanted even where there is memory.

**Prefix**: a prompt is read and pruned to a share of its tokens, and the loss is that of the tokens behind it.

**Recall**: a generated document is read and pruned to a share of its tokens; then each of its questions is asked from there, and an
answer counts if each of its tokens is the most likely one.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _equip_pictures import FULL_CACHE, quality_panels
from shared import TESTBED
from shared.bars import Bar, verdicts
from shared.cli import arguments, begin, check_counts, load, run_script
from shared.plot import draw
from shared.results import Row, environment, rows_where, show, table, write_csv
from shared.texts import encode, make_documents
from tqdm import tqdm
from transformers import Cache, DynamicCache

from hf_kvcaches import KVCacheError, KVCodec, RetrievalHeads
from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.equip.policies import BUILT_IN
from hf_kvcaches.errors import ConfigError

POLICIES = tuple(BUILT_IN)
DEFAULT = "compactor"
# The default's own bars; the others' are two points below kvpress 0.5.5.
LEAST_RECALL = {
    DEFAULT: {0.5: 0.99, 0.25: 0.98, 0.125: 0.95},
    "leverage": {0.5: 0.974, 0.25: 0.971},
    "cur": {0.5: 0.971, 0.25: 0.974},
    "kvzip": {0.5: 0.974, 0.25: 0.968},
    "expected_attention": {0.5: 0.955, 0.25: 0.839},
    "keydiff": {0.5: 0.94, 0.25: 0.89},
    "block": {0.5: 0.95, 0.25: 0.90},
}
COLUMNS = "task policy positions storage codec head_budgets budget from to tokens perplexity excess questions right share".split()


@dataclass(frozen=True)
class Setting:
    """One cache: a policy with its budget and positions, or the full one."""

    policy: str
    positions: str = ""
    budget: int | float = 0
    storage: str = ""
    head_budgets: Any = ""
    codec: Any = None

    def make(self, model: Any) -> Cache:
        if self.policy == FULL_CACHE:
            return DynamicCache(config=model.config)
        options = {name: getattr(self, name) or None for name in ("storage", "head_budgets")}
        return EquipCache(model, self.policy, self.budget, positions=self.positions, codec=self.codec, **options)

    @property
    def columns(self) -> Row:
        heads = self.head_budgets if isinstance(self.head_budgets, str) else "duo"
        columns = {"policy": self.policy, "positions": self.positions, "budget": self.budget or "", "storage": self.storage}
        columns["codec"] = "" if self.codec is None else self.codec.settings.rule["bytes_ratio"]
        return {**columns, "head_budgets": heads, "name": " ".join(str(value) for value in (*columns.values(), heads) if value)}

    def __str__(self) -> str:
        return self.columns["name"]


def read_rows(ids: list[int], rows: int, tokens: int) -> torch.Tensor:
    """Rows that begin at equal distances in a text, so that they are different text, (rows, tokens)."""
    if len(ids) < rows * 2:
        raise ConfigError.of("--text", f"a text of at least {2 * rows} tokens for {rows} rows", len(ids), "Name a longer file.")
    distance = len(ids) // rows
    return torch.tensor([ids[row * distance :][: min(tokens, distance)] for row in range(rows)])


def losses(model: Any, cache: Cache, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """The loss of each token but the first, (rows, tokens - 1), as the text is fed in chunk by chunk."""
    parts, place = [], 0
    for part in ids.split(chunk, 1):
        logits = model(input_ids=part, past_key_values=cache, use_cache=True).logits.float()
        targets = ids[:, place + 1 : place + 1 + part.shape[1]]
        parts.append(torch.nn.functional.cross_entropy(logits[:, : targets.shape[1]].transpose(1, 2), targets, reduction="none"))
        place += part.shape[1]
    return torch.cat(parts, 1)


def read_context(model: Any, cache: Cache, ids: torch.Tensor) -> None:
    """Feeds a context that is pruned before anything else is known."""
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    if isinstance(cache, EquipCache) and cache.policy.deferred:
        cache.compress(model, input_ids=ids)


def prefixes(model: Any, ids: torch.Tensor, prefix: int, settings: Sequence[Setting]) -> Iterator[Row]:
    """A row for each setting, the full cache first: the perplexity of what follows a pruned prefix."""
    full = 0.0
    for setting in settings:
        total = 0.0
        for row in ids.to(model.device).split(1):
            cache = setting.make(model)
            read_context(model, cache, row[:, :prefix])
            logits = model(input_ids=row[:, prefix:-1], past_key_values=cache, use_cache=True).logits.float()
            total += float(torch.nn.functional.cross_entropy(logits[0], row[0, prefix + 1 :])) / len(ids)
        full = full or total
        measured = {"perplexity": round(math.exp(total), 4), "excess": round(math.exp(total - full) - 1, 6)}
        yield {"task": "prefix", **setting.columns, "tokens": ids.shape[0] * (ids.shape[1] - prefix - 1), **measured}


def perplexities(model: Any, ids: torch.Tensor, ends: Sequence[int], setting: Setting, chunk: int) -> Iterator[Row]:
    """A row for each span of the text."""
    # Whatever the chunks, the full cache gives the same; larger ones are faster.
    loss = losses(model, setting.make(model), ids.to(model.device), max(chunk, 64) if setting.policy == FULL_CACHE else chunk)
    start = 0
    for end in ends:
        span = loss[:, start : min(end, ids.shape[1]) - 1]
        if span.numel():
            place = {"from": start + 1, "to": start + span.shape[1] + 1, "tokens": span.numel()}
            yield {"task": "perplexity", **setting.columns, **place, "perplexity": round(math.exp(float(span.mean())), 4)}
        start = end - 1


@dataclass(frozen=True)
class Quiz:
    """A document's tokens up to the questions, and each question with its answer."""

    context: torch.Tensor
    questions: tuple[tuple[torch.Tensor, torch.Tensor], ...]


def make_quizzes(tokenizer: Any, count: int, tokens: int, questions: int, seed: int) -> list[Quiz]:
    ids = lambda text: torch.tensor([encode(tokenizer, text)])  # noqa: E731
    text = (TESTBED / "prose.txt").read_text(encoding="utf-8")
    return [
        Quiz(ids(document.context()), tuple((ids(fact.question), ids(fact.answer)) for fact in (document.facts[i] for i in asked)))
        for document in make_documents(tokenizer, text, count, tokens, seed, facts=questions)
        for asked in [document.asked[:questions]]
    ]


def right_answers(model: Any, quiz: Quiz, setting: Setting) -> int:
    """How many questions are answered exactly."""
    read = lambda ids, cache: model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)  # noqa: E731
    document, right = setting.make(model), 0
    read_context(model, document, quiz.context.to(model.device))
    for question, answer in quiz.questions:
        cache = copy.deepcopy(document)
        # One token after the other, as they would be written, and each pruned.
        guesses = [read(token, cache).logits[0, -1].argmax() for token in torch.cat([question, answer[:, :-1]], 1).split(1, 1)]
        right += bool((torch.stack(guesses[-answer.shape[1] :]).cpu() == answer[0]).all())
    return right


def recall(model: Any, quizzes: Sequence[Quiz], setting: Setting) -> Iterator[Row]:
    asked = sum(len(quiz.questions) for quiz in quizzes)
    right = sum(right_answers(model, quiz, setting) for quiz in quizzes)
    yield {"task": "recall", **setting.columns, "questions": asked, "right": right, "share": round(right / asked, 4)}


def find_retrieval_heads(model: Any, tokenizer: Any, share: float) -> RetrievalHeads:
    """Those that the model needs to answer questions about other documents."""
    quizzes = make_quizzes(tokenizer, 6, 512, 2, seed=99)
    texts = [torch.cat([quiz.context, *pair], 1)[0].tolist() for quiz in quizzes for pair in quiz.questions]
    return RetrievalHeads.calibrate(model, None, texts, answer=8, share=share)


def calibrate_codec(model: Any, tokenizer: Any) -> KVCodec:
    """A codec from other documents than those that are asked about."""
    text = (TESTBED / "prose.txt").read_text(encoding="utf-8")
    texts = [document.text() for document in make_documents(tokenizer, text, 16, 512, seed=99)]
    return KVCodec.calibrate(model, tokenizer, [text, *texts][::-1], max_tokens=16384)


def report(rows: Sequence[Row]) -> str:
    """A table of each task."""
    texts, prefix = rows_where(rows, task="perplexity"), rows_where(rows, task="prefix")
    answered = [row for row in rows if "share" in row]
    spans = sorted({row["to"] for row in texts})
    lines = []
    for name, group in itertools.groupby(texts, key=lambda row: row["name"]):
        by_span = {row["to"]: f"{row['perplexity']:.2f}" for row in group}
        lines.append([name, *(by_span.get(span, "-") for span in spans)])
    parts = [table(["perplexity up to token", *(f"{span:,}" for span in spans)], lines)] if texts else []
    if prefix:
        columns = {"perplexity behind a pruned prefix": "{name}", "perplexity": "{perplexity:.2f}", "more": "{excess:+.2%}"}
        parts.append(show(prefix, columns))
    if answered:
        parts.append(show(answered, {answered[0]["task"]: "{name}", "questions": "{questions}", "right": "{share:.1%}"}))
    return "\n\n".join([*parts, verdicts(bars(rows), rows)])


def bars(rows: Sequence[Row]) -> list[Bar]:
    """What facts are promised to be recalled, by the policy and the share of the context that is kept."""
    recalled = {"task": "recall", "positions": "compact", "storage": "", "codec": "", "head_budgets": ""}
    promises = [
        Bar(f"{policy} recalls {least:.1%} at {budget:g}", {**recalled, "policy": policy, "budget": budget}, "share", least=least, unit="")
        for policy, leasts in LEAST_RECALL.items()
        for budget, least in leasts.items()
    ]
    prefix = {"task": "prefix", "policy": DEFAULT, "positions": "compact", "storage": "", "codec": "", "head_budgets": "", "budget": 0.5}
    promises.append(Bar("perplexity behind a prefix of which half is kept at most 0.3% higher", prefix, "excess", most=0.003, unit=""))
    coded = {**recalled, "policy": DEFAULT, "budget": 0.25, "codec": 0.125}
    promises.append(Bar("a quarter of the tokens in an eighth of the bytes recalls 95%", coded, "share", least=0.95, unit=""))
    full = rows_where(rows, task="recall", policy=FULL_CACHE)
    if full:
        where = {**recalled, "policy": "kvzip", "budget": 0.25}
        promises.append(Bar("kvzip is within 0.5 points of the full cache", where, "share", least=full[0]["share"] - 0.005, unit=""))
    return promises


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "model", "length", "seed", "device", "csv", "plot", "quick")
    parser.add_argument("--text", type=Path, default=TESTBED / "prose.txt", help="what perplexity is measured on")
    parser.add_argument("--tasks", nargs="+", choices=("perplexity", "prefix", "recall"), default=["prefix", "recall"])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--positions", nargs="+", choices=("compact", "original"), default=["compact"])
    parser.add_argument("--storage", nargs="+", choices=("", "int8", "int4"), default=[""], help="'' for the model's dtype")
    parser.add_argument("--codecs", nargs="+", type=float, default=[0.0], help="bytes of a slot, as a share; 0 for the model's dtype")
    parser.add_argument("--head-budgets", nargs="+", choices=("", "adakv", "duo"), default=[""], help="'' for as many slots in each head")
    parser.add_argument("--whole", type=float, default=0.125, help="of the heads, keep all tokens with duo")
    parser.add_argument("--budgets", nargs="+", type=int, default=[256, 512], help="tokens kept, for perplexity")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.125, 0.25, 0.5], help="of a document or a prefix, kept")
    parser.add_argument("--rows", type=int, default=4, help="how many places of the text are read at once")
    parser.add_argument("--prefixes", type=int, default=16, help="how many places of the text are read for the prefix task")
    parser.add_argument("--prefix", type=int, default=600, help="tokens before what is measured")
    parser.add_argument("--ahead", type=int, default=400, help="tokens that are measured")
    parser.add_argument("--tokens", type=int, default=4096, help="how far each row is read")
    parser.add_argument("--full", type=int, default=4096, help="how far the full cache goes along")
    parser.add_argument("--chunk", type=int, default=1, help="tokens fed at a time")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--questions", type=int, default=8, help="of each document")
    args = parser.parse_args()
    check_counts(args, ("rows", "prefixes", "prefix", "ahead", "tokens", "full", "chunk", "documents", "questions", "length"))
    if args.quick:
        small: dict[str, Any] = {"rows": 2, "prefixes": 1, "prefix": 96, "ahead": 32, "tokens": 96, "full": 64, "chunk": 8, "budgets": [32]}
        small |= {"shares": [0.25], "documents": 1, "questions": 2, "length": 300}
        vars(args).update(small, policies=[p for p in args.policies if p in ("streaming", "h2o", "kvzip")])
    return args


def works_of(args: argparse.Namespace, model: Any, tokenizer: Any) -> Iterator[tuple[Setting, Callable[[], Iterator[Row]]]]:
    """Each setting of each task, and what measures it."""

    heads = [find_retrieval_heads(model, tokenizer, args.whole) if way == "duo" else way for way in args.head_budgets]

    codec = calibrate_codec(model, tokenizer) if any(args.codecs) else None
    codecs = [codec.at(share) if codec is not None and share else None for share in args.codecs]

    def settings(budgets: Sequence[int | float]) -> list[Setting]:
        ways = itertools.product(args.policies, args.positions, budgets, args.storage, heads, codecs)
        return [Setting(FULL_CACHE), *itertools.starmap(Setting, ways)]

    if "perplexity" in args.tasks:
        ids = read_rows(encode(tokenizer, args.text.read_text(encoding="utf-8")), args.rows, args.tokens)
        window = getattr(model.config, "max_position_embeddings", None) or 1024
        spans = {end for end in (args.full, *(int(window * 2.0**power) for power in range(-1, 12))) if end < ids.shape[1]}
        for setting in settings(args.budgets):
            if setting.policy != FULL_CACHE and BUILT_IN[setting.policy].deferred:
                continue  # it can't be fed singly
            rows = ids[:, : args.full] if setting.policy == FULL_CACHE else ids
            yield setting, lambda s=setting, rows=rows: perplexities(model, rows, (*sorted(spans), ids.shape[1]), s, args.chunk)
    if "prefix" in args.tasks:
        ids = read_rows(encode(tokenizer, args.text.read_text(encoding="utf-8")), args.prefixes, args.prefix + args.ahead)
        yield Setting("prefix"), lambda: prefixes(model, ids, args.prefix, settings(args.shares))
    if "recall" in args.tasks:
        quizzes = make_quizzes(tokenizer, args.documents, args.length, args.questions, args.seed)
        for setting in settings(args.shares):
            yield setting, lambda s=setting: recall(model, quizzes, s)


@torch.no_grad()
def main() -> None:
    args = parse()
    device = begin(args)
    model, tokenizer = load(args.model, device)
    rows: list[Row] = []
    refused: list[str] = []
    fixed = environment(device) | {"model": Path(args.model).name, "text": args.text.name}
    fixed |= {"chunk": args.chunk, "document_tokens": args.length}
    for setting, work in tqdm(list(works_of(args, model, tokenizer)), unit="setting"):
        try:
            rows += work()
        except KVCacheError as error:  # a budget too small for this policy, a model that it can't be used with
            refused.append(f"{setting}: {error}")
        if args.csv:
            write_csv(args.csv, [{name: row[name] for name in COLUMNS if name in row} for row in rows], fixed, COLUMNS)
    print("\n".join([report(rows), *refused]))
    if args.plot:
        draw(args.plot, f"EquipCache, {args.model}", quality_panels(rows))


if __name__ == "__main__":
    run_script(main)

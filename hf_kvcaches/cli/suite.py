"""The quality suite: needles, a text's own continuation, requests of agents, pairs of similar prompts.

A measurement is an `Item`, which names its rows before it is measured; a `Log` keeps rows in a file, so that a run that is cut off goes on
where it was.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.cli.prompts import NeedlePrompt, PromptPair
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.evaluate.measures import losses
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.evaluate.verify import verify

Row = dict[str, Any]
MakeCache = Callable[[], Cache]
FULL_CACHE = "full cache"
# Tokens behind a request or a pair that are compared.
FOLLOWING = 16


@dataclass(frozen=True)
class Item:
    """One measurement.

    Args:
        task: What is measured.
        cache: Name of the cache.
        sample: Which prompt or text row; -1 for a series that is measured as a whole.
        measure: Returns the rows, without task and cache; each without "sample" gets this one.
    """

    task: str
    cache: str
    sample: int
    measure: Callable[[], list[Row]]


class Log:
    """Rows that have been measured, also in a file of JSON lines.

    Args:
        path: The file; None keeps rows in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._done: set[tuple[str, str, int]] = set()
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._remember(self._parse(line))

    def _parse(self, line: str) -> Row:
        try:
            row: Row = json.loads(line)
            return row | {"task": row["task"], "cache": row["cache"], "item": int(row["item"])}
        except (ValueError, TypeError, KeyError):
            raise ArtifactError(f"{self.path}: a line is no row of results: {line[:80]!r}. Delete it, or name another file.") from None

    def _remember(self, row: Row) -> None:
        self.rows.append(row)
        self._done.add((row["task"], row["cache"], row["item"]))

    def has(self, item: Item) -> bool:
        """Return whether the item was measured."""
        return (item.task, item.cache, item.sample) in self._done

    def add(self, item: Item, rows: Iterable[Row]) -> None:
        """Keep the rows of an item, all at once."""
        named = [{"task": item.task, "cache": item.cache, "item": item.sample, "sample": item.sample, **row} for row in rows]
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in named))
        for row in named:
            self._remember(row)


def run(items: Sequence[Item], log: Log, *, progress: bool = True) -> list[Row]:
    """Measure the items that the log lacks, and return the rows of all that were asked for.

    Args:
        progress: Whether to show a bar.
    """
    missing = [item for item in items if not log.has(item)]
    bar = tqdm(missing, desc="Evaluating", unit=" items", disable=not progress, initial=len(items) - len(missing), total=len(items))
    for item in bar:
        bar.set_postfix_str(f"{item.task}, {item.cache}")
        log.add(item, item.measure())
    asked = {(item.task, item.cache, item.sample) for item in items}
    return [row for row in log.rows if (row["task"], row["cache"], row["item"]) in asked]


@dataclass(frozen=True)
class Answer:
    """How a known continuation fares behind a cache.

    Args:
        loss: The mean loss of its tokens in nats.
        matches: Whether greedy decoding writes exactly these tokens.
    """

    loss: float
    matches: bool


@torch.no_grad()
def read_context(model: Any, cache: Cache, input_ids: Sequence[int]) -> Cache:
    """Read a context into an empty cache before anything else is known, a second time where the cache's policy does."""
    ids = torch.tensor([list(input_ids)], device=model.device)
    with evaluating(model):
        model(input_ids=ids, logits_to_keep=1, **compat.cache_kwargs(model, cache))
        if getattr(getattr(cache, "policy", None), "deferred", False):
            cache.compress(model, input_ids=ids)
    return cache


@torch.no_grad()
def answers(model: Any, cache: Cache, questions: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Answer]:
    """Measure the answers to questions behind a context, each question asked on a copy of the cache.

    A greedy continuation equals the answer exactly if each answer token is the most likely one behind those before it, so the answer is
    fed along with its question.

    Args:
        cache: What `read_context` returned; unchanged afterwards.
        questions: Token ids of each question and of its answer, at least one each.
    """
    measured = []
    with evaluating(model):
        for question, answer in questions:
            if not question or not answer:
                raise ConfigError.of("questions", "at least one token in each question and answer", (len(question), len(answer)))
            ids, copied = torch.tensor([[*question, *answer[:-1]]], device=model.device), copy.deepcopy(cache)
            logits = model(input_ids=ids, **compat.cache_kwargs(model, copied)).logits[0, -len(answer) :]
            targets = torch.tensor(list(answer), device=logits.device)
            measured.append(Answer(float(losses(logits, targets).mean()), bool((logits.argmax(-1) == targets).all())))
    return measured


def needle_items(model: Any, prompts: Sequence[NeedlePrompt], caches: Mapping[str, MakeCache]) -> Iterator[Item]:
    """Yield needles asked behind a context that was read before, and the loss of the context's own continuation.

    Args:
        caches: By a name; the full cache is always measured.
    """

    def measured(prompt: NeedlePrompt, make: MakeCache) -> list[Row]:
        cache = read_context(model, make(), prompt.context)
        first, follows = prompt.continuation[:1], prompt.continuation[1:]
        *asked, continued = answers(model, cache, [(prompt.question, prompt.answer), *prompt.others, (first, follows)])
        numbers = {"tokens": len(prompt.context), "kept": _kept(cache), "continuation": continued.loss}
        return [{**numbers, "right": [answer.matches for answer in asked], "losses": [answer.loss for answer in asked]}]

    full = lambda: DynamicCache(config=compat.base_model(model).config)  # noqa: E731
    samples: Counter[str] = Counter()
    for prompt in prompts:
        task = f"needles {prompt.kind} {prompt.needles}"
        for name, make in {FULL_CACHE: full, **caches}.items():
            yield Item(task, name, samples[task], lambda prompt=prompt, make=make: measured(prompt, make))  # type: ignore[misc]
        samples[task] += 1


def request_items(model: Any, task: str, requests: Sequence[Sequence[int]], caches: Mapping[str, MakeCache]) -> Iterator[Item]:
    """Yield requests one after another; from the second on what follows each is compared.

    Args:
        requests: Token ids of each prompt.
        caches: Functions that make a new cache for each request; what they share, such as a store, should be empty at first.
    """

    def measured(make: MakeCache) -> list[Row]:
        read_context(model, make(), requests[0])
        return [_followed(model, make, ids) | {"sample": number} for number, ids in enumerate(requests[1:], 1)]

    for name, make in caches.items():
        yield Item(task, name, -1, lambda make=make: measured(make))  # type: ignore[misc]


def pair_items(model: Any, pairs: Sequence[PromptPair], caches: Mapping[str, Callable[[Sequence[int]], MakeCache]]) -> Iterator[Item]:
    """Yield prompts that resemble an earlier one, and what follows them.

    Args:
        caches: By a name, functions that get the earlier prompt and return what makes a cache that may use it.
    """
    for sample, pair in enumerate(pairs):
        for name, prepare in caches.items():
            measured = lambda pair=pair, prepare=prepare: [_followed(model, prepare(pair.earlier), pair.later)]  # noqa: E731
            yield Item(f"pairs {pair.kind}", name, sample, measured)


def _followed(model: Any, make: MakeCache, ids: Sequence[int]) -> Row:
    """Return the divergence over what the full cache writes behind a prompt, and what the cache did not compute of the prompt."""
    made: list[Cache] = []

    def keep() -> Cache:
        made.append(make())
        return made[-1]

    report = verify(model, keep, torch.tensor([list(ids)]), FOLLOWING)
    return {"tokens": len(ids), "kl": report.mean_kl, "max_kl": max(report.kl), "agreement": report.agreement, "saved": _saved(made[-1])}


def _saved(cache: Any) -> float | None:
    """Return the share of the prefill that the cache did not compute: operations where it counts them, else tokens."""
    report: Any = cache.report() if hasattr(cache, "report") else None
    if hasattr(report, "flops_saved"):
        return float(report.flops_saved)
    reused, computed = getattr(report, "reused_tokens", None), getattr(report, "computed_tokens", None)
    return None if reused is None or computed is None else reused / max(1, reused + computed)


def _kept(cache: Any) -> int:
    """Return the slots of the layer that holds most."""
    report = cache.report() if hasattr(cache, "report") else None
    return int(max(report.kept)) if report is not None else int(cache.get_seq_length())


def needle_summary(rows: Sequence[Row], cache: str) -> Row:
    """Return right answers of those that the full cache gives, and losses beyond the full cache's.

    Args:
        rows: Of `needle_items`, of one task or several, those of the full cache among them.
    """
    full = {(row["task"], row["sample"]): row for row in rows if row["cache"] == FULL_CACHE}
    pairs = [(row, full[row["task"], row["sample"]]) for row in rows if row["cache"] == cache]
    known = [right for row, whole in pairs for right, possible in zip(row["right"], whole["right"], strict=True) if possible]
    return {
        "cache": cache,
        "right": sum(known),
        "questions": len(known),
        "answer_loss": fmean(fmean(row["losses"]) - fmean(whole["losses"]) for row, whole in pairs),
        "continuation_loss": fmean(row["continuation"] - whole["continuation"] for row, whole in pairs),
    }


def reuse_summary(rows: Sequence[Row], cache: str) -> Row:
    """Return means over requests or pairs, and the worst of them."""
    own = [row for row in rows if row["cache"] == cache]
    saved = [row["saved"] for row in own if row["saved"] is not None]
    return {
        "cache": cache,
        "prompts": len(own),
        "kl": fmean(row["kl"] for row in own),
        "worst": max(row["kl"] for row in own),
        "agreement": fmean(row["agreement"] for row in own),
        **({"saved": fmean(saved)} if saved else {}),
    }

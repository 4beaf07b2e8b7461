"""The quality suite: needles, a text's own continuation, requests of agents, pairs of similar prompts."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.cli.prompts import NeedlePrompt
from hf_kvcaches.cli.tables import Row
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.evaluate.measures import losses
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.evaluate.verify import verify

MakeCache = Callable[[], Cache]
FULL_CACHE = "full cache"
FOLLOWING = 16  # tokens behind a request or a pair that are compared


class Log:
    """Rows that have been measured, also in a file of JSON lines, if one is named: a run that is cut off goes on where it was."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._rows: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
        for line in path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else ():
            try:
                row = json.loads(line)
                self._rows[row["task"], row["cache"], int(row["item"])].append(row)
            except (ValueError, TypeError, KeyError):
                raise ArtifactError(f"{path}: a line is no row of results: {line[:80]!r}. Delete it, or name another file.") from None

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self._rows.values() for row in rows]

    def measured(self, task: str, cache: str, item: int, measure: Callable[..., list[Row]], *args: Any) -> list[Row]:
        """Return the rows of a measurement, which is made and kept if it was not yet; each row without "sample" gets the item's number."""
        if (task, cache, item) not in self._rows:
            fixed = {"task": task, "cache": cache, "item": item, "sample": item}
            rows = [fixed | row for row in measure(*args)]
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write("".join(json.dumps(row) + "\n" for row in rows))
            self._rows[task, cache, item] = rows
        return self._rows[task, cache, item]

    def measured_all(self, task: str, items: Sequence[Any], sides: Mapping[str, Callable[[Any], list[Row]]]) -> list[Row]:
        """Measure each item with all sides, by the names of their caches."""
        numbered = enumerate(tqdm(items, desc=task))
        return [row for number, item in numbered for name, side in sides.items() for row in self.measured(task, name, number, side, item)]


class Answer(NamedTuple):
    """How a known continuation fares behind a cache: its mean loss in nats, and whether greedy decoding writes exactly its tokens."""

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
    """Measure the answers to questions behind a context, as token ids, each asked of a copy of the cache with its answer along.

    A greedy continuation equals the answer if each of its tokens is the most likely one behind those before it.
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


def ask_needles(log: Log, model: Any, task: str, prompts: Sequence[NeedlePrompt], caches: Mapping[str, MakeCache]) -> list[Row]:
    """Ask needles behind a context that was read before, of the full cache and of others; measure how the context's text goes on, too."""

    def ask(make: MakeCache, prompt: NeedlePrompt) -> list[Row]:
        *asked, continued = answers(model, read_context(model, make(), prompt.context), prompt.asked)
        numbers = {"tokens": len(prompt.context), "continuation": continued.loss}
        return [{**numbers, "right": [answer.matches for answer in asked], "losses": [answer.loss for answer in asked]}]

    full = lambda: DynamicCache(config=compat.base_model(model).config)  # noqa: E731
    return log.measured_all(task, prompts, {name: partial(ask, make) for name, make in {FULL_CACHE: full, **caches}.items()})


def follow_requests(log: Log, model: Any, requests: Sequence[Sequence[int]], caches: Mapping[str, MakeCache]) -> list[Row]:
    """Read requests one after another; from the second on compare what follows each. What caches share should be empty at first."""

    def followed(make: MakeCache) -> list[Row]:
        read_context(model, make(), requests[0])
        later = enumerate(tqdm(requests[1:], desc="requests"), 1)
        return [_followed(model, make(), ids) | {"sample": number} for number, ids in later]

    return [row for name, make in caches.items() for row in log.measured("requests", name, -1, followed, make)]


def follow_pairs(
    log: Log, model: Any, task: str, pairs: Sequence[tuple[list[int], list[int]]], prepares: Mapping[str, Callable[[list[int]], Cache]]
) -> list[Row]:
    """Compare what follows the later prompts of pairs; `prepares` get the earlier one and return a new cache that may use it."""

    def followed(prepare: Callable[[list[int]], Cache], pair: tuple[list[int], list[int]]) -> list[Row]:
        return [_followed(model, prepare(pair[0]), pair[1])]

    return log.measured_all(task, pairs, {name: partial(followed, prepare) for name, prepare in prepares.items()})


def _followed(model: Any, cache: Any, ids: Sequence[int]) -> Row:
    """Return the divergence over what the full cache writes behind a prompt, and what the cache did not compute of the prompt."""
    compared = verify(model, lambda: cache, torch.tensor([list(ids)]), FOLLOWING)
    report: Any = cache.report() if hasattr(cache, "report") else None
    saved = getattr(report, "flops_saved", None)  # where operations are not counted, of tokens
    if saved is None and hasattr(report, "reused_tokens"):
        saved = report.reused_tokens / max(1, report.reused_tokens + report.computed_tokens)
    return {"tokens": len(ids), "kl": compared.mean_kl, "max_kl": max(compared.kl), "agreement": compared.agreement, "saved": saved}


def needle_summary(rows: Sequence[Row], cache: str) -> Row:
    """Return a cache's right answers of those that the full cache gives, and its losses beyond the full cache's."""
    full = {row["sample"]: row for row in rows if row["cache"] == FULL_CACHE}
    pairs = [(row, full[row["sample"]]) for row in rows if row["cache"] == cache]
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
    columns = {name: [row[name] for row in own if row[name] is not None] for name in ("kl", "agreement", "saved")}
    means = {name: fmean(values) for name, values in columns.items() if values}
    return {"cache": cache, "prompts": len(own), "worst": max(row["kl"] for row in own), **means}

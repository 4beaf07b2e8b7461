"""The quality suite: needles, a text's own continuation, codecs over whole rows, requests of agents, pairs of similar prompts.

A measurement is an `Item`, which names its rows before it is measured; a `Log` keeps rows in a file, so that a run that is cut off goes on
where it was.
"""

from __future__ import annotations

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
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.evaluate import measure
from hf_kvcaches.evaluate.past import PastCoding
from hf_kvcaches.evaluate.prompts import NeedlePrompt, PromptPair
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
        """Whether the item was measured."""
        return (item.task, item.cache, item.sample) in self._done

    def add(self, item: Item, rows: Iterable[Row]) -> None:
        """Keeps the rows of an item, all at once."""
        named = [{"task": item.task, "cache": item.cache, "item": item.sample, "sample": item.sample, **row} for row in rows]
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in named))
        for row in named:
            self._remember(row)


def run(items: Sequence[Item], log: Log, *, progress: bool = True) -> list[Row]:
    """Measures the items that the log lacks, and returns the rows of all that were asked for.

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


def needle_items(model: Any, prompts: Sequence[NeedlePrompt], caches: Mapping[str, MakeCache]) -> Iterator[Item]:
    """Needles asked behind a context that was read before, and the loss of the context's own continuation.

    Args:
        caches: By a name; the full cache is always measured.
    """

    def measured(prompt: NeedlePrompt, make: MakeCache) -> list[Row]:
        cache = measure.prefill(model, make(), prompt.context)
        first, follows = prompt.continuation[:1], prompt.continuation[1:]
        *found, continued = measure.answers(model, cache, [(prompt.question, prompt.answer), *prompt.others, (first, follows)])
        numbers = {"tokens": len(prompt.context), "kept": _kept(cache), "continuation": continued.loss}
        return [{**numbers, "right": [each.matches for each in found], "losses": [each.loss for each in found]}]

    full = lambda: DynamicCache(config=compat.base_model(model).config)  # noqa: E731
    samples: Counter[str] = Counter()
    for prompt in prompts:
        task = f"needles {prompt.kind} {prompt.needles}"
        for name, make in {FULL_CACHE: full, **caches}.items():
            yield Item(task, name, samples[task], lambda prompt=prompt, make=make: measured(prompt, make))  # type: ignore[misc]
        samples[task] += 1


def text_items(model: Any, task: str, input_ids: torch.Tensor, codings: Mapping[str, PastCoding], prompt: int = 4) -> Iterator[Item]:
    """KL and perplexity of codings of the past over rows of text, in one pass for each.

    Args:
        task: A name for the text.
        input_ids: (rows, tokens).
        prompt: First tokens of each row, which are not compared.
    """
    full: dict[int, torch.Tensor] = {}

    def measured(sample: int, name: str) -> list[Row]:
        row = input_ids[sample : sample + 1].to(model.device)
        if sample not in full:
            full.clear()
            full[sample] = measure.read_rows(model, row)
        found = measure.compare(full[sample], measure.read_rows(model, row, codings[name], prompt), row, prompt)
        return [{"tokens": found.tokens, "kl": found.kl, "loss": found.loss, "full_loss": found.full_loss}]

    for sample in range(len(input_ids)):
        for name in codings:
            yield Item(task, name, sample, lambda sample=sample, name=name: measured(sample, name))  # type: ignore[misc]


def request_items(model: Any, task: str, requests: Sequence[Sequence[int]], caches: Mapping[str, MakeCache]) -> Iterator[Item]:
    """Requests one after another; from the second on what follows each is compared.

    Args:
        requests: Token ids of each prompt.
        caches: Functions that make a new cache for each request; what they share, such as a store, should be empty at first.
    """

    def measured(make: MakeCache) -> list[Row]:
        measure.prefill(model, make(), requests[0])
        return [_followed(model, make, ids) | {"sample": number} for number, ids in enumerate(requests[1:], 1)]

    for name, make in caches.items():
        yield Item(task, name, -1, lambda make=make: measured(make))  # type: ignore[misc]


def pair_items(model: Any, pairs: Sequence[PromptPair], caches: Mapping[str, Callable[[Sequence[int]], MakeCache]]) -> Iterator[Item]:
    """Prompts that resemble an earlier one, and what follows them.

    Args:
        caches: By a name, functions that get the earlier prompt and return what makes a cache that may use it.
    """
    for sample, pair in enumerate(pairs):
        for name, prepare in caches.items():
            measured = lambda pair=pair, prepare=prepare: [_followed(model, prepare(pair.earlier), pair.later)]  # noqa: E731
            yield Item(f"pairs {pair.kind}", name, sample, measured)


def _followed(model: Any, make: MakeCache, ids: Sequence[int]) -> Row:
    """Divergence over the tokens that the full cache writes behind a prompt, and what the cache did not compute of the prompt."""
    made: list[Cache] = []

    def keep() -> Cache:
        made.append(make())
        return made[-1]

    report = verify(model, keep, torch.tensor([list(ids)]), FOLLOWING)
    return {"tokens": len(ids), "kl": report.mean_kl, "max_kl": max(report.kl), "agreement": report.agreement, "saved": _saved(made[-1])}


def _saved(cache: Any) -> float | None:
    """The share of the prefill that the cache did not compute: operations where it counts them, else tokens."""
    report: Any = cache.report() if hasattr(cache, "report") else None
    if hasattr(report, "flops_saved"):
        return float(report.flops_saved)
    reused, computed = getattr(report, "reused_tokens", None), getattr(report, "computed_tokens", None)
    return None if reused is None or computed is None else reused / max(1, reused + computed)


def _kept(cache: Any) -> int:
    """The slots of the layer that holds most."""
    report = cache.report() if hasattr(cache, "report") else None
    return int(max(report.kept)) if report is not None else int(cache.get_seq_length())


def needle_summary(rows: Sequence[Row], cache: str) -> Row:
    """Right answers of those that the full cache gives, and losses beyond the full cache's.

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


def text_summary(rows: Sequence[Row], cache: str) -> Row:
    """Means over the rows of a text."""
    own = [row for row in rows if row["cache"] == cache]
    quality = measure.TextQuality(
        sum(row["tokens"] for row in own), *(fmean(row[name] for row in own) for name in ("kl", "loss", "full_loss"))
    )
    return {"cache": cache, "tokens": quality.tokens, "kl": quality.kl, "perplexity": quality.perplexity, "change": quality.change}


def reuse_summary(rows: Sequence[Row], cache: str) -> Row:
    """Means over requests or pairs, and the worst of them."""
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

"""Items of the suite that read rows of text with a coded past, in one pass for each, and their summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from hf_kvcaches.cli.suite import Item, Row
from hf_kvcaches.evaluate.measures import TextQuality, compare
from hf_kvcaches.evaluate.past import PastCoding, read_rows


def row_items(model: Any, task: str, input_ids: torch.Tensor, codings: Mapping[str, PastCoding], prompt: int = 4) -> Iterator[Item]:
    """Yield KL and perplexity of codings of the past over rows of text.

    Args:
        task: A name for the text.
        input_ids: (rows, tokens).
        prompt: First tokens of each row, which are not compared.
    """
    full: dict[int, torch.Tensor] = {}

    def measure(sample: int, name: str) -> list[Row]:
        row = input_ids[sample : sample + 1].to(model.device)
        if sample not in full:
            full.clear()
            full[sample] = read_rows(model, row)
        quality = compare(full[sample], read_rows(model, row, codings[name], prompt), row, prompt)
        return [{"tokens": quality.tokens, "kl": quality.kl, "loss": quality.loss, "full_loss": quality.full_loss}]

    for sample in range(len(input_ids)):
        for name in codings:
            yield Item(task, name, sample, lambda sample=sample, name=name: measure(sample, name))  # type: ignore[misc]


def row_summary(rows: Sequence[Row], cache: str) -> Row:
    """Return means over the rows of a text."""
    own = [row for row in rows if row["cache"] == cache]
    means = (fmean(row[name] for row in own) for name in ("kl", "loss", "full_loss"))
    quality = TextQuality(sum(row["tokens"] for row in own), *means)
    return {"cache": cache, "tokens": quality.tokens, "kl": quality.kl, "perplexity": quality.perplexity, "change": quality.change}

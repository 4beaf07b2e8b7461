"""Measures presses of kvpress on the prompts of `eval_real.py` and `eval_pruning.py`.

    FOLDER/bin/python scripts/_kvpress_rows.py PROMPTS.json ROWS.jsonl

It runs in an environment of its own, as kvpress wants another transformers, and imports nothing of this repository. A context is read
under a press; then each question is asked of what is left, at the positions behind the whole context. Rows that the second file has are
not measured again.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

PRESSES = {
    "compactor": lambda ratio: kvpress.CompactorPress(compression_ratio=ratio),
    "kvzip": lambda ratio: kvpress.KVzipPress(compression_ratio=ratio),
    "adakv expected attention": lambda ratio: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(compression_ratio=ratio)),
    "keydiff": lambda ratio: kvpress.KeyDiffPress(compression_ratio=ratio),
    "snapkv": lambda ratio: kvpress.SnapKVPress(compression_ratio=ratio),
}


@torch.no_grad()
def measured(model: Any, prompt: dict[str, Any], press: Any) -> dict[str, Any]:
    """One row: which answers are right, and losses."""
    cache, context = DynamicCache(), torch.tensor([prompt["context"]])
    start = time.perf_counter()
    with press(model):
        model.model(input_ids=context, past_key_values=cache)
    seconds = time.perf_counter() - start
    right, losses = [], []
    for question, answer in prompt["questions"]:
        ids = torch.tensor([[*question, *answer[:-1]]])
        positions = torch.arange(context.shape[1], context.shape[1] + ids.shape[1])[None]
        logits = model(input_ids=ids, past_key_values=copy.deepcopy(cache), position_ids=positions).logits[0, -len(answer) :]
        targets = torch.tensor(answer)
        right.append(bool((logits.argmax(-1) == targets).all()))
        losses.append(float(-logits.double().log_softmax(-1).gather(-1, targets[:, None]).mean()))
    return {
        "tokens": context.shape[1],
        "kept": cache.get_seq_length(),
        "bytes": sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values)),
        "seconds": seconds,
        "right": right[:-1],
        "losses": losses[:-1],
        "continuation": losses[-1],
    }


def rows(work: dict[str, Any], done: set[tuple[str, str, int]]) -> Iterator[dict[str, Any]]:
    """A row for each press, budget and prompt that is not done."""
    torch.set_num_threads(work["threads"])
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=getattr(torch, work["dtype"])).eval()
    with tempfile.TemporaryDirectory() as folder:
        plain_tokenizer(model, folder)
        yield from missing_rows(model, work, done)


def plain_tokenizer(model: Any, folder: str) -> None:
    """Let KVzip find a tokenizer without a chat template, whose beginning it would take for that of each context."""
    tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    model.config.name_or_path = folder


def missing_rows(model: Any, work: dict[str, Any], done: set[tuple[str, str, int]]) -> Iterator[dict[str, Any]]:
    for prompt in work["prompts"]:
        for name in work["presses"]:
            for budget in work["budgets"]:
                named = {"task": prompt["task"], "cache": f"kvpress {name} {budget:g}", "item": prompt["sample"]}
                if tuple(named.values()) not in done:
                    yield {**named, "sample": prompt["sample"], **measured(model, prompt, PRESSES[name](1 - budget))}


def main() -> None:
    work, path = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    done = {(row["task"], row["cache"], row["item"]) for row in map(json.loads, lines)}
    with path.open("a", encoding="utf-8") as file:
        for row in rows(work, done):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()

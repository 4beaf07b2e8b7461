"""Measures presses of kvpress on the prompts of `eval.py pruning`.

    FOLDER/bin/python scripts/kvpress_rows.py PROMPTS.json ROWS.jsonl

It runs in an environment of its own, as kvpress wants another transformers, and imports nothing of this repository. A context is read under
a press; then each question is asked of what is left, at the positions after the whole context. Rows of the second file are not repeated.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

PRESSES = {"compactor": kvpress.CompactorPress, "kvzip": kvpress.KVzipPress}


@torch.no_grad()
def measured(model: Any, prompt: dict[str, Any], press: Any) -> dict[str, Any]:
    """Which answers are right, the loss of the continuation, and costs."""
    cache, context = DynamicCache(), torch.tensor([prompt["context"]])
    start = time.perf_counter()
    with press(model):
        model.model(input_ids=context, past_key_values=cache)
    seconds, right, losses = time.perf_counter() - start, [], []
    for question, answer in prompt["asked"]:
        ids = torch.tensor([[*question, *answer[:-1]]])
        positions = torch.arange(context.shape[1], context.shape[1] + ids.shape[1])[None]
        logits = model(input_ids=ids, past_key_values=copy.deepcopy(cache), position_ids=positions).logits[0, -len(answer) :]
        targets = torch.tensor(answer)
        right.append(bool((logits.argmax(-1) == targets).all()))
        losses.append(float(-logits.double().log_softmax(-1).gather(-1, targets[:, None]).mean()))
    size = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    return {"bytes": size, "seconds": seconds, "right": right[:-1], "continuation": losses[-1]}


def main() -> None:
    work, path = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    done = {(row["task"], row["cache"], row["item"]) for row in map(json.loads, lines)}
    torch.set_num_threads(work["threads"])
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder, path.open("a", encoding="utf-8") as file:
        # KVzip would take the beginning of a chat template for that of each context.
        tokenizer = AutoTokenizer.from_pretrained(work["model"])
        tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)
        model.config.name_or_path = folder
        for prompt in work["prompts"]:
            for name in work["presses"]:
                for budget in work["budgets"]:
                    row = {"task": prompt["task"], "cache": f"kvpress {name} {budget:g}", "item": prompt["sample"]}
                    if tuple(row.values()) not in done:
                        row |= {"sample": prompt["sample"], **measured(model, prompt, PRESSES[name](compression_ratio=1 - budget))}
                        file.write(json.dumps(row) + "\n")
                        file.flush()


if __name__ == "__main__":
    main()

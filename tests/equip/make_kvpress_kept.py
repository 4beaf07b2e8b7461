"""Writes `kvpress_kept.json`: which tokens of a prompt the presses of kvpress 0.5 keep on the testbed's base model. Run by hand."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from kvpress import ExpectedAttentionPress, KeyDiffPress, ObservedAttentionPress, SnapKVPress, StreamingLLMPress, TOVAPress
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

TESTS = Path(__file__).resolve().parents[1]
TOKENS, BUDGETS = 516, (292, 180)
SETTINGS = {
    "streaming": {"sinks": 4},
    "snapkv": {"window": 32, "kernel_size": 5},
    "expected_attention": {"sinks": 4, "epsilon": 0.02},
}
PRESSES = {
    "streaming": lambda ratio: StreamingLLMPress(ratio, n_sink=4),
    "h2o": ObservedAttentionPress,
    "tova": TOVAPress,
    "snapkv": lambda ratio: SnapKVPress(ratio, window_size=32, kernel_size=5),
    "keydiff": KeyDiffPress,
    "expected_attention": lambda ratio: ExpectedAttentionPress(ratio, n_sink=4, epsilon=0.02),
}


def spans(positions: list[int]) -> str:
    """Ascending positions in short: `0-3 7` for 0, 1, 2, 3, 7."""
    firsts = [position for position in positions if position - 1 not in positions]
    lasts = [position for position in positions if position + 1 not in positions]
    return " ".join(f"{first}-{last}" if last > first else str(first) for first, last in zip(firsts, lasts, strict=True))


def kept_by(press, model, ids: torch.Tensor, budget: int) -> list[list[str] | None]:
    """For each layer and KV head the positions that stay; None for a layer in which it comes to a choice between equals."""
    layers, score = [], press.score

    def record(*arguments):
        scores = score(*arguments)
        worth, order = scores[0].sort(descending=True)
        equal = worth[:, budget - 1] - worth[:, budget] < 1e-6 * worth[:, budget].abs()
        layers.append(None if bool(equal.any()) else [spans(head) for head in order[:, :budget].sort().values.tolist()])
        return scores

    press.score = record
    with torch.no_grad(), press(model):
        model(ids, past_key_values=DynamicCache())
    return layers


if __name__ == "__main__":
    base = AutoModelForCausalLM.from_pretrained(TESTS / "testbed/base", attn_implementation="eager").eval()
    text = (TESTS / "testbed/prose.txt").read_text()[:8000]
    ids = AutoTokenizer.from_pretrained(TESTS / "testbed/base")(text, return_tensors="pt").input_ids[:, :TOKENS]
    # Half a token more, because kvpress rounds down what its ratio leaves.
    kept = {
        name: {str(budget): kept_by(make(1 - (budget + 0.5) / TOKENS), base, ids, budget) for budget in BUDGETS}
        for name, make in PRESSES.items()
    }
    content = {"ids": ids[0].tolist(), "settings": SETTINGS, "kept": kept}
    (TESTS / "equip/kvpress_kept.json").write_text(json.dumps(content, indent=0) + "\n")

"""Writes `kvpress_kept.json`: which tokens of a prompt the presses of kvpress 0.5 keep on the testbed's base model.

Run by hand, with kvpress and a transformers version that it works with:

    python tests/equip/make_kvpress_kept.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from kvpress import (
    ExpectedAttentionPress,
    KeyDiffPress,
    ObservedAttentionPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

HERE = Path(__file__).resolve().parent
TESTBED = HERE.parent / "testbed"
TOKENS, SINKS, WINDOW, KERNEL = 516, 4, 32, 5
BUDGETS = (292, 180)


def spans(positions: list[int]) -> str:
    """Ascending positions in short: `0-3 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return " ".join(f"{start}-{stop}" if stop > start else str(start) for start, stop in runs)


def prune(model, ids: torch.Tensor, press, full: DynamicCache) -> list[list[str] | None]:
    """For each layer and KV head the positions that stay; None for a layer in which it comes to a choice between equals.

    Args:
        model: With eager attention.
        ids: (1, tokens).
        press: With its compression ratio.
        full: Holds the same tokens, unpruned.
    """
    found, decided, score = [], [], press.score

    def record(module, hidden_states, keys, *rest):
        scores = score(module, hidden_states, keys, *rest)
        found.append(scores.topk(int(keys.shape[2] * (1 - press.compression_ratio)), dim=-1).indices)
        kept = found[-1].shape[-1]
        decided.append(decides(scores, kept))
        return scores

    press.score = record
    cache = DynamicCache()
    with press(model):
        model(ids, past_key_values=cache)
    for layer, indices in enumerate(found):
        expected = full.layers[layer].keys.gather(2, indices[..., None].expand(-1, -1, -1, full.layers[layer].keys.shape[-1]))
        torch.testing.assert_close(cache.layers[layer].keys, expected)
    kept = [[spans(head) for head in indices[0].sort(-1).values.tolist()] for indices in found]
    return [heads if told else None for heads, told in zip(kept, decided, strict=True)]


def decides(scores: torch.Tensor, kept: int) -> bool:
    """Whether the scores tell clearly which tokens stay. In the first layer, keys of the same word have the same norm.

    Args:
        scores: (1, kv_heads, tokens).
        kept: How many stay.
    """
    best = scores.sort(descending=True).values
    return not bool((best[..., kept - 1] - best[..., kept] < 1e-6 * best[..., kept].abs()).any())


@torch.no_grad()
def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(TESTBED / "base", attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "base")
    ids = tokenizer((TESTBED / "prose.txt").read_text()[:8000], return_tensors="pt").input_ids[:, :TOKENS]
    full = DynamicCache()
    model(ids, past_key_values=full)
    presses = {
        "streaming": lambda ratio: StreamingLLMPress(ratio, n_sink=SINKS),
        "h2o": ObservedAttentionPress,
        "tova": TOVAPress,
        "snapkv": lambda ratio: SnapKVPress(ratio, window_size=WINDOW, kernel_size=KERNEL),
        "keydiff": KeyDiffPress,
        "expected_attention": lambda ratio: ExpectedAttentionPress(ratio, n_sink=SINKS, epsilon=0.02),
    }
    # Half a token more, because kvpress rounds down what its ratio leaves.
    kept = {
        name: {str(budget): prune(model, ids, make(1 - (budget + 0.5) / TOKENS), full) for budget in BUDGETS}
        for name, make in presses.items()
    }
    settings = {
        "streaming": {"sinks": SINKS},
        "snapkv": {"window": WINDOW, "kernel_size": KERNEL},
        "expected_attention": {"sinks": SINKS, "epsilon": 0.02},
    }
    path = HERE / "kvpress_kept.json"
    path.write_text(json.dumps({"ids": ids[0].tolist(), "settings": settings, "kept": kept}, indent=0) + "\n")
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()

"""Counted costs against what PyTorch counts of a real prefill."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_kvcaches.segments.report import Costs
from tests import tiny

MODELS = {
    "grouped heads": lambda: tiny.llama(),
    "one head": lambda: tiny.llama(num_key_value_heads=1, num_hidden_layers=2),
    "wide heads": lambda: tiny.llama(head_dim=16),
    "no groups": lambda: tiny.gpt2(),
}


def counted(model, tokens: int) -> tuple[float, float]:
    """Operations in the matrices of the decoder layers, and in attention."""
    head = model.get_output_embeddings().weight.numel()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tiny.ids(1, tokens), use_cache=False)
    total = counter.get_flop_counts()["Global"]
    attention = sum(number for operation, number in total.items() if "attention" in str(operation) or "bmm" in str(operation))
    return sum(total.values()) - attention - 2 * head * tokens, attention


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [1, 17, 100])
def test_a_prompt_costs_what_pytorch_counts_but_for_what_causal_attention_leaves_out(name: str, tokens: int) -> None:
    model = MODELS[name]()
    model.set_attn_implementation("eager")
    linear, attention = counted(model, tokens)
    costs = Costs.of(model)
    assert sum(costs.linear) * tokens == pytest.approx(linear)
    # PyTorch counts the whole square of scores; a token looks at those before it and itself, (tokens + 1) / 2 on the mean.
    scores = costs.of_prompt(0, tokens) - sum(costs.linear) * tokens
    assert scores == pytest.approx(attention * (tokens + 1) / (2 * tokens))
    assert costs.of_prompt(0, tokens) == pytest.approx(linear + attention, rel=0.5 * attention / (linear + attention) + 1e-9)
    assert costs.of_prompt(0, 5) + costs.of_prompt(5, 9) == costs.of_prompt(0, 9)

"""Counted costs against what PyTorch counts of a real prefill, and the seconds that a report makes of them."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_kvcaches import SegmentReuseCache, SegmentStore, WarmStartCache, WarmStartLibrary
from hf_kvcaches.reuse.costs import Costs
from tests import tiny
from tests.warmstart.warm import words

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


def first_token(model, ids: torch.Tensor, cache) -> float:
    """The seconds of a prompt and of the token behind it, as `generate` takes them."""
    began = time.perf_counter()
    with torch.no_grad():
        for tokens in (ids, ids[:, :1]):
            model(tokens, past_key_values=cache, logits_to_keep=1)
    return time.perf_counter() - began


def caches_of(kind: str, model):
    """A function that makes caches on one store."""
    if kind == "segments":
        store = SegmentStore("memory")
        return lambda: SegmentReuseCache(model, store)
    library = WarmStartLibrary(model, words())
    return lambda: WarmStartCache(model, library, remember=True)


@pytest.mark.parametrize("kind", ["segments", "warm starts"])
def test_a_hit_reports_the_time_that_computing_takes_here_less_that_of_loading(kind: str) -> None:
    model = tiny.llama(hidden_size=256, intermediate_size=512, max_position_embeddings=2048)
    make, prompt = caches_of(kind, model), tiny.ids(1, 1500)
    cold = make()
    assert cold.report().saved_seconds is None, "no prompt was computed here"
    times = [first_token(model, prompt, cold)]
    assert cold.report().saved_seconds == 0
    times.append(first_token(model, tiny.ids(1, 1500, seed=9), make()))
    hits = [make() for _ in range(3)]
    for hit in hits:
        first_token(model, prompt, hit)
        assert hit.report().reused_tokens == 1499
    saved = [hit.report().saved_seconds for hit in hits]
    # A busy machine may take long to load, but not each time; and the fastest prompt is what counts.
    assert 0.3 * min(times) < max(saved) < min(times)
    assert "saved seconds" in str(hits[0].report())
    hits[0].reset()
    assert hits[0].report().saved_seconds == 0


def test_a_prompt_that_broke_off_gives_no_pace() -> None:
    model = tiny.llama()
    cache, prompt = SegmentReuseCache(model, SegmentStore("memory")), tiny.ids(1, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model.layers[2].mlp, "forward", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            model(prompt, past_key_values=cache, logits_to_keep=1)
    cache.reset()
    first_token(model, prompt[:, :20], cache)
    assert cache.report().saved_seconds is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_the_time_is_the_devices() -> None:
    model, cache = tiny.llama().cuda(), None
    store, prompt = SegmentStore("memory"), tiny.ids(1, 200).cuda()
    for _ in range(2):
        first_token(model, prompt, cache := SegmentReuseCache(model, store))
        torch.cuda.synchronize()
    assert cache.report().saved_seconds is not None

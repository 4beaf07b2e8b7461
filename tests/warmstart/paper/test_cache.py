"""A prompt that begins with the summary of another one, and the exact prefill that replaces it."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError
from hf_kvcaches.reuse.layout import LayerStates
from hf_kvcaches.warmstart.paper.cache import ExactPrefill, SummaryCache, SummaryGate, SummaryLibrary
from hf_kvcaches.warmstart.paper.slots import Slots
from tests import tiny
from tests.helpers.warned import said
from tests.warmstart.warm import forced, logits_of, tokens_run, words

PROMPT = tiny.ids(1, 100, seed=0)
OPEN = SummaryGate(tau=-1.0, lengths=(0.0, 100.0))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama()


def library_of(model: PreTrainedModel, slots: int = 16, **options) -> SummaryLibrary:
    library = SummaryLibrary(model, words(), slots, **options)
    library.add([PROMPT[0]])
    return library


def end_of(cache: SummaryCache) -> None:
    """Wait for the exact prefill in the background, if one is running."""
    if cache._exact is not None and cache._exact.thread is not None:
        cache._exact.thread.join()


@torch.no_grad()
def behind_slots(model: PreTrainedModel, slots: Slots, ids: torch.Tensor, first: int) -> torch.Tensor:
    """The logits of tokens behind a summary, (tokens, vocabulary), head by head and key by key.

    Args:
        model: Of Llama's make.
        slots: Turned to where they stand before the tokens.
        ids: (tokens,).
        first: The position of the first of them.
    """
    decoder, config = model.model, model.config
    kept: list[list[list[tuple[torch.Tensor, torch.Tensor]]]] = [
        [[(keys[h, s], values[h, s]) for s in range(keys.shape[1])] for h in range(keys.shape[0])] for keys, values in slots.layers
    ]
    logits = []
    for place, token in enumerate(ids.tolist(), first):
        hidden = decoder.embed_tokens(torch.tensor([[token]]))
        cos, sin = decoder.rotary_emb(hidden, torch.tensor([[place]]))
        for layer, held in zip(decoder.layers, kept, strict=True):
            own, normed = layer.self_attn, layer.input_layernorm(hidden)
            query, key, value = (made(normed).view(1, 1, -1, own.head_dim).transpose(1, 2) for made in (own.q_proj, own.k_proj, own.v_proj))
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            for head, row in enumerate(held):
                row.append((key[0, head, 0], value[0, head, 0]))
            group, outputs = config.num_attention_heads // len(held), []
            for head in range(config.num_attention_heads):
                seen = held[head // group]
                scores = torch.stack([torch.exp((query[0, head, 0] @ k).double() * own.scaling) for k, _ in seen])
                outputs.append((scores[:, None] * torch.stack([v for _, v in seen]).double()).sum(0) / scores.sum())
            hidden = hidden + own.o_proj(torch.cat(outputs).float()[None, None])
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits.append(model.lm_head(decoder.norm(hidden))[0, 0])
    return torch.stack(logits)


def test_the_tail_is_computed_behind_slots_that_it_attends_to_like_tokens(model) -> None:
    library = library_of(model, tail=3)
    cache = SummaryCache(model, library, gate=OPEN)
    longer = torch.cat([tiny.ids(1, 20, seed=1), PROMPT], 1)
    with tokens_run(model) as passes:
        found = logits_of(model, longer, cache)
    assert passes == [3]
    assert cache.served
    assert cache.get_seq_length() == 120
    assert cache.report().kept[0] == 16 + 3
    moved = library.summarised(PROMPT[0].tolist()).shifted(20, library.rotation.layers)
    torch.testing.assert_close(found[0], behind_slots(model, moved, longer[0, -3:], 117)[-1:], atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        model(input_ids=PROMPT[:, :3], past_key_values=cache, logits_to_keep=1)
    assert cache.why_inexact


def test_of_more_slots_than_tokens_the_last_ones_are_taken(model) -> None:
    library = library_of(model, slots=100, tail=3)
    cache = SummaryCache(model, library, gate=OPEN)
    found = logits_of(model, PROMPT[:, -40:], cache, 3)
    assert (cache.served, cache.get_seq_length(), cache.report().kept[0]) == (True, 42, 42)
    moved = library.summarised(PROMPT[0].tolist()).shifted(-60, library.rotation.layers)
    last = Slots([LayerStates(keys[:, -37:], values[:, -37:]) for keys, values in moved.layers], moved.positions[-37:], 40)
    ids = torch.cat([PROMPT[0, -3:], found[0, :2].argmax(-1)])
    torch.testing.assert_close(found[0], behind_slots(model, last, ids, 37)[-3:], atol=1e-4, rtol=1e-4)
    cache.crop(-4)
    with pytest.raises(UnsupportedError, match="only a summary is kept"):
        cache.crop(-2)


def test_a_summary_of_all_tokens_is_the_prompt(model) -> None:
    cache = SummaryCache(model, library_of(model, slots=100))
    torch.testing.assert_close(logits_of(model, PROMPT, cache, 4), logits_of(model, PROMPT, None, 4), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
)
@pytest.mark.parametrize("swap", ["sync", "background"])
def test_behind_the_swap_logits_are_those_of_a_cold_run(swap: str, device: str) -> None:
    model = tiny.llama().to(device)
    cache = SummaryCache(model, library_of(model), gate=OPEN, swap=swap)
    logits_of(model, PROMPT.to(device), cache)
    assert (cache.served, cache.swapped, bool(cache.why_inexact)) == (True, False, True)
    asked = tiny.ids(1, 6, seed=7).to(device)
    found = forced(model, asked[:, :3], cache)
    end_of(cache)
    found = torch.cat([found, forced(model, asked[:, 3:], cache)], 1)
    with torch.no_grad():
        expected = model(torch.cat([PROMPT.to(device), asked], 1)).logits[:, -6:]
    assert (cache.swapped, cache.why_inexact) == (True, "")
    first = 0 if swap == "sync" else 3
    torch.testing.assert_close(found[:, first:], expected[:, first:], atol=1e-4, rtol=1e-4)
    assert cache.report().kept[0] == 106


def test_a_failure_in_the_background_is_said_and_the_prompt_is_run(model, monkeypatch) -> None:
    cache = SummaryCache(model, library_of(model), gate=OPEN, swap="background")
    logits_of(model, PROMPT, cache)
    real = ExactPrefill._run
    monkeypatch.setattr(ExactPrefill, "_run", lambda self, stoppable: 1 / 0)
    with said() as sentences:
        forced(model, tiny.ids(1, 1, seed=7), cache)
        cache._exact.thread.join()
        monkeypatch.setattr(ExactPrefill, "_run", real)
        forced(model, tiny.ids(1, 1, seed=8), cache)
    assert cache.swapped
    assert len(sentences) == 1
    assert "ZeroDivisionError" in sentences[0]


@pytest.mark.parametrize("swap", ["sync", "background"])
def test_a_copy_runs_the_exact_prefill_itself_also_while_that_of_the_first_cache_runs(model, swap: str, monkeypatch) -> None:
    cache, going_on, real = SummaryCache(model, library_of(model), gate=OPEN, swap=swap), threading.Event(), ExactPrefill._run
    logits_of(model, PROMPT, cache)
    monkeypatch.setattr(ExactPrefill, "_run", lambda self, **options: (going_on.wait(60), real(self, **options)))
    asked = tiny.ids(1, 6, seed=7)
    if swap == "background":
        forced(model, asked[:, :1], cache)
        assert cache._exact.thread.is_alive()
    copied = copy.deepcopy(cache)
    assert copied.library is cache.library
    going_on.set()
    expected = model(torch.cat([PROMPT, asked], 1)).logits[:, -3:]
    for each in (cache, copied):
        forced(model, asked[:, each.seen - 100 : 3], each)
        end_of(each)
        torch.testing.assert_close(forced(model, asked[:, 3:], each), expected, atol=1e-4, rtol=1e-4)
        assert each.swapped


AT_EXIT = """
import atexit, time, weakref
from hf_kvcaches.warmstart.paper import cache as paper
from tests import tiny

ran, run_span, paper.CHUNK = [], paper.run_span, 4

def slow(*args):
    ran.append(time.sleep(0.05))
    run_span(*args)

paper.run_span, model = slow, tiny.llama()
prefill = paper.ExactPrefill(weakref.ref(model), tiny.ids(1, 800))
prefill.start(model)
while not ran:
    time.sleep(0.01)
atexit.register(lambda: print(len(ran), not prefill.thread.is_alive()))
"""


def test_the_interpreter_waits_for_a_chunk_in_the_background_and_not_for_the_prompt() -> None:
    result = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120, check=True)
    chunks, done = result.stdout.split()
    assert int(chunks) < 20
    assert done == "True"
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("gate", "words_of_it"), [(SummaryGate(tau=1.01), "similarity"), (SummaryGate(tau=-1.0, lengths=(0.9, 1.1)), "times as long")]
)
def test_the_gate_refuses_and_the_prompt_runs_cold(model, gate: SummaryGate, words_of_it: str) -> None:
    cache = SummaryCache(model, library_of(model), gate=gate)
    ids = torch.cat([tiny.ids(1, 30, seed=1), PROMPT], 1)
    torch.testing.assert_close(logits_of(model, ids, cache), logits_of(model, ids), atol=1e-4, rtol=1e-4)
    assert not cache.served
    assert words_of_it in cache.reason


def test_what_can_not_work_is_refused_by_name(model) -> None:
    with pytest.raises(FingerprintMismatch, match="library"):
        SummaryCache(tiny.llama(seed=1), library_of(model))
    with pytest.raises(UnsupportedError, match="learned"):
        SummaryLibrary(tiny.gpt2(), words())
    assert SummaryLibrary(tiny.gpt2(), words(), correct_positions=True).correction is not None
    with pytest.raises(ConfigError, match="slots"):
        SummaryLibrary(model, words(), 0)

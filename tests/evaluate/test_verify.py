"""verify: lossless caches come out clean, damage is seen, and the numbers are those of a slow recomputation."""

import functools
import gc
import json
import math
import weakref
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSeq2SeqLM, BatchEncoding, DynamicCache, T5Config

import hf_kvcaches
from hf_kvcaches import ConfigError, EquipCache, UnsupportedError, verify
from hf_kvcaches.evaluate.measures import cache_bytes
from hf_kvcaches.evaluate.runner import Seconds
from hf_kvcaches.evaluate.verify import VerifyReport
from tests import tiny
from tests.conformance import models
from tests.helpers import prompts

KINDS = ("llama_mha", "llama", "mistral_sliding", "gemma2", "gpt2")
make_model, shared_model = models.build, models.tiny


@pytest.fixture
def model():
    return shared_model("llama")


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return tiny.ids(batch, length, seed=seed)


def left_padded(*rows: torch.Tensor) -> BatchEncoding:
    return BatchEncoding(dict(zip(("input_ids", "attention_mask"), prompts.left_padded(rows), strict=True)))


class FadingCache(DynamicCache):
    """Makes every value smaller: the same damage in each row, whatever its padding."""

    factor = 0.7

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return super().update(key_states, value_states * self.factor, layer_idx, *args, **kwargs)


class BrokenCache(FadingCache):
    factor = math.nan


def slow_kl(full: torch.Tensor, other: torch.Tensor) -> float:
    def shares(logits: list[float]) -> list[float]:
        top = max(logits)
        weights = [math.exp(value - top) for value in logits]
        return [weight / sum(weights) for weight in weights]

    return sum(p * math.log(p / q) for p, q in zip(shares(full.tolist()), shares(other.tolist()), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
def test_the_full_cache_against_itself_is_exact_and_writes_what_greedy_generate_does(kind, padded):
    model = shared_model(kind)
    inputs = left_padded(random_ids(1, 12), random_ids(1, 5, seed=1)) if padded else {"input_ids": random_ids(2, 12)}
    report = verify(model, lambda: DynamicCache(config=model.config), inputs, max_new_tokens=8)
    assert report.kl == (0.0,) * report.steps == (0.0,) * 8
    assert (report.mean_kl, report.max_kl, report.max_logit_error, report.agreement) == (0.0, 0.0, 0.0, 1.0)
    assert report.first_divergence is None
    assert report.bytes == report.reference_bytes > 0
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)[:, 12:]
    assert [list(row) for row in report.tokens] == expected.tolist()


def test_the_numbers_are_those_of_a_slow_recomputation(model):
    inputs = left_padded(random_ids(1, 9), random_ids(1, 6, seed=1))
    calls: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda _module, _args, output: calls.append(output.logits[:, -1].double()))
    report = verify(model, FadingCache, inputs, max_new_tokens=7)
    handle.remove()
    full, other = calls[:7], calls[7:]
    each = [[slow_kl(a[row], b[row]) for row in range(2)] for a, b in zip(full, other, strict=True)]
    same = [[bool(a[row].argmax() == b[row].argmax()) for row in range(2)] for a, b in zip(full, other, strict=True)]
    assert report.kl == pytest.approx([sum(rows) / 2 for rows in each])
    values = json.loads(json.dumps(report.as_dict()))
    assert (values["steps"], values["kl"], values["mean_kl"]) == (7, list(report.kl), report.mean_kl)
    assert values["seconds"]["prefill"] == report.seconds.prefill > 0
    assert report.mean_kl == pytest.approx(sum(map(sum, each)) / 14)
    assert report.max_kl == pytest.approx(max(map(max, each)))
    assert report.max_kl > max(report.kl)
    assert report.agreement == sum(map(sum, same)) / 14 < 1
    assert report.first_divergence == [all(rows) for rows in same].index(False)
    assert report.max_logit_error == pytest.approx(max((a - b).abs().max().item() for a, b in zip(full, other, strict=True)))


def test_not_a_number_counts_as_infinitely_wrong_also_where_the_model_gives_it(model):
    report = verify(model, BrokenCache, random_ids(1, 5), max_new_tokens=2)
    assert report.kl == (math.inf, math.inf)
    assert (report.mean_kl, report.max_kl, report.max_logit_error) == (math.inf, math.inf, math.inf)
    broken = make_model("llama_mha")
    torch.nn.init.constant_(broken.model.norm.weight, math.nan)
    assert verify(broken, DynamicCache, random_ids(1, 5), max_new_tokens=1).max_kl == math.inf


def test_tokens_without_any_chance_do_not_spoil_the_numbers():
    model = make_model("llama_mha")
    model.lm_head.register_forward_hook(lambda _module, _args, logits: logits.index_fill(-1, torch.tensor([4]), -math.inf))
    clean = verify(model, DynamicCache, random_ids(1, 5), max_new_tokens=3)
    assert (clean.max_kl, clean.max_logit_error) == (0.0, 0.0)
    damaged = verify(model, FadingCache, random_ids(1, 5), max_new_tokens=3)
    assert 0 < damaged.max_kl < math.inf
    assert 0 < damaged.max_logit_error < math.inf


def test_a_row_that_ended_is_no_longer_compared_and_the_run_ends_with_the_last():
    model = make_model("llama")
    rows = [random_ids(1, 12), random_ids(1, 5, seed=1)]
    first, second = (verify(model, FadingCache, row, max_new_tokens=8) for row in rows)
    end = next(token for token in first.tokens[0] if token not in second.tokens[0])
    stop = first.tokens[0].index(end) + 1
    model.generation_config.eos_token_id = [end]
    inputs = left_padded(*rows)
    report = verify(model, FadingCache, inputs, max_new_tokens=8)
    assert report.tokens == (first.tokens[0][:stop], second.tokens[0])
    assert report.kl[:stop] == pytest.approx([(a + b) / 2 for a, b in zip(first.kl, second.kl, strict=True)][:stop], rel=1e-4)
    assert report.kl[stop:] == pytest.approx(second.kl[stop:], rel=1e-4)
    generated = model.generate(**inputs, max_new_tokens=8, do_sample=False)[:, 12:].tolist()
    assert generated[0][:stop] == list(report.tokens[0])
    assert generated[1] == list(report.tokens[1])
    model.generation_config.eos_token_id = first.tokens[0][0]
    report = verify(model, DynamicCache, rows[0], max_new_tokens=8)
    assert (report.steps, report.tokens) == (1, (first.tokens[0][:1],))


@given(chunk=st.integers(1, 16), length=st.integers(1, 13), padding=st.integers(0, 4))
def test_the_prompt_in_pieces_of_any_size_changes_nothing(chunk, length, padding):
    model = shared_model("mistral_sliding")
    inputs = left_padded(random_ids(1, length), random_ids(1, max(1, length - padding), seed=1))
    report = verify(model, lambda: DynamicCache(config=model.config), inputs, max_new_tokens=3, prefill_chunk_size=chunk)
    assert report.max_logit_error < 1e-5
    assert report.agreement == 1.0


def test_ids_alone_and_a_mask_of_ones_are_the_same(model):
    ids = random_ids(1, 6)
    reports = [
        verify(model, FadingCache, inputs, max_new_tokens=3)
        for inputs in (ids, ids[0], ids.int(), {"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    ]
    assert len({(report.kl, report.tokens) for report in reports}) == 1


def test_a_half_precision_model_is_compared_in_full_precision():
    model = make_model("llama").to(torch.bfloat16)
    assert verify(model, DynamicCache, random_ids(2, 9), max_new_tokens=3).max_kl == 0.0
    assert 0 < verify(model, FadingCache, random_ids(2, 9), max_new_tokens=3).max_kl < math.inf


@pytest.mark.full
def test_a_compiled_model_is_run_like_the_plain_one(model):
    ids = random_ids(1, 9)
    compiled = torch.compile(model, backend="eager")
    report = verify(compiled, FadingCache, ids, max_new_tokens=3)
    assert report.tokens == verify(model, FadingCache, ids, max_new_tokens=3).tokens
    assert 0 < report.max_kl < math.inf


def test_a_peft_model_is_run_with_its_adapter():
    from peft import LoraConfig, get_peft_model

    ids = random_ids(1, 9)
    plain = verify(make_model("llama"), DynamicCache, ids, max_new_tokens=4)
    torch.manual_seed(0)
    wrapped = get_peft_model(
        make_model("llama"), LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    )
    report = verify(wrapped, DynamicCache, ids, max_new_tokens=4)
    assert report.max_kl == 0.0
    assert list(report.tokens[0]) == wrapped.generate(input_ids=ids, max_new_tokens=4, do_sample=False)[0, 9:].tolist()
    assert report.tokens != plain.tokens


def test_training_modes_and_attention_are_left_as_they_were_after_an_error_too():
    model = make_model("llama").train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]

    assert verify(model, lambda: EquipCache(model, budget=64), random_ids(1, 9), max_new_tokens=3).max_logit_error < 1e-5
    for make in (DynamicCache, lambda: "no cache"):
        with nullcontext() if make is DynamicCache else pytest.raises(ConfigError, match="make_cache"):
            verify(model, make, random_ids(1, 9), max_new_tokens=1)
        assert [module.training for module in model.modules()] == modes
        assert model.config._attn_implementation == "sdpa"


def test_the_report_keeps_no_cache_alive(model):
    seen = []

    def make_cache():
        cache = DynamicCache()
        seen.append(weakref.ref(cache))
        return cache

    report = verify(model, make_cache, random_ids(1, 5), max_new_tokens=3)
    gc.collect()
    assert seen[0]() is None
    assert report.steps == 3


def test_the_report_reads_as_a_table():
    report = VerifyReport(
        kl=(0.0, 0.5),
        max_kl=0.75,
        agreement=0.875,
        first_divergence=1,
        max_logit_error=2.0,
        tokens=((1, 2),),
        bytes=2500,
        reference_bytes=10_000_000,
        seconds=Seconds(0.5, 1.25),
        reference_seconds=Seconds(1.5, 100.0),
    )
    assert str(report).splitlines() == [
        "           full cache   cache",
        "bytes      10,000,000   2,500  0.0% of full",
        "prefill s      1.5000  0.5000",
        "decode s     100.0000  1.2500  2 steps",
        "KL(full || cache) in nats: mean 0.25, max 0.75; max logit error 2",
        "same most likely token: 87.50%; first divergence: step 1",
    ]


def test_bytes_are_what_is_allocated_and_a_cache_of_the_package_counts_its_own(model):
    cache, states = DynamicCache(config=model.config), torch.zeros(3, 2, 10, 16)
    assert cache_bytes(cache) == 0
    for layer in range(2):
        cache.update(states.clone(), states.clone(), layer)
    assert cache_bytes(cache) == 4 * states.nbytes
    cache.crop(-4)
    assert cache_bytes(cache) == 4 * states.nbytes, "a view frees nothing"
    cache.layers[0].spare = {"kept elsewhere": [cache.layers[1].keys, (torch.zeros(7, dtype=torch.int8),)]}
    assert cache_bytes(cache) == 4 * states.nbytes + 7
    own = hf_kvcaches.GrowingCache(model)
    report = verify(model, lambda: own, random_ids(2, 9), max_new_tokens=4)
    assert report.bytes == own.report().bytes > 0
    assert report.max_logit_error < 1e-4


BAD_CALLS = {
    "model": {"model": object()},
    "a cache instead of its maker": {"make_cache": DynamicCache()},
    "make_cache gives something else": {"make_cache": dict},
    "no new tokens": {"max_new_tokens": 0},
    "a share of new tokens": {"max_new_tokens": 2.0},
    "true new tokens": {"max_new_tokens": True},
    "chunks of nothing": {"prefill_chunk_size": 0},
    "no tokens": {"inputs": torch.zeros(1, 0, dtype=torch.long)},
    "no rows": {"inputs": torch.zeros(0, 4, dtype=torch.long)},
    "a list": {"inputs": [[1, 2, 3]]},
    "a text": {"inputs": "once upon a time"},
    "floats": {"inputs": torch.ones(1, 4)},
    "three dimensions": {"inputs": torch.ones(1, 1, 4, dtype=torch.long)},
    "no ids in the mapping": {"inputs": {"attention_mask": torch.ones(1, 4)}},
    "an unknown input": {"inputs": {"input_ids": torch.ones(1, 4, dtype=torch.long), "token_type_ids": torch.ones(1, 4)}},
    "a mask of another shape": {"inputs": {"input_ids": torch.ones(1, 4, dtype=torch.long), "attention_mask": torch.ones(1, 5)}},
    "a mask that is a list": {"inputs": {"input_ids": torch.ones(1, 4, dtype=torch.long), "attention_mask": [[1, 1, 1, 1]]}},
    "padding on the right": {"inputs": {"input_ids": torch.ones(1, 4, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 1, 0]])}},
    "an additive mask": {"inputs": {"input_ids": torch.ones(1, 4, dtype=torch.long), "attention_mask": torch.tensor([[-9, 1, 1, 1]])}},
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_wrong_argument_is_named(model, case):
    good = {"model": model, "make_cache": DynamicCache, "inputs": random_ids(1, 5), "max_new_tokens": 2}
    name = next(iter(BAD_CALLS[case]))
    with pytest.raises(ConfigError, match="attention_mask" if "mask" in case or "padding" in case else name):
        verify(**{**good, **BAD_CALLS[case]})


def test_a_cache_that_already_holds_tokens_is_refused(model):
    used = DynamicCache(config=model.config)
    model(input_ids=random_ids(1, 4), past_key_values=used)
    with pytest.raises(ConfigError, match="4 tokens"):
        verify(model, lambda: used, random_ids(1, 5), max_new_tokens=2)


def test_encoder_decoders_and_learned_prompts_are_refused():
    from peft import PromptTuningConfig, get_peft_model

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        verify(AutoModelForSeq2SeqLM.from_config(T5Config(**sizes, decoder_start_token_id=0)), DynamicCache, random_ids(1, 5))
    wrapped = get_peft_model(make_model("llama"), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedError, match="learned prompt"):
        verify(wrapped, DynamicCache, random_ids(1, 5))


def test_a_loop_without_positions_is_one_in_which_nobody_passes_any(model):
    ids = random_ids(2, 12, seed=3)
    mask, calls = prompts.mask_of(12, 5, 0), []
    handle = model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    inputs = {"input_ids": ids, "attention_mask": mask}
    make = functools.partial(DynamicCache, config=model.config)
    reports = [verify(model, make, inputs, max_new_tokens=4, position_ids=given) for given in (True, False)]
    handle.remove()
    assert ["position_ids" in kwargs for kwargs in calls] == [True] * 8 + [False] * 8
    assert [report.max_logit_error for report in reports] == [0.0, 0.0]


def test_a_cache_that_counts_without_padding_shows_where_the_model_counts_with_it():
    class Counting(hf_kvcaches.GrowingCache):
        """Says that it has seen only real tokens, and so moves what follows."""

        def get_seq_length(self, layer_idx=0):
            seen = super().get_seq_length(layer_idx)
            return max(0, seen - 5)

    model = make_model("gpt2")
    ids = random_ids(2, 12, seed=3)
    errors = [verify(model, lambda: Counting(model), ids, 4, position_ids=given).max_logit_error for given in (True, False)]
    assert errors[0] < 1e-4
    assert errors[1] > 1e-2

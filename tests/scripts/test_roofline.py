"""The counts of the roofline against its formulas, against transformers' own cache, and as a user sees them."""

from __future__ import annotations

import pytest
from transformers import DeepseekV3Config, DynamicCache, Gemma2Config, GPT2Config, LlamaConfig, MambaConfig

from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import tiny
from tests.scripts.running import import_script, run_script

script = import_script("roofline")
Work, Plan = script.Work, script.Plan


@pytest.mark.parametrize("make", [tiny.llama, tiny.gpt2])
def test_the_baseline_keeps_what_transformers_own_cache_keeps(make) -> None:
    model = make()
    cache = DynamicCache(config=model.config)
    model(tiny.ids(1, 21), past_key_values=cache)
    kept = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    baseline, _ = script.roofline(model, Plan((2, 2), 21, recent=4, dtype_bytes=4))
    assert baseline.memory == baseline.bytes == kept > 0


def test_the_parts_of_a_layer_follow_the_formulas() -> None:
    # 4 query heads and 2 key heads of 8, all of which is rotated; 100 tokens, 90 of them compressed to ranks of 3 and 5.
    plan = Plan((3, 5), 100, sinks=2, recent=8)
    stored, bases = 2 * 90 * (3 + 5) * 2, 2 * (3 + 5) * 8 * 2
    assert script.layer_parts(4, 2, 8, 8, plan) == {
        "exact": Work(4 * 4 * 10 * 8, 2 * 2 * 10 * 8 * 2, 2 * 2 * 10 * 8 * 2),
        "coefficients": Work(2 * 4 * 90 * (8 + 5), stored, stored),
        "bases": Work(2 * 4 * 5 * 8 + 2 * 2 * (3 + 5) * 8, bases, bases),
        "rebuilding": Work(2 * (2 * 90 * 3 * 8 + 3 * 91 * 8), 90 * 8 * 2, 0),
    }
    post = script.layer_parts(4, 2, 8, 8, plan._replace(aware=False, int8=True))
    assert post["coefficients"] == Work(2 * 4 * 90 * (3 + 5), *[2 * 90 * (3 + 5 + 4 * 2)] * 2)
    assert post["bases"].flops == 2 * (4 + 2) * (3 + 5) * 8
    assert "rebuilding" not in post


def test_keys_that_are_not_rotated_need_no_rebuilding() -> None:
    config = GPT2Config(n_embd=32, n_head=4, n_layer=2)
    aware, post = (script.roofline(config, Plan((4, 4), 300, aware=aware)) for aware in (True, False))
    assert aware == post
    assert aware[1]["rebuilding"] == Work()


def test_layers_with_a_window_are_not_counted() -> None:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32}
    found = script.roofline(Gemma2Config(**shape, num_hidden_layers=4, sliding_window=16), Plan((4, 4), 200))
    assert found == script.roofline(LlamaConfig(**shape, num_hidden_layers=2), Plan((4, 4), 200))


def test_it_prints_a_table_for_the_model_that_is_named() -> None:
    done = run_script("roofline", "--rank", "16", "32", "--flops", "1e14", "--bandwidth", "1e12")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:9]] == [*("baseline", "exact", "coefficients", "bases", "rebuilding", "subspace", "times")]
    assert lines[2].split()[1:] == [f"{2 * 4 * 4 * 4096 * 128 / 1e6:.3f}", *[f"{4 * 2 * 4096 * 128 * 2 / 1e6:.3f}"] * 2]
    assert lines[-1].endswith("times faster")


def test_ranks_that_a_head_has_no_room_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank: expected at most 128"):
        script.roofline(LlamaConfig(), Plan((4, 129), 100))


@pytest.mark.parametrize("config", [DeepseekV3Config, MambaConfig])
def test_models_without_keys_and_values_of_the_usual_kind_are_refused(config) -> None:
    with pytest.raises(UnsupportedError, match=config.model_type):
        script.roofline(config(), Plan((8, 8), 100))

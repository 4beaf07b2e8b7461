"""A calibrated policy keeps its bound, on measurements that plain computations confirm."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import SegmentPolicy, SegmentReuseCache, SegmentStore
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError
from hf_kvcaches.reuse.layout import label_of
from hf_kvcaches.segments.calibration import Answered, best_row, calibrate, measured, next_tokens
from tests import tiny
from tests.segments.test_coded import codec_of

PARTS = [tiny.ids(1, length, seed=seed)[0].tolist() for seed, length in enumerate((30, 41, 28, 17, 35))]
ORDERS = ((0, 1, 3), (2, 1, 3), (4, 0, 1, 3), (1, 2, 0, 3))
PROMPTS = [[token for part in order for token in PARTS[part]] for order in ORDERS]
OPTIONS = {"asked": 4, "progress": False, "quantization": None}


@pytest.fixture(scope="module")
def model():
    return tiny.llama()


@pytest.fixture(scope="module")
def policy(model) -> SegmentPolicy:
    return calibrate(model, None, PROMPTS, bound=0.5, **OPTIONS)


def chosen(policy: SegmentPolicy) -> dict:
    (row,) = [row for row in policy.measured if row["chosen"]]
    return row


def test_the_chosen_setting_keeps_the_bound_and_is_the_policy(policy):
    row = chosen(policy)
    assert row["kl"] <= policy.bound == 0.5
    assert all(row[name] == getattr(policy, name) for name in ("similarity", "repair", "repair_depth", "guard"))
    most = max(each["saved"] for each in policy.measured if each["kl"] <= 0.5)
    assert row["saved"] >= most - 0.05


def test_what_is_measured_comes_out_again_when_the_policy_is_used(model, policy):
    """Each prompt after the other through a store, against a full cache that is fed token by token."""
    kls, saved = [], []
    store = SegmentStore("memory", quantization=None)
    for ids in PROMPTS:
        prompt, asked = torch.tensor([ids[:-4]]), torch.tensor([ids[-4:]])
        cache, full = SegmentReuseCache(model, store, policy=policy), DynamicCache(config=model.config)
        with torch.no_grad():
            found = [model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits]
            expected = [model(input_ids=prompt, past_key_values=full).logits[:, -1:]]
            for token in asked[:, :-1].split(1, 1):
                found.append(model(input_ids=token, past_key_values=cache).logits)
                expected.append(model(input_ids=token, past_key_values=full).logits)
        p, q = (torch.cat(logits, 1)[0].double().softmax(-1) for logits in (expected, found))
        if any(span.tier in ("guarded", "repaired") for span in cache.report().spans):
            kls.append(float((p * (p / q).log()).sum(-1).mean()))
        saved.append(cache.report().flops_saved)
        del cache
        store.flush()
    store.close()
    assert kls
    assert chosen(policy)["kl"] == pytest.approx(sum(kls) / len(kls), abs=1e-4)
    assert chosen(policy)["saved"] == pytest.approx(sum(saved) / len(saved), abs=1e-6)


def test_a_policy_for_a_store_of_codes_is_measured_with_codes(model, policy):
    codec, exact = codec_of(model).at(0.25), policy
    policy = calibrate(model, None, PROMPTS, bound=0.5, **OPTIONS | {"quantization": codec})
    assert chosen(policy)["quantization"] == label_of(codec)
    assert {row["quantization"] for row in policy.measured} == {label_of(codec)}
    assert policy.measured[1]["kl"] != exact.measured[1]["kl"], "the second setting is the same in both"
    with pytest.raises(FingerprintMismatch, match="KVCodec"):
        calibrate(tiny.llama(seed=1), None, PROMPTS, **OPTIONS | {"quantization": codec})


def test_a_bound_of_nothing_lets_nothing_in_but_what_is_exact(model):
    row = chosen(calibrate(model, None, PROMPTS, bound=0.0, **OPTIONS))
    assert row["kl"] == 0.0
    assert row["saved"] < 0.2


def answered(kl: float, saved: float = 0.5, approximate: int = 10, **others) -> Answered:
    return Answered(**{"kl": kl, "same": 1.0, "saved": saved, "approximate": approximate, **others})


def row_of(*answers: Answered, **policy) -> dict:
    return measured(SegmentPolicy(**{"similarity": 1.01, **policy}), None, answers)


def test_prompts_without_anything_approximate_do_not_water_the_measurements_down():
    row = row_of(answered(0.3, same=0.5), *[answered(0.0, 0.0, 0)] * 9)
    assert (row["kl"], row["same"]) == pytest.approx((0.3, 0.5))
    untouched = row_of(answered(0.0, approximate=0))
    assert (untouched["kl"], untouched["same"]) == (0.0, 1.0)


def test_the_best_keeps_the_bounds_and_is_the_strictest_of_those_that_save_as_much():
    loose, strict = row_of(answered(0.02, 0.64, same=0.9), similarity=0.3), row_of(answered(0.02, 0.6, same=0.8), similarity=0.8)
    rows = [row_of(answered(0.0, 0.1)), row_of(answered(0.06, 0.8), similarity=0.0), loose, strict]
    assert best_row(rows, 0.05) is strict
    assert best_row([*rows, row_of(answered(0.02, 0.66), similarity=0.2)], 0.05) is loose, "the strict one saves too little"
    assert best_row(rows, 0.05, same=0.85) is loose
    assert best_row(rows, 0.01) is rows[0]
    uneven = row_of(*[answered(0.0, 0.6)] * 9, answered(0.2, 0.6), similarity=0.3)
    assert best_row([rows[0], uneven], 0.05) is uneven
    assert best_row([rows[0], uneven], 0.05, worst=0.1) is rows[0]


def test_the_policy_says_how_often_the_next_token_is_that_of_the_model_alone(model, policy):
    strict = calibrate(model, None, PROMPTS, bound=100.0, least_same=1.0, **OPTIONS)
    assert chosen(strict)["same"] == 1.0
    assert any(row["same"] < 1 for row in strict.measured)
    assert all(0 <= row["same"] <= 1 and row["same"] * 4 * len(PROMPTS) < 17 for row in policy.measured)
    assert "same" in policy.describe_calibration()


def test_a_policy_is_saved_with_its_measurements_and_refused_for_another_model(model, policy, tmp_path):
    policy.save_pretrained(tmp_path)
    loaded = SegmentPolicy.from_pretrained(tmp_path, model=model)
    assert loaded == policy
    assert "at most 0.5 nats" in (tmp_path / "README.md").read_text()
    with pytest.raises(FingerprintMismatch):
        SegmentPolicy.from_pretrained(tmp_path, model=tiny.llama(seed=1))


def test_models_whose_keys_cannot_be_moved_are_refused():
    with pytest.raises(UnsupportedError):
        calibrate(tiny.gpt2(), None, PROMPTS, **OPTIONS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bound": -1.0}, "bound: expected a number of at least 0"),
        ({"least_same": 1.5}, "least_same: expected a number of at least 0, up to 1"),
        ({"asked": 0}, "asked: expected an integer of at least 1"),
        ({"asked": 500}, "prompts: expected at least 502 tokens in each"),
        ({"quantization": "int2"}, "quantization: expected"),
        ({"prompts": PROMPTS[:1]}, "prompts: expected at least two"),
        ({"prompts": {"a": PROMPTS, "b": PROMPTS}}, "prompts: expected at least two rows"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_run(model, changes, message):
    arguments = {**OPTIONS, "prompts": PROMPTS, **changes}
    with pytest.raises(ConfigError, match=message):
        calibrate(model, None, arguments.pop("prompts"), **arguments)


@pytest.mark.parametrize("asked", [1, 5])
def test_asked_tokens_get_the_logits_of_one_pass_over_everything(model, asked):
    ids = PROMPTS[0]
    store = SegmentStore("memory", quantization=None)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -asked - 1 : -1]
    for cache in (None, SegmentReuseCache(model, store, mode="auto"), SegmentReuseCache(model, store, mode="auto")):
        store.flush()
        torch.testing.assert_close(next_tokens(model, ids[:-asked], ids[-asked:], cache), expected, atol=1e-4, rtol=1e-4)
    assert cache.report().reused_tokens == len(ids) - asked - 1
    store.close()

"""Codes between SmolLM2 and its fine-tune on verse lose less than the producer's raw keys and values do, in a fraction of the bytes."""

from __future__ import annotations

import pytest

from tests.real.pair import CONSUMER, MODELS, RealPair

NEEDLES, PROMPTS = 8, 6


@pytest.fixture(scope="module")
def pair() -> RealPair:
    if not (MODELS / CONSUMER).is_dir():
        pytest.skip(f"{MODELS / CONSUMER} is missing: `python scripts/tune_smollm2.py` makes it in ten minutes")
    return RealPair()


@pytest.fixture(scope="module")
def raw(pair):
    return pair.measure(pair.prompts(PROMPTS), pair.read_by(pair.producer))


# Shares of the bytes, layers that the consumer runs, and of what raw keys and values diverge by.
@pytest.mark.parametrize(("payload", "lowest", "share"), [(0.125, 0, 0.5), (0.07, 0, 1.0), (0.07, 1, 0.5)])
def test_divergence_behind_codes_is_a_share_of_that_behind_raw_keys_and_values(pair, raw, payload, lowest, share):
    found = pair.measure(pair.prompts(PROMPTS), pair.translated(pair.translator(payload, lowest)))
    assert found["kl"] <= share * raw["kl"]
    assert found["loss"] <= raw["kl"]


def test_needles_are_recalled_as_behind_the_consumers_own_prefill(pair):
    own = pair.needles(pair.read_by(pair.consumer), NEEDLES)
    assert pair.needles(pair.translated(pair.translator(0.125)), NEEDLES) >= own - 1

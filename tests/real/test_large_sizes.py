"""What shows only with a large vocabulary, or where prompts are longer than a model's windows."""

from __future__ import annotations

import copy
import time

import pytest

from hf_kvcaches import EquipCache, SubspaceCache
from hf_kvcaches.core.fingerprint import digest_of_tokenizer
from tests import testbed
from tests.costs import seconds
from tests.real.exactness import CACHES, encode, write

PROSE = testbed.held_out()
gemma = pytest.mark.parametrize("real", ["gemma3"], indirect=True)


def test_a_large_vocabulary_is_read_in_a_fraction_of_a_second(real):
    """As the first cache of a segment store or a warm-start library has to: .2 s on an idle core, 4 s entry by entry."""
    unread = copy.deepcopy(real.tokenizer)
    assert seconds(lambda: digest_of_tokenizer(unread), times=1, clock=time.process_time) <= 1.2


@gemma
@pytest.mark.parametrize("name", ["growing", "segments", "warmstart"])
def test_layers_with_a_window_hold_little_more_than_the_window(real, name):
    window, inputs, cache = real.model.config.sliding_window, encode(real, [PROSE[:3200]]), CACHES[name](real)()
    assert inputs["input_ids"].shape[1] > 1.25 * window
    write(real, inputs, cache, max_new_tokens=2)
    kept = [slots for slots, kind in zip(cache.report().kept, real.model.config.layer_types, strict=True) if kind == "sliding_attention"]
    assert max(kept) <= window + 64  # which are cut at once every 64 tokens


@gemma
@pytest.mark.parametrize("kind", ["equip", "subspace"])
def test_a_report_says_how_many_layers_are_left_to_the_windows_of_the_model(real, kind):
    cache = EquipCache(real.model, budget=64) if kind == "equip" else SubspaceCache(real.model, real.lossless_codec)
    write(real, encode(real, [PROSE[:300]]), cache, max_new_tokens=1)
    assert "3 of 18" in str(cache.report())

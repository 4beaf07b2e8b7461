"""What `compat.py` does for the oldest supported transformers alone: an entry that this version no longer needs is to go.

Run by `make test-floor`; on newer versions there is nothing to say.
"""

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_kvcaches import compat
from hf_kvcaches.version import OLDEST_TESTED

pytestmark = pytest.mark.skipif(transformers.__version__ != OLDEST_TESTED, reason="not the oldest supported transformers")


def test_generate_calls_its_cache_past_key_values() -> None:
    assert compat.GENERATE_CACHE == "past_key_values"


def test_layers_of_transformers_keep_their_length_when_they_are_reset() -> None:
    layer, states = DynamicSlidingWindowLayer(sliding_window=4), torch.ones(1, 1, 6, 4)
    layer.update(states, states)
    layer.reset()
    assert layer.keys is not None

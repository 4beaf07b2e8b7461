"""Rows of a cache are picked by lists, tensors and slices alike, and what can't be picked changes nothing."""

import pytest
import torch

from hf_kvcaches.core.layers import row_picker
from tests import tiny
from tests.helpers.caches import small

MAKERS = small("growing", "equip", "equip, scores", "subspace", "segments")


@pytest.mark.parametrize("indices", [[0, 2], (0, 2), [True, False, True], slice(0, 3, 2), torch.tensor([True, False, True])], ids=str)
def test_rows_are_picked_by_numbers_booleans_and_slices(indices):
    assert row_picker(indices)(torch.arange(3)).tolist() == [0, 2]


@pytest.mark.parametrize("indices", [[3], [0, -4], [True, False], 0, 1.5, [0.0], [], "0", None, [[0]], torch.tensor(1)], ids=str)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_are_no_rows_is_refused_before_anything_is_changed(make, indices):
    model = tiny.gemma2()
    cache = make(model)
    with torch.no_grad():
        model(tiny.ids(3, 12), past_key_values=cache)
    before = {name: tensor.clone() for name, tensor in cache.owned_tensors().items()}
    with pytest.raises((ValueError, IndexError)):
        cache.batch_select_indices(indices)
    held = cache.owned_tensors()
    assert held.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())

"""Rows of a cache are picked by lists, tensors and slices alike, and what can't be picked changes nothing."""

import pytest
import torch

from tests import tiny
from tests.helpers.caches import small

MAKERS = small("growing", "equip", "equip, scores", "subspace", "segments")


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture(scope="module", params=[tiny.llama, tiny.gemma2], ids=["llama", "hybrid"])
def model(request):
    model = request.param()
    model.generation_config.eos_token_id = None
    return model


def answer(model, prompt, cache):
    return model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False, pad_token_id=0)


def same(one, other) -> bool:
    tensors = other.owned_tensors()
    return one.owned_tensors().keys() == tensors.keys() and all(torch.equal(t, tensors[name]) for name, t in one.owned_tensors().items())


PICKED = [[2, 0], (2, 0), [True, False, True], slice(0, 3, 2), torch.tensor([True, False, True])]


@pytest.mark.parametrize("indices", PICKED, ids=str)
def test_picked_rows_go_on(model, make, indices):
    cache, expected, prompt = make(model), make(model), tiny.ids(3, 12)
    text = answer(model, prompt, cache)
    answer(model, prompt, expected)
    rows = torch.tensor([2, 0]) if 2 in (indices if isinstance(indices, list | tuple) else ()) else torch.tensor([0, 2])
    cache.batch_select_indices(indices)
    expected.batch_select_indices(rows)
    assert same(cache, expected)
    longer = torch.cat([text[rows], tiny.ids(2, 3, seed=2)], 1)
    assert torch.equal(answer(model, longer, cache), answer(model, longer, expected))


@pytest.mark.parametrize("indices", [[3], [0, -4], [True, False], 0, 1.5, [0.0], [], "0", None, [[0]], torch.tensor(1)], ids=str)
def test_what_are_no_rows_is_refused_before_anything_is_changed(model, make, indices):
    cache, untouched, prompt = make(model), make(model), tiny.ids(3, 12)
    text = answer(model, prompt, cache)
    answer(model, prompt, untouched)
    with pytest.raises((ValueError, IndexError)):
        cache.batch_select_indices(indices)
    assert same(cache, untouched)
    longer = torch.cat([text, tiny.ids(3, 3, seed=2)], 1)
    assert torch.equal(answer(model, longer, cache), answer(model, longer, untouched))

"""The layer contract: nothing is inherited silently, and no tensor is forgotten."""

import pytest
import torch

from hf_kvcaches.core.layers import GrowingLayer, KVLayer, TensorLayer, row_picker
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError
from tests import tiny
from tests.helpers.caches import small


class BareLayer(KVLayer):
    """As little as a layer can be."""

    @property
    def kept(self):
        return 0

    def owned_tensors(self):
        return {}

    def lazy_initialization(self, key_states, value_states):
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        self.seen += key_states.shape[-2]
        return key_states, value_states


def test_every_mutator_of_the_bare_contract_is_refused():
    layer, rows = BareLayer(), torch.tensor([0])
    layer.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
    calls = {"crop": (-1,), "reorder_cache": (rows,), "batch_select_indices": (rows,), "batch_repeat_interleave": (2,)}
    calls |= dict.fromkeys(("reset", "offload", "prefetch", "activate_past_recording", "export_state"), ()) | {"import_state": ({}, {})}
    for name, arguments in calls.items():
        with pytest.raises(UnsupportedError, match="BareLayer"):
            getattr(layer, name)(*arguments)
    assert layer.seen == 3


def test_no_public_method_of_transformers_layers_is_left_to_inheritance():
    from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

    methods = {
        name
        for cls in (CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer)
        for name, value in vars(cls).items()
        if callable(value) and not name.startswith("_")
    }
    ours = {name for cls in (KVLayer, GrowingLayer, TensorLayer) for name in vars(cls)}
    renamed = {"get_max_cache_shape"}  # the older name of get_max_length, which calls it
    assert methods - ours - renamed == set()


class PositionLayer(TensorLayer):
    row_tensors = ("keys", "values", "positions")
    counters = ("seen", "oldest")

    def __init__(self):
        super().__init__()
        self.oldest = 0

    @property
    def kept(self):
        return 0 if self.positions is None else self.positions.shape[1]

    def update(self, key_states, value_states, *args, **kwargs):
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states, value_states
        self.positions = torch.arange(key_states.shape[-2]).expand(key_states.shape[0], -1).contiguous()
        self.seen += key_states.shape[-2]
        return key_states, value_states


@pytest.fixture
def filled() -> PositionLayer:
    layer = PositionLayer()
    rows = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 4, 2).contiguous()
    layer.update(rows, -rows)
    layer.positions += 10 * torch.arange(3).view(3, 1)
    return layer


def test_no_operation_leaves_an_undeclared_tensor_behind(filled):
    filled.scores = torch.zeros(3)
    moves = {
        "reorder_cache": (torch.tensor([0]),),
        "batch_repeat_interleave": (2,),
        "offload": (),
        "export_state": (),
        "__deepcopy__": ({},),
    }
    for name, arguments in moves.items():
        with pytest.raises(TypeError, match="scores"):
            getattr(filled, name)(*arguments)


def test_row_operations_move_every_tensor(filled):
    filled.reorder_cache(torch.tensor([2, 0, 0]))
    assert filled.keys[:, 0, 0, 0].tolist() == [2, 0, 0]
    assert filled.positions[:, 0].tolist() == [20, 0, 0]
    filled.batch_repeat_interleave(2)
    assert filled.values[:, 0, 0, 0].tolist() == [-2, -2, 0, 0, 0, 0]
    filled.batch_select_indices(torch.tensor([1, 5]))
    assert filled.positions[:, 0].tolist() == [20, 0]
    filled.batch_select_indices(torch.tensor([False, True]))
    assert filled.keys[:, 0, 0, 0].tolist() == [0]


@pytest.mark.parametrize(
    ("tensors", "values"),
    [({"scores": torch.ones(1)}, {"seen": 1, "oldest": 0}), ({}, {"seen": 1}), ({}, {"seen": 1, "oldest": 0, "more": 1})],
)
def test_foreign_state_is_refused(tensors, values):
    with pytest.raises(ArtifactError, match="PositionLayer"):
        PositionLayer().import_state(tensors, values)


def test_growing_appends_like_concatenation_and_never_shows_the_reserve():
    layer, reference = GrowingLayer(), None
    generator = torch.Generator().manual_seed(0)
    for tokens in (5, 1, 1, 200, 1, 63, 1, 1):
        keys = torch.randn(2, 3, tokens, 4, generator=generator)
        reference = keys if reference is None else torch.cat([reference, keys], dim=2)
        got, _ = layer.update(keys, keys + 1)
        assert torch.equal(got, reference)
        # What lies behind the counted slots must never be read.
        layer.key_buffer[:, :, layer.seen :] = float("nan")
        layer.value_buffer[:, :, layer.seen :] = float("nan")
        assert torch.equal(layer.keys, reference)
        assert torch.equal(layer.values, reference + 1)


@torch.no_grad()
def test_growing_allocates_seldom():
    layer, blocks = GrowingLayer(), set()
    for _ in range(4000):
        layer.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
        blocks.add(layer.key_buffer.shape[2])
    assert len(blocks) < 45
    assert layer.key_buffer.shape[2] <= 4000 * 1.25


def test_crop_forgets_exactly_the_last_tokens():
    layer = GrowingLayer()
    keys = torch.randn(1, 2, 9, 4)
    layer.update(keys, keys)
    layer.crop(torch.tensor(-3))
    assert layer.seen == 6
    new = torch.randn(1, 2, 2, 4)
    got, _ = layer.update(new, new)
    assert torch.equal(got, torch.cat([keys[:, :, :6], new], dim=2))


@pytest.mark.parametrize("amount", [1, -10])
def test_cropping_more_than_there_is_is_refused_and_loses_nothing(amount):
    layer = GrowingLayer()
    layer.update(torch.zeros(1, 1, 9, 1), torch.zeros(1, 1, 9, 1))
    with pytest.raises(ConfigError, match="tokens_to_remove"):
        layer.crop(amount)
    assert layer.seen == 9


@pytest.mark.parametrize("new", [torch.zeros(2, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)])
def test_other_rows_or_another_dtype_are_refused_and_lose_nothing(new):
    layer = GrowingLayer()
    layer.update(torch.ones(1, 1, 9, 1), torch.ones(1, 1, 9, 1))
    with pytest.raises(ConfigError, match="rows"):
        layer.update(new, new)
    assert layer.seen == 9
    assert layer.keys[:, :, :9].all()


# Rows of a cache

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

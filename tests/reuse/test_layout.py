"""What is stored of a segment comes back: exactly where nothing is quantised, and as `quantize` gives it back elsewhere."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.splice import splice
from hf_kvcaches.reuse import layout
from hf_kvcaches.reuse.layout import LayerStates
from tests.kernels.cases import restored

BITS = {"int8": 8, "int4": 4}
WAYS = [None, "int8", "int4"]
# (kv_heads, keys' head_dim, values' head_dim) of each layer.
PLANS = {
    "alike": [(2, 8, 8)] * 3,
    "other heads": [(2, 8, 8), (1, 8, 8), (2, 8, 8), (4, 8, 8)],
    "other values": [(2, 12, 8), (2, 12, 8)],
    "groups": [(2, 64, 40)],
    "odd": [(1, 33, 31), (1, 7, 5), (1, 33, 31)],
    "one group": [(1, 32, 32)],
}
every_way = pytest.mark.parametrize("way", WAYS)
every_plan = pytest.mark.parametrize("plan", PLANS)


def states(plan: list[tuple[int, int, int]], tokens: int = 6, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[LayerStates]:
    torch.manual_seed(seed)
    return [LayerStates(*(torch.randn(heads, tokens, dim).mul(3).add(5).to(dtype) for dim in dims)) for heads, *dims in plan]


def unpacked(packed: Packed, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers, (layers, heads, tokens, dim), as the slow splice writes them."""
    layers, heads, tokens, _ = packed.data.shape
    outs = list(torch.full((layers, heads, tokens, dim), math.nan, dtype=dtype))
    splice(packed, outs, torch.arange(tokens))
    return torch.stack(outs)


def expected(x: torch.Tensor, way: str | None) -> torch.Tensor:
    """Each layer by itself."""
    return x if way is None else restored(x, BITS[way], 32 if way == "int4" else None)


def assert_same(got: torch.Tensor, want: torch.Tensor, way: str | None) -> None:
    if way is None:
        assert torch.equal(got, want)
    else:
        # The same levels; only the order of the roundings is another.
        step = torch.finfo(want.dtype).eps
        torch.testing.assert_close(got, want, rtol=2 * step, atol=16 * max(step / 4, torch.finfo(torch.float32).eps))


def parts_of(tensors, form, start: int, stop: int):
    """For each layer, its keys and values as `parts` gives them."""
    for number, members in enumerate(form["piles"]):
        (pair,) = layout.parts([layout.BlobSpan(tensors, form, start, stop)], number, slice(0, len(members)), None)
        yield members, pair


def read(layers: list[LayerStates], tensors, form, start: int, stop: int, way: str | None) -> None:
    """Every layer is in one pile, with its tokens."""
    left = set(range(len(layers)))
    for members, pair in parts_of(tensors, form, start, stop):
        for packed, name in zip(pair, ("keys", "values"), strict=True):
            wanted = [getattr(layers[index], name) for index in members]
            got = unpacked(packed, wanted[0].shape[-1], wanted[0].dtype)
            for mine, own in zip(got, wanted, strict=True):
                assert_same(mine, expected(own, way)[:, start:stop], way)
        left -= set(members)
    assert not left


@given(
    data=st.data(),
    way=st.sampled_from(WAYS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    tokens=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_tokens_come_back(data: st.DataObject, way: str | None, dtype: torch.dtype, tokens: int, seed: int) -> None:
    shapes = [(1, 4, 4), (2, 4, 4), (1, 4, 6), (1, 40, 4)]
    plan = data.draw(st.sampled_from(list(PLANS.values())) | st.lists(st.sampled_from(shapes), min_size=1, max_size=5))
    layers = states(plan, tokens, seed=seed, dtype=dtype)
    tensors, stored = layout.encode(layers, way)
    assert layout.states_of(stored, len(layers))[0] == dtype
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    read(layers, tensors, json.loads(json.dumps(stored)), start, stop, way)


@every_plan
def test_what_is_not_quantised_is_exact_to_the_bit(plan: str) -> None:
    layers = states(PLANS[plan], dtype=torch.bfloat16)
    layers[0].keys.view(-1)[0] = -0.0
    tensors, stored = layout.encode(layers, None)
    for members, pair in parts_of(tensors, stored, 0, 6):
        for packed, name in zip(pair, ("keys", "values"), strict=True):
            own = torch.stack([getattr(layers[index], name) for index in members])
            assert torch.equal(packed.data.view(torch.int16), own.view(torch.int16))


def test_what_is_stored_stays_as_it_is_when_the_cache_goes_on() -> None:
    layers = states(PLANS["alike"])
    before = [layer.keys.clone() for layer in layers]
    tensors, _ = layout.encode(layers, None)
    for layer in layers:
        layer.keys.zero_()
    assert torch.equal(tensors["keys.0"], torch.stack(before))


# Refused


@every_way
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_what_is_not_finite_is_refused(way: str | None, bad: float, where: str) -> None:
    layers = states(PLANS["other heads"])
    getattr(layers[2], where).view(-1)[7] = bad
    with pytest.raises(ConfigError, match="finite"):
        layout.encode(layers, way)


@pytest.mark.parametrize("value", ["int2", 8, "", True, torch.int8])
def test_other_ways_to_store_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^quantization: expected"):
        layout.check_quantization(value)
    assert [layout.check_quantization(way) for way in WAYS] == WAYS

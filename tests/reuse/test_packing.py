"""What is stored of a segment comes back: exactly where nothing is quantised, and as `quantize` gives it back elsewhere."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.reuse import layout
from hf_kvcaches.reuse.layout import LayerStates
from tests.kernels.cases import restored
from tests.kernels.reference_splice import splice

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


def read(layers: list[LayerStates], tensors, stored, start: int, stop: int, below: int | None, way: str | None) -> None:
    """Every layer is in one pile, with its tokens."""
    left = set(range(len(layers) if below is None else min(below, len(layers))))
    for pile in layout.piles([layout.BlobSpan(tensors, stored, start, stop)], below):
        for packed, name in ((pile.keys, "keys"), (pile.values, "values")):
            wanted = [getattr(layers[index], name) for index in pile.layers]
            got = unpacked(packed, wanted[0].shape[-1], wanted[0].dtype)
            for mine, own in zip(got, wanted, strict=True):
                assert_same(mine, expected(own, way)[:, start:stop], way)
        assert left >= set(pile.layers)
        left -= set(pile.layers)
    assert not left


@every_way
@every_plan
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_layers_come_back(way: str | None, plan: str, dtype: torch.dtype) -> None:
    layers = states(PLANS[plan], dtype=dtype)
    tensors, stored = layout.encode(layers, {}, way)
    assert layout.dtype_of(stored) == dtype
    read(layers, tensors, json.loads(json.dumps(stored)), 0, 6, None, way)


@given(data=st.data(), way=st.sampled_from(WAYS), tokens=st.integers(1, 9), seed=st.integers(0, 99))
def test_any_tokens_of_any_lowest_layers_come_back(data: st.DataObject, way: str | None, tokens: int, seed: int) -> None:
    shapes = [(1, 4, 4), (2, 4, 4), (1, 4, 6), (1, 40, 4)]
    plan = data.draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=5))
    layers = states(plan, tokens, seed=seed)
    tensors, stored = layout.encode(layers, {}, way)
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    below = data.draw(st.none() | st.integers(1, len(plan) + 1))
    read(layers, tensors, stored, start, stop, below, way)


@every_plan
def test_what_is_not_quantised_is_exact_to_the_bit(plan: str) -> None:
    layers = states(PLANS[plan], dtype=torch.bfloat16)
    layers[0].keys.view(-1)[0] = -0.0
    tensors, stored = layout.encode(layers, {}, None)
    for pile in layout.piles([layout.BlobSpan(tensors, stored, 0, 6)]):
        for data, name in ((pile.keys.data, "keys"), (pile.values.data, "values")):
            own = torch.stack([getattr(layers[index], name) for index in pile.layers])
            assert torch.equal(data.view(torch.int16), own.view(torch.int16))


@every_way
def test_hidden_states_come_back(way: str | None) -> None:
    layers = states(PLANS["alike"])
    torch.manual_seed(1)
    hidden = {2: torch.randn(6, 50), 1: torch.randn(6, 50) * 100}
    tensors, stored = layout.encode(layers, hidden, way)
    assert stored["cuts"] == [1, 2]
    for cut, own in hidden.items():
        got = unpacked(layout.hidden_states(tensors, stored, cut, 2, 5), 50, torch.float32)[0, 0]
        torch.testing.assert_close(got, expected(own, way)[2:5], rtol=1e-5, atol=0 if way is None else 1e-4)
    read(layers, tensors, stored, 0, 6, None, way)


def test_what_is_stored_stays_as_it_is_when_the_cache_goes_on() -> None:
    layers = states(PLANS["alike"])
    before = [layer.keys.clone() for layer in layers]
    tensors, _ = layout.encode(layers, {}, None)
    for layer in layers:
        layer.keys.zero_()
    assert torch.equal(tensors["keys.0"], torch.stack(before))


# Bytes


CONFIGS = {
    "grouped": LlamaConfig(hidden_size=64, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2),
    "one head": LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, head_dim=32),
    "no groups": GPT2Config(n_embd=32, n_layer=4, n_head=4),
}


@every_way
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("depth", [None, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_payload_bytes_are_those_of_the_stored_tensors_without_scales(way, name: str, depth: int | None, dtype: torch.dtype) -> None:
    config, tokens = CONFIGS[name], 5
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = states([(heads, dim, dim)] * (depth or config.num_hidden_layers), tokens, dtype)
    hidden = {} if depth is None else {depth: torch.randn(tokens, config.hidden_size).to(dtype)}
    tensors, _ = layout.encode(layers, hidden, way)
    data = [tensor for key, tensor in tensors.items() if not key.endswith((".scale", ".zero"))]
    got = layout.payload_bytes(config, way, depth=depth, itemsize=dtype.itemsize)
    assert got * tokens == sum(tensor.numel() * tensor.element_size() for tensor in data)


def test_payload_bytes_are_the_papers() -> None:
    config = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    assert layout.payload_bytes(config, "int8") == 2 * 1024 * 32
    assert layout.payload_bytes(config, "int4") == 1024 * 32
    assert layout.payload_bytes(config, None, itemsize=2) == 2 * 1024 * 32 * 2
    assert layout.payload_bytes(config, "int8", depth=8) == 2 * 1024 * 8 + 4096


# Refused


@every_way
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["keys", "values", "hidden"])
def test_what_is_not_finite_is_refused(way: str | None, bad: float, where: str) -> None:
    layers, hidden = states(PLANS["other heads"]), torch.zeros(6, 16)
    (hidden if where == "hidden" else getattr(layers[2], where)).view(-1)[7] = bad
    with pytest.raises(ConfigError, match="finite"):
        layout.encode(layers, {1: hidden}, way)


@pytest.mark.parametrize("value", ["int2", 8, "", True, torch.int8])
def test_other_ways_to_store_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^quantization: expected"):
        layout.check_quantization(value)
    assert [layout.check_quantization(way) for way in WAYS] == WAYS

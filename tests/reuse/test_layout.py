"""Segments in a cache's buffers, against turning and writing one token after the other."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.reuse import layout
from hf_kvcaches.reuse.index import Piece, Record
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.layout import LayerStates, write_rows
from hf_kvcaches.reuse.plan import PlannedSpan, PromptRow
from tests.core.ropes import CONFIGS
from tests.kernels.cases import restored

BITS = {"int8": 8, "int4": 4}
WAYS = [None, "int8", "int4"]
Plan = Sequence[tuple[int, int, int]]  # heads, keys' and values' head_dim of each layer
Geometries = Sequence[RotaryGeometry]


def geometry(name: str) -> RotaryGeometry:
    config, _, layer_type = CONFIGS[name]
    return RotaryGeometry.from_config(config, layer_type)


class Stored:
    """A segment, as it is stored, and what it was before."""

    def __init__(self, plan: Plan, tokens: int, start: int, way: Any, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(tokens * 100 + start)
        self.way = way
        self.layers = [LayerStates(*(torch.randn(heads, tokens, dim).to(dtype) for dim in dims)) for heads, *dims in plan]
        self.tokens, self.start = tokens, start
        self.tensors, form = layout.encode(self.layers, way)
        self.form = json.loads(json.dumps(form))

    def read(self, layer: int, name: str) -> torch.Tensor:
        x: torch.Tensor = getattr(self.layers[layer], name)
        return x if self.way is None else restored(x, BITS[self.way], 32 if self.way == "int4" else None)


def opened(plan: Plan, rows: int, total: int, dtype: torch.dtype = torch.float32) -> list[SplicedLayer]:
    """Layers with room, in which nothing is a number."""
    layers = []
    for heads, *dims in plan:
        layer = SplicedLayer()
        layer.open(rows, total, *(torch.empty(rows, heads, 0, dim, dtype=dtype) for dim in dims), padding=0)
        for buffer in (layer.key_buffer, layer.value_buffer):
            assert buffer is not None
            assert buffer.shape[2] > total
            buffer.fill_(math.nan)
        layers.append(layer)
    return layers


def place(stored: Stored, start: int, offset: int = 0, length: int | None = None) -> tuple[Piece, Stored]:
    stop = start + (stored.tokens - offset if length is None else length)
    none = np.zeros(0, np.uint32)
    return Piece(start, stop, Record("", none, str(id(stored)), "", stored.start, none, form=stored.form), offset), stored


def splice_row(layers: list[SplicedLayer], row: int, padding: int, placed: Sequence[tuple[Piece, Stored]], geometries: Geometries) -> None:
    """Write pieces into one row, as a plan of spans of their own."""
    spans = tuple(PlannedSpan(tokens.start, tokens.stop, "mine", (tokens,)) for tokens, _ in placed)
    blobs = {tokens.record.key: stored.tensors for tokens, stored in placed}
    write_rows(layers, [PromptRow(row, padding, np.zeros(0, np.uint32), 0, spans)], blobs, geometries, None)


def slow_splice(buffers: list, row: int, padding: int, placed: Sequence[tuple[Piece, Stored]], geometries: Geometries) -> None:
    """One token of one layer after the other."""
    for piece, stored in placed:
        for layer in range(len(stored.layers)):
            for token in range(piece.start, piece.stop):
                there = piece.offset + token - piece.start
                key, value = (stored.read(layer, name)[:, there] for name in ("keys", "values"))
                key = geometries[layer].shift(key[None, :, None], token - (stored.start + there))[0, :, 0]
                for buffer, new in zip(buffers[layer], (key, value), strict=True):
                    buffer[row, :, token + padding] = new


def check(layers: list[SplicedLayer], row: int, padding: int, placed: Sequence[tuple[Piece, Stored]], geometries: Geometries) -> None:
    """Splices, and compares all that is in the buffers, untouched slots included."""
    slow = [(layer.key_buffer.clone(), layer.value_buffer.clone()) for layer in layers]
    slow_splice(slow, row, padding, placed, geometries)
    splice_row(layers, row, padding, placed, geometries)
    for layer, expected in zip(layers, slow, strict=True):
        for buffer, want in zip((layer.key_buffer, layer.value_buffer), expected, strict=True):
            tolerance = max(torch.finfo(want.dtype).eps, 4e-6)
            torch.testing.assert_close(buffer, want, rtol=tolerance, atol=tolerance, equal_nan=True)


# Every family of rotary positions


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("heads", [2, 1])
def test_keys_are_turned_to_where_they_now_stand(name: str, way: Any, heads: int) -> None:
    turning = geometry(name)
    plan = [(heads, turning.head_dim, turning.head_dim)] * 2
    first, second = Stored(plan, 7, 100, way), Stored(plan, 5, 3, way)
    placed = [place(first, 2), place(second, 11, 1, 3), place(second, 20)]
    check(opened(plan, 2, 30), 1, 4, placed, [turning] * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_stays_where_it_was_is_copied_to_the_bit(dtype: torch.dtype) -> None:
    turning = geometry("llama default")
    plan = [(2, 16, 16), (2, 16, 12), (2, 16, 16)]
    still, moved = Stored(plan, 6, 5, None, dtype), Stored(plan, 6, 40, None, dtype)
    layers = opened(plan, 1, 30, dtype)
    check(layers, 0, 2, [place(still, 5), place(moved, 15)], [turning] * 3)
    for layer, own in zip(layers, still.layers, strict=True):
        assert torch.equal(layer.key_buffer[0, :, 7:13], own.keys)
        assert torch.equal(layer.value_buffer[0, :, 7:13], own.values)


def test_a_shift_over_a_long_way_is_exact() -> None:
    plan, turning = [(1, 16, 16)], geometry("llama default")
    check(opened(plan, 1, 12), 0, 0, [place(Stored(plan, 4, 5_000_000, None), 3)], [turning])


# Anything together


STILL = RotaryGeometry(torch.zeros(0, dtype=torch.float64), 32, kind="none")
GEOMETRIES = [geometry("gemma3 sliding"), geometry("gemma3 full"), STILL]
ODD = [(1, 33, 31), (1, 7, 5), (2, 64, 40)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@given(data=st.data())
def test_any_pieces_in_any_row_are_written_and_nothing_else(data: st.DataObject) -> None:
    plan = data.draw(st.lists(st.sampled_from([(1, 32, 32), (2, 32, 32), (2, 32, 8), *ODD]), min_size=1, max_size=4))
    geometries = [STILL if shape in ODD else data.draw(st.sampled_from(GEOMETRIES)) for shape in plan]
    dtype, way = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(WAYS))
    segments = [
        Stored(plan, data.draw(st.integers(1, 6)), data.draw(st.integers(0, 12)), way, dtype) for _ in range(data.draw(st.integers(1, 3)))
    ]
    placed, end = [], 0
    for _ in range(data.draw(st.integers(0, 4))):
        stored = data.draw(st.sampled_from(segments))
        offset = data.draw(st.integers(0, stored.tokens - 1))
        length = data.draw(st.integers(1, stored.tokens - offset))
        home = stored.start + offset
        start = home if home >= end and data.draw(st.booleans()) else end + data.draw(st.integers(0, 4))
        placed.append(place(stored, start, offset, length))
        end = start + length
    placed = data.draw(st.permutations(placed))
    padding, rows = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    check(opened(plan, rows, padding + end + 1, dtype), data.draw(st.integers(0, rows - 1)), padding, placed, geometries)


def test_on_a_cpu_all_layers_of_a_blob_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, turning = [(2, 16, 16)] * 4, geometry("llama default")
    stored, sizes, whole = Stored(plan, 4, 50, "int8"), [], layout.splice
    monkeypatch.setattr(
        layout, "splice", lambda packed, *args, **kwargs: (sizes.append(packed.data.shape[::2]), whole(packed, *args, **kwargs))
    )
    check(opened(plan, 1, 40), 0, 0, [place(stored, 5 * number) for number in range(6)], [turning] * 4)
    assert sizes == [(4, 4)] * 12  # layers and tokens, for keys and for values


def test_layers_on_several_devices_each_get_their_own() -> None:
    """The meta device stands for another one."""
    plan, turning = [(2, 16, 16)] * 3, geometry("llama default")
    layers = opened(plan, 1, 20)
    for name in ("key_buffer", "value_buffer"):
        setattr(layers[0], name, getattr(layers[0], name).to("meta"))
    stored = Stored(plan, 4, 9, None)
    splice_row(layers, 0, 0, [place(stored, 2)], [turning] * 3)
    for layer, own in zip(layers[1:], stored.layers[1:], strict=True):
        torch.testing.assert_close(layer.key_buffer[0, :, 2:6], turning.shift(own.keys[None], -7)[0], rtol=0, atol=4e-6)
        assert torch.equal(layer.value_buffer[0, :, 2:6], own.values)


# What is stored


def test_what_is_stored_stays_as_it_is_when_the_cache_goes_on() -> None:
    stored = Stored([(2, 8, 8)] * 3, 6, 0, None)
    before = [layer.keys.clone() for layer in stored.layers]
    for layer in stored.layers:
        layer.keys.zero_()
    assert torch.equal(stored.tensors["keys.0"], torch.stack(before))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_what_is_not_finite_is_refused(way: str | None, bad: float, where: str) -> None:
    layers = Stored([(2, 8, 8), (1, 8, 8), (2, 8, 8)], 6, 0, None).layers
    getattr(layers[2], where).view(-1)[7] = bad
    with pytest.raises(ConfigError, match="finite"):
        layout.encode(layers, way)


@pytest.mark.parametrize("value", ["int2", 8, "", True, torch.int8])
def test_other_ways_to_store_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^quantization: expected"):
        layout.check_quantization(value)
    assert [layout.check_quantization(way) for way in WAYS] == WAYS

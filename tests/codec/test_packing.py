"""The packed form against plain arithmetic, over tokens, spans, layers, damage and shapes."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches import ArtifactError, ConfigError, KVCodec
from hf_kvcaches.codec.moments import Shape
from hf_kvcaches.codec.packing import cut, join
from tests import tiny
from tests.codec.measured import calibrate, made, packed, states
from tests.reference import packed as reference
from tests.reference.codec import joined


def unpacked(codec: KVCodec, records: dict[int, torch.Tensor], start: int = 0, stop: int | None = None) -> list[tuple[torch.Tensor, ...]]:
    return codec.unpack([(layer, record, start, stop) for layer, record in records.items()])


@pytest.mark.parametrize("ratio", [0.05, 0.125, 0.5])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
def test_coefficients_are_read_within_a_step_of_what_they_were(tokens: int, ratio: float) -> None:
    codec, own = made(ratio), states(tokens)
    for layer, found in enumerate(unpacked(codec, packed(codec, own))):
        assert [each.shape for each in found] == [each.shape for each in own[layer]]
        whole = reference.integers(codec, layer, *own[layer])
        read = reference.coefficients(codec, layer, *found)
        # An integer stands for the mean of what was rounded to it, which is less than a step beyond it.
        assert float(((read - whole) * whole.sign()).min()) > -0.41
        assert float(((read - whole) * whole.sign()).max()) < 0.61
        assert float((read - whole)[whole == 0].abs().max()) < 1e-3


@given(data=st.data())
def test_any_span_of_any_records_is_that_part_of_the_whole(data: st.DataObject) -> None:
    codec, spans, whole = made(), [], []
    for _ in range(data.draw(st.integers(1, 3))):
        tokens, layer = data.draw(st.integers(0, 150)), data.draw(st.integers(0, 3))
        own = {layer: tuple(each[:, :tokens] for each in states(150)[layer])}
        record = packed(codec, own)[layer]
        start = data.draw(st.integers(0, tokens))
        stop = data.draw(st.integers(start, tokens))
        spans.append((layer, record, start, stop))
        whole.append([each[:, start:stop] for each in codec.unpack([(layer, record, 0, None)])[0]])
    for found, expected in zip(codec.unpack(spans), whole, strict=True):
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, expected, strict=True))


def test_layers_take_the_bytes_that_were_expected() -> None:
    own = states(40 * 60)
    for ratio in (0.1, 0.25):
        codec = made(ratio)
        assert codec.packed_ratio == pytest.approx(ratio, rel=0.05)
        size = sum(map(len, packed(codec, own).values()))
        assert size / (4 * 2 * 2 * 8 * 2 * 2400) == pytest.approx(ratio, rel=0.1)


@pytest.mark.parametrize(
    ("ratio", "nbytes", "loss"), [(0.06, 9292, 6.556), (0.125, 19254, 0.6453), (0.25, 38488, 0.0293), (0.5, 76900, 1.006e-4)]
)
def test_the_form_is_as_good_as_it_was(ratio: float, nbytes: int, loss: float) -> None:
    """Against what the format of version 4 took and lost: errors fall by 3% or more where bytes grow by 1%."""
    codec, own = long_calibrated().at(ratio), states(600)
    records = packed(codec, own)
    error = lost(codec, own, unpacked(codec, records))[torch.arange(600) % 60 >= 4].mean()
    assert sum(map(len, records.values())) < 1.003 * nbytes
    assert float(error) < 1.003 * loss


@cache
def long_calibrated() -> KVCodec:
    return calibrate(texts=tiny.ids(24, 60, seed=3).tolist())


def lost(codec: KVCodec, own: dict[int, tuple[torch.Tensor, torch.Tensor]], found: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """What predictions lose of each token, twice the divergence, (tokens,)."""
    errors = [
        reference.coefficients(codec, layer, *own[layer]) - reference.coefficients(codec, layer, *read) for layer, read in enumerate(found)
    ]
    return torch.stack([error.square().sum(0) for error in errors]).sum(0) * codec.packed.quantizer.step**2


def test_the_expected_loss_is_that_of_tokens_like_those_of_the_calibration() -> None:
    codec, own = long_calibrated(), states(1440)
    error = lost(codec, own, unpacked(codec, packed(codec, own)))[torch.arange(1440) % 60 >= 4]
    assert float(error.mean()) / 2 == pytest.approx(codec.packed.divergence, rel=0.1)


def test_tokens_that_are_left_out_are_the_mean_and_cost_little() -> None:
    codec, own = made(), states(70)
    own = {layer: tuple(torch.cat([each[:, :4] * 1000, each[:, 4:]], 1) for each in pair) for layer, pair in own.items()}
    without, whole = packed(codec, own, 4), packed(codec, own)
    assert sum(map(len, without.values())) < 0.8 * sum(map(len, whole.values()))
    for mine, theirs in zip(unpacked(codec, without), unpacked(codec, whole), strict=True):
        assert all(torch.equal(one[:, 4:], other[:, 4:]) for one, other in zip(mine, theirs, strict=True))
        assert all(float((each[:, 0] - each[:, 3]).abs().max()) == 0 for each in mine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_keys_and_values_come_back_in_the_asked_dtype(dtype: torch.dtype) -> None:
    codec, own = made(), {layer: tuple(each.to(dtype) for each in pair) for layer, pair in states(70).items()}
    records = [(layer, record, 0, None) for layer, record in packed(codec, own).items()]
    for mine, theirs in zip(codec.unpack(records, dtype), codec.unpack(records), strict=True):
        assert {each.dtype for each in mine} == {dtype}
        assert all(torch.allclose(one.float(), other, rtol=1e-2, atol=1e-2) for one, other in zip(mine, theirs, strict=True))


def test_large_numbers_are_clipped_to_16_bits_and_those_that_are_none_are_refused() -> None:
    codec, own = made(), {0: tuple(each.clone() for each in states(5)[0])}
    own[0][0][0, 2, 3] = 1e9
    (keys, _), *_ = unpacked(codec, packed(codec, own))
    assert bool(keys.isfinite().all())
    for number in (float("nan"), float("inf")):
        own[0][0][0, 2, 3] = number
        with pytest.raises(ConfigError, match=r"layers\[0\]: expected finite numbers"):
            packed(codec, own)


def test_damaged_records_are_refused_or_have_the_right_form() -> None:
    codec, own = made(), {1: states(70)[1]}
    data = packed(codec, own)[1]
    for length in range(len(data)):
        with pytest.raises(ArtifactError, match="damaged"):
            codec.unpack([(1, data[:length], 0, None)])
    refused = 0
    for place in range(len(data)):
        other = data.clone()
        other[place] ^= 1 << (place % 8)
        try:
            [(keys, values)] = codec.unpack([(1, other, 0, None)])
        except ArtifactError:
            refused += 1
            continue
        assert keys.shape[1] == values.shape[1] == 70
        assert bool(keys.isfinite().all() and values.isfinite().all())
    assert refused > 0.9 * len(data)
    for other in (data.short(), torch.zeros(0, dtype=torch.uint8), torch.full((50,), 255, dtype=torch.uint8)):
        with pytest.raises(ArtifactError, match="damaged"):
            codec.unpack([(1, other, 0, None)])
    with pytest.raises(ArtifactError, match="damaged"):
        codec.unpack([(1, data, 0, 71)])


def test_records_of_more_words_than_places_can_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = packed(made(), states(70))[0]
    monkeypatch.setattr("hf_kvcaches.codec.packing._MOST_WORDS", 10)
    with pytest.raises(ArtifactError, match="damaged"):
        made().unpack([(0, data, 0, None)])


def test_records_of_other_layers_or_codecs_do_not_pass_unnoticed() -> None:
    data = packed(made(), states(70))[0]
    with pytest.raises(ArtifactError, match="damaged"):
        made().unpack([(3, data, 0, None)])
    with pytest.raises(ArtifactError, match="damaged"):
        made(0.2).unpack([(0, data, 0, None)])


@pytest.mark.parametrize("shape", [(1, 4, 4), (6, 256, 256), (8, 128, 64), (3, 400, 200), (2, 2000, 2000)])
def test_heads_are_joined_in_groups_of_a_size_and_come_apart_again(shape: tuple[int, int, int]) -> None:
    own = Shape(*shape, shape[0]).in_groups(1024)
    assert own.heads % own.group == 0
    assert own.size <= 1024 or own.group == 1
    assert own.group == own.heads or (2 * own.group > own.heads or own.heads % (2 * own.group) or 2 * own.size > 1024)
    keys, values = torch.randn(2, own.heads, 5, own.key_dim), torch.randn(2, own.heads, 5, own.value_dim)
    together = own.join(keys, values, keys.dtype)
    assert together.shape == (2, own.heads // own.group, 5, own.size)
    assert torch.equal(together, joined(own, keys, values))
    assert all(torch.equal(*pair) for pair in zip(own.split(together), (keys, values), strict=True))


@given(data=st.data())
def test_records_of_whole_tiles_are_joined_and_cut_without_a_change(data: st.DataObject) -> None:
    codec, size, tokens = made(), 64 * data.draw(st.integers(1, 3)), data.draw(st.integers(0, 300))
    layer = data.draw(st.integers(0, 3))
    whole = packed(codec, {layer: tuple(each[:, :tokens] for each in states(300)[layer])})[layer]
    records = cut(whole, size)
    for record, start in zip(records, range(0, tokens, size), strict=True):
        alone = {layer: tuple(each[:, start : min(start + size, tokens)] for each in states(300)[layer])}
        assert torch.equal(record, packed(codec, alone)[layer])
    if records:
        assert torch.equal(join(records), whole)


def test_records_that_do_not_fit_each_other_are_not_joined() -> None:
    record = packed(made(), {0: states(100)[0]})[0]
    for records in ([record, record], [record[:-1]], [record[:3]], [torch.cat([record, record])]):
        with pytest.raises(ArtifactError, match="damaged"):
            join(records)
    negative = record.clone()
    negative[4:12].view(torch.int32)[0] -= 1 << 20
    with pytest.raises(ArtifactError, match="damaged"):
        join([negative])

"""Codes against a plain float64 reference: all widths, outliers, numbers that are none, and heads with nothing to say."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches import ConfigError, FingerprintMismatch, KVCodec
from hf_kvcaches.codec.sides import WIDTHS, CalibratedLayer, CalibratedSide
from tests import tiny
from tests.codec.measured import calibrate
from tests.reference.codec import codes_of, decoded, vectors_of


def encode(codec: KVCodec, keys: list[torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The codes in memory of all layers, (batch, bytes, tokens) each."""
    pairs = zip(keys, values, strict=True)
    return [codec.coder(index, key.dtype, key.device).encode(key, value) for index, (key, value) in enumerate(pairs)]


def decode(codec: KVCodec, codes: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The inverse."""
    return [codec.coder(index, dtype, own.device).decode(own) for index, own in enumerate(codes)]


@cache
def made(metric: str = "loss") -> KVCodec:
    return calibrate(metric=metric)


def with_widths(codec: KVCodec, keys: torch.Tensor, values: torch.Tensor) -> KVCodec:
    """The codec with these bits in all layers, (kv_heads, d) each."""
    layers = tuple(CalibratedLayer(layer.keys.with_widths(keys), layer.values.with_widths(values)) for layer in codec.layers)
    return dataclasses.replace(codec, layers=layers)


def vectors(side: CalibratedSide, tokens: int = 50, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    """Vectors about as a side's own, (2, kv_heads, tokens, d)."""
    coefficients = torch.randn(2, len(side.mean), tokens, side.shape[1], generator=torch.Generator().manual_seed(seed)).double()
    spread = coefficients * side.distortions[..., 0].double().sqrt()[:, None] * size
    spread = spread / side.distortions[..., 0].double().mean((-1), keepdim=True).sqrt()[:, None]
    return torch.einsum("hij,bhtj->bhti", side.decode, spread) + side.mean.double()[:, None]


def states(codec: KVCodec, **options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of all layers, in float32."""
    pairs = [
        [vectors(side, seed=2 * index + place, **options).float() for place, side in enumerate(layer)]
        for index, layer in enumerate(codec.layers)
    ]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def near_a_step(side: CalibratedSide, given: torch.Tensor) -> torch.Tensor:
    """Where float32 may choose another code than float64, (batch, kv_heads, tokens)."""
    steps = side.chosen_steps.double().masked_fill(side.widths == 0, 1)
    coefficients = torch.einsum("hij,bhtj->bhti", side.encode.double(), given.double() - side.mean.double()[:, None]) / steps[:, None]
    return (((coefficients - coefficients.round()).abs() < 1e-3) & (side.widths > 0)[:, None]).any(-1)


@given(data=st.data())
def test_codes_and_vectors_are_those_of_the_reference(data: st.DataObject) -> None:
    widths = [torch.tensor(data.draw(st.lists(st.sampled_from((0, *WIDTHS[:7])), min_size=16, max_size=16))).view(2, 8) for _ in range(2)]
    codec = with_widths(made(), *widths)
    keys, values = states(codec, tokens=9, size=data.draw(st.sampled_from([0.1, 1.0, 30.0])))
    found = decode(codec, encode(codec, keys, values), dtype=torch.float64)
    for layer, key, value, read in zip(codec.layers, keys, values, found, strict=True):
        for side, given_states, mine, theirs in zip(layer, (key, value), read, decoded(layer, key, value), strict=True):
            sure = ~near_a_step(side, given_states)
            torch.testing.assert_close(mine[sure], theirs[sure], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_codes_stand_for_gets_the_same_codes_again(width: int) -> None:
    codec = made().at(rank=8, widths=width)
    generator = torch.Generator().manual_seed(width)
    keys, values = [], []
    for layer in codec.layers:
        for side, states_of in zip(layer, (keys, values), strict=True):
            top = min(2 ** (width - 1), 200)  # float32 has no more digits for other directions of the same vector
            codes = torch.randint(-top, top, (2, 2, 20, 8), generator=generator) + 2 ** (width - 1)
            states_of.append(vectors_of(side, codes))
    read = decode(codec, encode(codec, keys, values), dtype=torch.float64)
    for layer, key, value, pair in zip(codec.layers, keys, values, read, strict=True):
        for side, expected, found in zip(layer, (key, value), pair, strict=True):
            if width < 16:
                assert torch.equal(codes_of(side, expected), codes_of(side, found))
            scale = float((expected - side.mean[:, None]).abs().max())
            torch.testing.assert_close(found, expected, rtol=0, atol=scale * (1e-6 if width < 16 else 1e-2))


@pytest.mark.parametrize(("width", "loss"), [(16, 2e-3), (24, 2e-5)])
def test_wide_codes_lose_a_small_share_of_every_direction(width: int, loss: float) -> None:
    codec = made().at(energy=1, widths=width)
    keys, values = states(codec)
    for layer, key, value, pair in zip(codec.layers, keys, values, decode(codec, encode(codec, keys, values), torch.float64), strict=True):
        for side, expected, found in zip(layer, (key, value), pair, strict=True):
            error, whole = (
                (each @ side.encode.double().mT).square().mean((0, 2)).sqrt()
                for each in (found - expected, expected - side.mean.double()[:, None])
            )
            assert float((error / whole).max()) < loss


def test_more_bits_lose_less() -> None:
    keys, values = states(made())
    lost = []
    for ratio in (0.05, 0.1, 0.2, 0.4):
        read = made().at(ratio)
        pairs = zip(read.layers, keys, decode(read, encode(read, keys, values)), strict=True)
        lost.append(sum(float(((key - pair[0]) @ layer.keys.encode.mT).square().sum()) for layer, key, pair in pairs))
    assert lost == sorted(lost, reverse=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_codes_come_back_in_the_asked_dtype(dtype: torch.dtype) -> None:
    keys, values = states(made())
    codes = encode(made(), [each.to(dtype) for each in keys], [each.to(dtype) for each in values])
    assert {each.dtype for each in codes} == {torch.uint8}
    assert {each.dtype for pair in decode(made(), codes, dtype) for each in pair} == {dtype}
    assert {each.dtype for pair in decode(made(), codes) for each in pair} == {torch.float32}
    for low, high in zip(decode(made(), codes, dtype), decode(made(), codes, torch.float64), strict=True):
        for mine, theirs in zip(low, high, strict=True):
            assert float((mine.double() - theirs).abs().max()) <= 8 * torch.finfo(dtype).eps * float(theirs.abs().max()) + 1e-12


def test_a_token_takes_the_bytes_that_the_codec_says_whatever_is_beside_it() -> None:
    for codec in (made(), made().at(0.3, widths=(3, 5, 6)), made().at(rank=(3, 4), widths=24), made().at(energy=0.5)):
        keys, values = states(codec, tokens=7)
        codes = encode(codec, keys, values)
        assert sum(each.shape[1] for each in codes) == codec.bytes_per_token
        assert {(each.shape[0], each.shape[2]) for each in codes} == {(2, 7)}
        assert codec.bytes_ratio == codec.bytes_per_token / 256
        alone = encode(codec, [key[:1, :, 3:4] for key in keys], [value[:1, :, 3:4] for value in values])
        assert all(torch.equal(each[:1, :, 3:4], one) for each, one in zip(codes, alone, strict=True))


def test_long_prompts_are_encoded_in_pieces_of_the_same_codes() -> None:
    keys, values = states(made(), tokens=5000)
    whole = encode(made(), keys, values)
    halves = [
        encode(made(), [key[:, :, span] for key in keys], [value[:, :, span] for value in values])
        for span in (slice(0, 2500), slice(2500, None))
    ]
    assert all(torch.equal(each, torch.cat(parts, 2)) for each, *parts in zip(whole, *halves, strict=True))
    assert [each.shape[2] for each in encode(made(), [key[:, :, :0] for key in keys], [value[:, :, :0] for value in values])] == [0] * 4


# Outliers


def test_outliers_are_clipped_to_the_outermost_codes() -> None:
    codec = made().at(rank=8, widths=3)
    for layer in codec.layers:
        assert set(codes_of(layer.keys, vectors(layer.keys, size=1e4)).unique().tolist()) >= {0, 7}
    keys, values = states(codec, size=1e4)
    for layer, key, value, pair in zip(codec.layers, keys, values, decode(codec, encode(codec, keys, values), torch.float64), strict=True):
        for side, expected, found in zip(layer, decoded(layer, key, value), pair, strict=True):
            sure = ~near_a_step(side, key if side is layer.keys else value)
            torch.testing.assert_close(found[sure], expected[sure], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("widths", [1, 3, 8, 16, 24])
def test_numbers_that_are_none_give_finite_vectors_and_leave_other_tokens_and_heads_alone(number: float, widths: int) -> None:
    codec = made().at(rank=8, widths=widths)
    keys, values = states(codec, tokens=5)
    expected = decode(codec, encode(codec, keys, values))
    for each in (*keys, *values):
        each[0, 1, 2, 3] = number
    untouched = torch.ones(2, 2, 5, dtype=torch.bool)
    untouched[0, 1, 2] = False
    for pair, whole in zip(decode(codec, encode(codec, keys, values)), expected, strict=True):
        for found, other in zip(pair, whole, strict=True):
            assert bool(found.isfinite().all())
            assert torch.equal(found[untouched], other[untouched])


# Heads and sides with nothing to say


@pytest.mark.parametrize("metric", ["loss", "plain"])
def test_heads_that_are_always_the_same_cost_nothing_and_come_back(metric: str) -> None:
    model = tiny.llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[:8] = 0
        model.model.layers[1].self_attn.v_proj.weight[8:] = 0
    codec = calibrate(model, metric=metric)
    assert all(bool(tensor.isfinite().all()) for tensor in codec.tensors().values())
    assert codec.ranks[0][0][0] == codec.ranks[1][1][1] == 0
    for each in (codec, codec.at(energy=1, widths=24), codec.at(rank=8, widths=1)):
        keys, values = states(made(), tokens=6)
        keys[0][:, 0], values[1][:, 1] = 0, 0
        read = decode(each, encode(each, keys, values))
        assert float(read[0][0][:, 0].abs().max()) < 1e-6
        assert float(read[1][1][:, 1].abs().max()) < 1e-6


@pytest.mark.parametrize("empty", ["keys", "values", "both"])
def test_a_side_without_bits_is_its_mean(empty: str) -> None:
    some = torch.full((2, 8), 4)
    none = torch.zeros(2, 8, dtype=torch.int64)
    codec = with_widths(made(), none if empty != "values" else some, none if empty != "keys" else some)
    keys, values = states(codec, tokens=3)
    codes = encode(codec, keys, values)
    assert {each.shape for each in codes} == {(2, 0 if empty == "both" else 8, 3)}
    assert codec.bytes_per_token == (0 if empty == "both" else 32)
    for layer, pair in zip(codec.layers, decode(codec, codes), strict=True):
        for name, side, found in zip(("keys", "values"), layer, pair, strict=True):
            if empty in (name, "both"):
                torch.testing.assert_close(found, side.mean[:, None].expand_as(found), rtol=1e-5, atol=1e-6)


def test_gamma_of_the_paper_multiplies_decoded_keys_with_the_root_of_the_share_of_directions() -> None:
    one = made().at(rank=(2, 5))
    paper = one.at(rank=(2, 5), gamma="paper")
    assert (one.settings.gamma, paper.settings.gamma, paper.at(0.1).settings.gamma) == ("one", "paper", "paper")
    codes = encode(one, *states(one))
    for (keys, values), (other_keys, other_values) in zip(decode(one, codes), decode(paper, codes), strict=True):
        torch.testing.assert_close(other_keys, keys * (2 / 8) ** 0.5)
        torch.testing.assert_close(other_values, values)


# Other bits


@pytest.mark.parametrize(
    "options",
    [{"bytes_ratio": 0.07}, {"bytes_ratio": 0.3, "widths": (2, 4)}, {"rank": (3, 5), "gamma": "paper"}, {"energy": 0.9, "widths": 5}],
)
def test_other_bits_are_those_of_a_codec_calibrated_with_them_at_once(options: dict[str, Any]) -> None:
    at_once, later = calibrate(**options), made().at(**options)
    assert later.settings == at_once.settings
    assert later.fingerprint == at_once.fingerprint
    assert later.ranks == at_once.ranks
    assert all(torch.equal(tensor, at_once.tensors()[name]) for name, tensor in later.tensors().items())
    again = later.at(0.125)
    assert all(torch.equal(tensor, made().tensors()[name]) for name, tensor in again.tensors().items())


def test_at_says_which_of_its_arguments_is_missing_or_too_many() -> None:
    for options in ({}, {"bytes_ratio": 0.1, "rank": 3}):
        with pytest.raises(ConfigError, match=r"bytes_ratio, rank, energy: expected exactly one of them.*Try bytes_ratio=0.125"):
            made().at(**options)


# Use


def test_layers_and_shapes_that_do_not_fit_are_refused_by_name() -> None:
    keys, values = states(made(), tokens=3)
    codes = made().encode(keys, values)
    for call, name in [
        (lambda: made().encode(keys[:3], values), "keys, values: expected one tensor for each of 4 layers"),
        (lambda: made().decode(codes[:3]), "codes: expected records for each of 4 layers"),
        (lambda: made().encode([*keys[:3], keys[3][:, :1]], values), r"layer 3: expected keys and values"),
        (lambda: made().encode(keys, [values[0][..., :4], *values[1:]]), "layer 0"),
        (lambda: made().encode([None, *keys[1:]], values), r"keys\[0\]: .*got None"),
        (lambda: made().encode(keys, [values[0][:, :, :2], *values[1:]]), "layer 0: .*of the same tokens"),
        (lambda: made().encode([keys[0][:1], *keys[1:]], values), "as many rows in all layers"),
        (lambda: made().coder(4, torch.float32, torch.device("cpu")), "codes for layer 4"),
    ]:
        with pytest.raises(ConfigError, match=name):
            call()


def test_layers_that_are_not_coded_are_left_alone() -> None:
    codec = calibrate(tiny.gemma2())
    assert [layer is None for layer in codec.layers] == [each is None for each in codec.ranks] == [True, False, True, False]
    side = torch.randn(1, 2, 3, 8)
    codes = codec.encode([None, side, side, side], [None, side, None, side])
    assert [each is None for each in codes] == [each is None for each in codec.decode(codes)] == [True, False, True, False]


def test_rows_are_packed_one_by_one_and_come_back_together() -> None:
    keys, values = states(made(), tokens=70)
    codec = made().at(0.75, widths=(8, 16))
    codes = codec.encode(keys, values)
    assert [len(records) for records in codes] == [2] * 4
    for key, value, found in zip(keys, values, codec.decode(codes, torch.float64), strict=True):
        for expected, read in zip((key, value), found, strict=True):
            assert read.dtype == torch.float64
            assert float((expected - read).square().mean()) < 1e-3 * float(expected.square().mean())


def test_a_codec_serves_its_model_in_any_precision_and_no_other() -> None:
    made().require_model(tiny.llama())
    made().require_model(tiny.llama().to(torch.bfloat16))
    with pytest.raises(FingerprintMismatch, match="KVCodec was made for another model: weights differ"):
        made().require_model(tiny.llama(seed=1))


def test_copies_are_the_same_codec() -> None:
    codes = encode(made(), *states(made()))
    for codec in (pickle.loads(pickle.dumps(made())), copy.deepcopy(made())):
        assert all(torch.equal(one, other) for one, other in zip(encode(codec, *states(made())), codes, strict=True))
        assert codec.settings == made().settings


def test_it_shows_itself_in_a_line() -> None:
    text = repr(made())
    assert text.startswith(f"KVCodec(4 of 4 layers, {made().bytes_ratio:.4f} of the bytes, rotation='aware', metric='loss'")
    assert str(made().fingerprint) in text
    assert "\n" not in text
    assert "tensor" not in text

"""Codes of fixed widths against a plain float64 reference: all widths, outliers, numbers that are none, heads with nothing to say."""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches import ConfigError, KVCodec, UnsupportedError
from hf_kvcaches.codec.fixed import FixedForm, FixedLayer
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.kernels.code_format import WIDTHS
from tests import tiny
from tests.codec.measured import calibrate
from tests.reference.codec import decoded, joined

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@cache
def made(metric: str = "loss") -> KVCodec:
    return calibrate(metric=metric)


def form_of(name: str, widths: torch.Tensor | int | None = None) -> FixedForm:
    """One of the forms of a codec, in all layers with these widths of all directions, or as it was made."""
    form: FixedForm = getattr(made(), name)
    if widths is None:
        return form
    layers = {}
    for index, layer in form.layers.items():
        own = torch.full((layer.shape.size,), widths) if isinstance(widths, int) else widths
        layers[index] = dataclasses.replace(layer, widths=own.to(torch.uint8))
    return FixedForm(layers)


def encode(form: FixedForm, states: Pairs) -> list[torch.Tensor]:
    return [form.coder(index, pair[0].dtype, pair[0].device).encode(*pair) for index, pair in enumerate(states)]


def decode(form: FixedForm, codes: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> Pairs:
    return [form.coder(index, dtype, own.device).decode(own, dtype) for index, own in enumerate(codes)]


def states(form: FixedForm, tokens: int = 50, size: float = 1.0) -> Pairs:
    """Keys and values about as those of each layer, in float32."""
    found = []
    for index, layer in form.layers.items():
        spread = layer.distortions[..., 0].double().sqrt()[:, None]
        drawn = torch.randn(2, layer.shape.groups, tokens, layer.shape.size, generator=torch.Generator().manual_seed(index)).double()
        vectors = torch.einsum("gij,bgtj->bgti", torch.linalg.inv(layer.transform), drawn * spread * size)
        found.append(layer.shape.split((vectors + layer.mean.double()[:, None]).float()))
    return found


def near_a_step(layer: FixedLayer, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Where float32 may choose another integer than float64, (batch, groups, tokens)."""
    places = torch.tensor([WIDTHS.index(width) if width else 0 for width in layer.widths.tolist()])
    steps = layer.steps.double().gather(2, places.expand(layer.shape.groups, -1)[..., None])[..., 0]
    vectors = joined(layer.shape, *pair).double() - layer.mean.double()[:, None]
    coefficients = torch.einsum("gij,bgtj->bgti", layer.transform, vectors) / steps[:, None]
    return (((coefficients - coefficients.round()).abs() < 1e-3) & (layer.widths > 0)).any(-1)


def assert_same(layer: FixedLayer, found: tuple[torch.Tensor, torch.Tensor], pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    sure = ~near_a_step(layer, pair)
    mine, theirs = (joined(layer.shape, *own)[sure] for own in (found, decoded(layer, *pair)))
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()) if len(theirs) else 0.0)


@pytest.mark.parametrize("name", ["in_place", "slots"])
@given(data=st.data())
def test_codes_and_vectors_are_those_of_the_reference(name: str, data: st.DataObject) -> None:
    size = form_of(name).layers[0].shape.size
    widths = torch.tensor(data.draw(st.lists(st.sampled_from((0, *WIDTHS[:7])), min_size=size, max_size=size)))
    form = form_of(name, widths)
    pairs = states(form, tokens=9, size=data.draw(st.sampled_from([0.1, 1.0, 30.0])))
    for layer, found, pair in zip(form.layers.values(), decode(form, encode(form, pairs), torch.float64), pairs, strict=True):
        assert_same(layer, found, pair)


@pytest.mark.parametrize(("width", "loss"), [(16, 6e-3), (24, 6e-5)])
@pytest.mark.parametrize("name", ["in_place", "slots"])
def test_wide_codes_lose_a_small_share_of_every_direction(name: str, width: int, loss: float) -> None:
    form = form_of(name, width)
    pairs = states(form)
    for layer, pair, found in zip(form.layers.values(), pairs, decode(form, encode(form, pairs), torch.float64), strict=True):
        before, after = (joined(layer.shape, *own).double() for own in (pair, found))
        whole, error = before - layer.mean.double()[:, None], after - before
        sizes = [(torch.einsum("gij,bgtj->bgti", layer.transform, own)).square().mean((0, 2)).sqrt() for own in (error, whole)]
        assert float((sizes[0] / sizes[1]).max()) < loss


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_codes_come_back_in_the_asked_dtype(dtype: torch.dtype) -> None:
    form = made().in_place
    codes = encode(form, [(keys.to(dtype), values.to(dtype)) for keys, values in states(form)])
    assert {own.dtype for own in codes} == {torch.uint8}
    for low, high in zip(decode(form, codes, dtype), decode(form, codes, torch.float64), strict=True):
        for mine, theirs in zip(low, high, strict=True):
            assert mine.dtype == dtype
            assert float((mine.double() - theirs).abs().max()) <= 8 * torch.finfo(dtype).eps * float(theirs.abs().max()) + 1e-12


@pytest.mark.parametrize("name", ["in_place", "slots"])
def test_a_token_takes_the_bytes_that_the_codec_says_whatever_is_beside_it(name: str) -> None:
    for codec in (made(), made().at(0.3), made().at(0.6)):
        form: FixedForm = getattr(codec, name)
        pairs = states(form, tokens=7)
        codes = encode(form, pairs)
        assert sum(own.shape[1] * own.shape[2] for own in codes) == form.nbytes
        assert {(own.shape[0], own.shape[3]) for own in codes} == {(2, 7)}
        alone = encode(form, [(keys[:1, :, 3:4], values[:1, :, 3:4]) for keys, values in pairs])
        assert all(torch.equal(own[:1, ..., 3:4], one) for own, one in zip(codes, alone, strict=True))
    assert made().bytes_ratio == made().bytes_per_token / 256


def test_long_prompts_are_encoded_in_pieces_of_the_same_codes() -> None:
    form = made().in_place
    pairs = states(form, tokens=5000)
    spans = [slice(0, 2500), slice(2500, None), slice(0, 0)]
    parts = [encode(form, [(keys[:, :, span], values[:, :, span]) for keys, values in pairs]) for span in spans]
    assert all(torch.equal(own, torch.cat(pieces, 3)) for own, *pieces in zip(encode(form, pairs), *parts, strict=True))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("width", [1, 3, 8, 16, 24])
def test_numbers_that_are_none_give_finite_vectors_and_leave_other_tokens_and_groups_alone(number: float, width: int) -> None:
    form = form_of("slots", width)
    pairs = states(form, tokens=5)
    expected = decode(form, encode(form, pairs))
    for pair in pairs:
        for own in pair:
            own[0, 1, 2, 3] = number
    untouched = torch.ones(2, 2, 5, dtype=torch.bool)
    untouched[0, 1, 2] = False
    for pair, whole in zip(decode(form, encode(form, pairs)), expected, strict=True):
        for found, other in zip(pair, whole, strict=True):
            assert bool(found.isfinite().all())
            assert torch.equal(found[untouched], other[untouched])


@pytest.mark.parametrize("metric", ["loss", "plain"])
def test_heads_that_are_always_the_same_cost_nothing_and_come_back(metric: str) -> None:
    model = tiny.llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[:8] = 0
        model.model.layers[1].self_attn.v_proj.weight[8:] = 0
    codec = calibrate(model, metric=metric)
    assert all(bool(tensor.isfinite().all()) for tensor in codec.tensors().values())
    for form in (codec.in_place, codec.slots, codec.at(1.5).in_place):
        pairs = states(made().in_place, tokens=6)
        pairs[0][0][:, 0], pairs[1][1][:, 1] = 0, 0
        read = decode(form, encode(form, pairs))
        assert float(read[0][0][:, 0].abs().max()) < 1e-4
        assert float(read[1][1][:, 1].abs().max()) < 1e-4


def test_a_layer_without_bits_is_its_mean() -> None:
    form = form_of("in_place", 0)
    pairs = states(form, tokens=3)
    codes = encode(form, pairs)
    assert {own.shape for own in codes} == {(2, 1, 0, 3)}
    assert form.nbytes == 0
    for layer, pair in zip(form.layers.values(), decode(form, codes), strict=True):
        vectors = joined(layer.shape, *pair)
        torch.testing.assert_close(vectors, layer.mean[:, None].expand_as(vectors), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ratio", [0.07, 0.3, 1.0])
def test_other_bits_are_those_of_a_codec_calibrated_with_them_at_once(ratio: float) -> None:
    at_once, later = calibrate(bytes_ratio=ratio), made().at(ratio)
    assert (later.settings, later.fingerprint) == (at_once.settings, at_once.fingerprint)
    assert all(torch.equal(tensor, at_once.tensors()[name]) for name, tensor in later.tensors().items())
    again = later.at(0.125)
    assert all(torch.equal(tensor, made().tensors()[name]) for name, tensor in again.tensors().items())


@pytest.mark.parametrize("ratio", [0, -1, 1.6, float("nan"), True, "0.1", None])
def test_shares_that_are_none_are_refused(ratio: Any) -> None:
    with pytest.raises(ConfigError, match=r"bytes_ratio: expected a number above 0 and up to 1\.5"):
        made().at(ratio)


def test_layers_and_shapes_that_do_not_fit_are_refused_by_name() -> None:
    keys, values = (list(side) for side in zip(*states(made().in_place, tokens=3), strict=True))
    codes = made().encode(keys, values)
    for call, name in [
        (lambda: made().encode(keys[:3], values), "keys, values: expected one tensor for each of 4 layers"),
        (lambda: made().decode(codes[:3]), "codes: expected records for each of 4 layers"),
        (lambda: made().encode([*keys[:3], keys[3][:, :1]], values), r"layer 3: expected keys and values"),
        (lambda: made().encode(keys, [values[0][..., :4], *values[1:]]), "layer 0"),
        (lambda: made().encode([None, *keys[1:]], values), "keys and values of layer 0: .*got .None"),
        (lambda: made().encode(keys, [values[0][:, :, :2], *values[1:]]), "layer 0: .*of the same tokens"),
        (lambda: made().encode([keys[0][:1], *keys[1:]], values), "as many rows in all layers"),
        (lambda: made().pack({7: keys[0][0]}, {7: values[0][0]}), "expected layers of .*got 'layer 7'"),
    ]:
        with pytest.raises(ConfigError, match=name):
            call()


def test_layers_that_are_not_coded_are_left_alone() -> None:
    codec = calibrate(tiny.gemma2())
    side = torch.randn(1, 2, 3, 8)
    codes = codec.encode([None, side, side, side], [None, side, None, side])
    assert [own is None for own in codes] == [own is None for own in codec.decode(codes)] == [True, False, True, False]


def test_rows_are_packed_one_by_one_and_come_back_together() -> None:
    codec = made().at(0.75)
    keys, values = (list(side) for side in zip(*states(made().in_place, tokens=70), strict=True))
    codes = codec.encode(keys, values)
    assert [len(records) for records in codes] == [2] * 4
    for key, value, found in zip(keys, values, codec.decode(codes, torch.float64), strict=True):
        for expected, read in zip((key, value), found, strict=True):
            assert read.dtype == torch.float64
            assert float((expected - read).square().mean()) < 1e-3 * float(expected.square().mean())


def test_processes_that_share_the_heads_have_the_codes_of_theirs() -> None:
    codec = calibrate(shards=2)
    [pair, *_] = states(codec.in_place, tokens=5)
    whole = codec.in_place.coder(0, torch.float32, torch.device("cpu")).encode(*pair)
    for rank in range(2):
        coder = codec.of_heads(HeadShard(rank, 2)).in_place.coder(0, torch.float32, torch.device("cpu"))
        assert torch.equal(coder.encode(*(states[:, rank : rank + 1] for states in pair)), whole[:, rank : rank + 1])
        assert_packs_the_heads_of(rank, codec)
    with pytest.raises(UnsupportedError, match=r"2 heads share a basis.*Calibrate with shards=2"):
        made().of_heads(HeadShard(0, 2))
    with pytest.raises(ConfigError, match="shards"):
        calibrate(shards=3)


def assert_packs_the_heads_of(rank: int, codec: KVCodec) -> None:
    """A process packs its heads as all are packed together, and in its share of the bytes."""
    own, pairs = codec.of_heads(HeadShard(rank, 2)), states(codec.in_place, tokens=130)
    keys, values = ({layer: pair[side][0] for layer, pair in enumerate(pairs)} for side in (0, 1))
    records, heads = codec.pack(keys, values), slice(rank, rank + 1)
    of_heads = own.pack(*({layer: side[heads] for layer, side in sides.items()} for sides in (keys, values)))
    assert 0.3 < sum(map(len, of_heads.values())) / sum(map(len, records.values())) < 0.7
    for layer in range(4):
        [whole], [found] = codec.unpack([(layer, records[layer], 0, None)]), own.unpack([(layer, of_heads[layer], 0, None)])
        for one, other, exact in zip(whole, found, pairs[layer], strict=True):
            # What an integer stands for depends a little on how large the token's other heads are.
            assert float((one[heads] - other).square().mean()) < 0.05 * float((one - exact[0]).square().mean())


def test_it_shows_itself_in_a_line() -> None:
    facts = f"4 of 4 layers, {made().bytes_ratio:.4f} of the bytes, rotation='aware', metric='loss', recent=0"
    assert repr(made()) == f"KVCodec({facts}, model {made().fingerprint})"

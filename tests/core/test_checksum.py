"""Every byte of every kind of tensor counts, wherever it lies, and writes are noticed."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels import checksum
from hf_kvcaches.kernels.checksum import digest_of
from tests.core.fingerprint_helpers import changed, llama, nudge

# Quantised, offloaded, odd tensors


def test_dynamically_quantised_weights_are_read_though_they_are_no_parameters():
    quantise = torch.ao.quantization.quantize_dynamic
    one, same = (quantise(llama(), {torch.nn.Linear}, dtype=torch.qint8) for _ in range(2))
    other_weights = llama()
    nudge("model.layers.1.mlp.up_proj.weight")(other_weights)
    other = quantise(other_weights, {torch.nn.Linear}, dtype=torch.qint8)
    assert ModelFingerprint.of(one) == ModelFingerprint.of(same)
    assert changed(ModelFingerprint.of(other), ModelFingerprint.of(one)) == {"weights"}
    assert "weights" in changed(ModelFingerprint.of(one), ModelFingerprint.of(llama()))


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offloaded_weights_are_found_where_accelerate_keeps_them(offload, tmp_path):
    expected = ModelFingerprint.of(llama())
    model = llama()
    cpu_offload(model) if offload == "cpu" else disk_offload(model, str(tmp_path))
    assert next(model.parameters()).is_meta
    assert ModelFingerprint.of(model) == expected
    model(torch.arange(5)[None])
    assert ModelFingerprint.of(model) == expected


def test_a_compiled_model_is_the_model_that_it_compiles():
    model = llama()
    assert ModelFingerprint.of(torch.compile(model)) == ModelFingerprint.of(model)


TENSORS = {
    "fp32": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0).reshape(4, 3).t(),
    "bf16": torch.arange(12).reshape(3, 4).to(torch.bfloat16),
    "fp8": torch.arange(12).reshape(3, 4).float().to(torch.float8_e4m3fn),
    "int8": torch.arange(12, dtype=torch.int8).reshape(3, 4),
    "uint8": torch.arange(12, dtype=torch.uint8).reshape(3, 4),
    "bool": torch.arange(12).reshape(3, 4) > 4,
    "complex": torch.complex(torch.arange(12.0), torch.ones(12)).reshape(3, 4).conj(),
    "flat": torch.arange(12.0),
    "empty": torch.empty(0, 4),
    "also empty": torch.empty(4, 0),
    "scalar": torch.tensor(3.0),
    "one": torch.tensor([3.0]),
    "qint8": torch.quantize_per_tensor(torch.arange(12.0), 0.5, 3, torch.qint8),
    "qint8, other scale": torch.quantize_per_tensor(torch.arange(12.0) * 2, 1.0, 3, torch.qint8),
    "qint8 by channel": torch.quantize_per_channel(torch.ones(3, 4), torch.ones(3), torch.zeros(3, dtype=torch.int64), 0, torch.qint8),
}


def test_tensors_that_differ_in_dtype_shape_or_content_have_different_digests():
    digests = {name: digest_of(tensor) for name, tensor in TENSORS.items()}
    assert len(set(digests.values())) == len(TENSORS)
    assert all(digest_of(tensor.clone()) == digests[name] for name, tensor in TENSORS.items())
    assert digest_of(TENSORS["transposed"].contiguous()) == digests["transposed"]


def test_tensors_of_wrapper_classes_are_read_through():
    from torch.testing._internal.two_tensor import TwoTensor

    def two(last: float) -> torch.Tensor:
        return TwoTensor(torch.ones(3), torch.tensor([1.0, 2.0, last]))

    assert digest_of(two(3.0)) == digest_of(two(3.0)) != digest_of(two(4.0))
    assert digest_of(two(3.0)) != digest_of(torch.ones(3))


@pytest.mark.parametrize("value", [object(), torch.eye(3).to_sparse()], ids=["object", "sparse"])
def test_state_that_cannot_be_read_is_refused_by_name(value):
    with pytest.raises(UnsupportedError, match=r"some\.place"):
        digest_of(value, "some.place")


def test_weights_of_inference_mode_can_be_read():
    with torch.inference_mode():
        model = llama()
        assert ModelFingerprint.of(model) == ModelFingerprint.of(llama())


# Checksums


@pytest.mark.parametrize("size", [0, 1, 3, 1 << 15, (1 << 15) + 1, 1_000_003])
def test_a_checksum_does_not_depend_on_how_much_is_added_up_at_a_time(size, monkeypatch):
    words = torch.randint(-(2**62), 2**62, (size,), generator=torch.Generator().manual_seed(size))
    one_row_at_a_time = digest_of(words)
    monkeypatch.setattr(checksum, "_CPU_ROWS", 64)
    assert digest_of(words) == one_row_at_a_time


@given(st.integers(0, 1 << 31), st.data())
def test_a_single_bit_counts_and_two_changes_that_cancel_in_a_plain_sum(seed, data):
    size = data.draw(st.sampled_from([3, 4096, 70_000, 600_000]))
    words = torch.randint(-(1 << 62), 1 << 62, (size,), generator=torch.Generator().manual_seed(seed))
    before, bit = digest_of(words), data.draw(st.integers(0, 63))
    words[data.draw(st.integers(0, size - 1))] ^= 1 << bit if bit < 63 else -(1 << 63)
    assert (changed_once := digest_of(words)) != before
    distance = data.draw(st.sampled_from([1, 16, 2039, 2048, 15 * 2039, 16 * 2048]).filter(lambda distance: distance < size))
    place = data.draw(st.integers(0, size - 1 - distance))
    words[[place, place + distance]] += torch.tensor([1, -1]) << bit
    assert digest_of(words) != changed_once


SIGN = -(1 << 63)


@given(st.sampled_from([(64, 512), (300, 1536), (257, 2048), (128, 2039), (96, 4096)]), st.data())
def test_sign_bits_of_pairs_rectangles_rows_and_columns_count(shape, data):
    # Modulo 2^64 two of them cancel.
    words = torch.randint(-(1 << 62), 1 << 62, shape, generator=torch.Generator().manual_seed(0))
    before = digest_of(words)
    pairs = [data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True)) for size in shape]
    few = {"pair in a row": (pairs[0][:1], pairs[1]), "pair in a column": (pairs[0], pairs[1][:1]), "rectangle": pairs}
    whole = {"rows": (pairs[0], None), "columns": (None, pairs[1]), "odd columns": (None, range(1, shape[1], 2)), "all": (None, None)}
    where = data.draw(st.sampled_from(list((few | whole).values())))
    rows, columns = (torch.tensor(range(size) if some is None else some) for some, size in zip(where, shape, strict=True))
    words[rows[:, None], columns] ^= SIGN
    assert digest_of(words) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 512), (300, 1536), (511, 1021), (2039, 64), (2 * 2039, 64), (2048, 8)])
@pytest.mark.parametrize("change", ["negated", "transposed", "rows", "columns", "blocks", "elements", "rolled", "reversed"])
def test_rearranged_numbers_and_other_signs_count(dtype, shape, change) -> None:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows, columns = shape
    flat = numbers.reshape(-1).clone()
    flat[[1, -2]] = flat[[-2, 1]]
    changed = {
        "negated": -numbers,
        "transposed": numbers.t().reshape(shape),
        "rows": numbers[[*range(1, rows), 0]],
        "columns": numbers[:, [1, 0, *range(2, columns)]],
        "blocks": torch.cat([numbers[rows // 2 :], numbers[: rows // 2]]),
        "elements": flat.view(shape),
        "rolled": numbers.reshape(-1).roll(2048).view(shape),
        "reversed": numbers.flip(0),
    }[change]
    assert digest_of(changed) != digest_of(numbers)

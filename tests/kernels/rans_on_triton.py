"""The Triton back-end of the packed form gives bit for bit what PyTorch gives. Run by `test_triton.py` in its own process.

On a machine without a GPU that process has TRITON_INTERPRET=1, which Triton and its own library must see when they are first imported.
"""

from functools import cache

import pytest
import torch

from hf_kvcaches import ArtifactError
from hf_kvcaches.codec.joint import PackedForm
from hf_kvcaches.codec.packing import Span
from tests.codec.measured import made, packed, states
from tests.kernels.triton_process import DEVICE

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_a_number")


@cache
def form(ratio: float) -> PackedForm:
    return made(ratio).packed


@cache
def record(layer: int, tokens: int, ratio: float) -> torch.Tensor:
    keys, values = states(80)[layer]
    # Some integers have no symbol.
    sizes = torch.where(torch.arange(tokens) % 7 == 3, 30.0, 1.0)[:, None]
    return packed(made(ratio), {layer: (keys[:, :tokens] * sizes, values[:, :tokens] * sizes)})[layer].to(DEVICE)


def assert_same(spans: list[Span], ratio: float) -> None:
    expected, found = (form(ratio).unpack(spans, backend=backend) for backend in ("torch", "triton"))
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 31, 63, 64, 65])
def test_tiles_of_all_lengths_are_decoded(tokens: int) -> None:
    assert_same([Span(1, record(1, tokens, 0.05))], 0.05)


def test_integers_with_low_bits_and_without_symbols_are_decoded() -> None:
    assert int(form(0.4).quantizer.plans[2].split) > 0
    assert_same([Span(2, record(2, 9, 0.4))], 0.4)


def test_spans_of_several_layers_and_lengths_are_decoded_together() -> None:
    assert_same([Span(0, record(0, 70, 0.05), 66, 68), Span(3, record(3, 5, 0.05)), Span(0, record(0, 70, 0.05), 3, 3)], 0.05)


def test_damaged_words_are_refused() -> None:
    data = record(1, 31, 0.05)
    for place in (30, len(data) // 2, len(data) - 3):
        other = data.clone()
        other[place] ^= 64
        refused = []
        for backend in ("torch", "triton"):
            try:
                form(0.05).unpack([Span(1, other)], backend=backend)
            except ArtifactError:
                refused.append(backend)
        assert refused in ([], ["torch", "triton"])

"""The format of codes: bytes lie as documented, and integers of all widths survive packing."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.kernels import code_format
from hf_kvcaches.kernels.code_format import WIDTHS, CodeLayout, pack, packed_bytes, unpack
from tests.kernels.codes_cases import levels_of

COUNTS = st.tuples(*(st.integers(0, 3).map(lambda rows, bits=bits: rows * 8 // bits) for bits in code_format.PLANES))


def integers_of(widths: list[int], *shape: int, seed: int = 0) -> torch.Tensor:
    """Random integers, (*shape, directions, 5), of which the first token has the least and the second the greatest."""
    bits = torch.tensor(widths, dtype=torch.int64)[:, None]
    numbers = (torch.rand(*shape, len(widths), 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2.0**bits).long()
    numbers[..., 0], numbers[..., 1] = 0, (2**bits - 1)[:, 0]
    return numbers


def unpacked(layout: CodeLayout, packed: torch.Tensor, directions: int) -> torch.Tensor:
    """The integers of directions, (..., directions, tokens), of what `CodeLayout.pack` gave."""
    parts = (unpack(packed, layout.counts).long() + (1 << layout.bits - 1)[:, None]) << layout.shifts[:, None]
    integers = parts.new_zeros(*parts.shape[:-2], directions, parts.shape[-1])
    return integers.index_add_(-2, layout.directions[~layout.filled], parts[..., ~layout.filled, :])


@given(counts=COUNTS, tokens=st.sampled_from([0, 1, 7, 64]), seed=st.integers(0, 1000))
def test_parts_survive_packing_for_all_counts(counts: code_format.Counts, tokens: int, seed: int) -> None:
    highest = torch.tensor([2**bits for bits, count in zip(code_format.PLANES, counts, strict=True) for _ in range(count)])
    generator = torch.Generator().manual_seed(seed)
    parts = (torch.rand(2, 3, sum(counts), tokens, generator=generator) * highest[:, None]).to(torch.uint8)
    packed = pack(parts, counts)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, sum(count * bits // 8 for bits, count in zip(code_format.PLANES, counts, strict=True)), tokens)
    levels = unpack(packed, counts)
    assert levels.dtype == torch.int8
    assert torch.equal(levels.long(), parts.long() - highest[:, None] // 2)
    assert torch.equal(levels.double(), levels_of(packed, counts)[:, :, :-1])


def test_each_byte_holds_the_parts_that_the_format_says() -> None:
    fours, twos, ones = [0, 1, 8, 15], [0, 3, 2, 1], [1, 0, 0, 1, 0, 0, 0, 1]
    packed = pack(torch.tensor([[200], *([number] for number in fours + twos + ones)]).to(torch.uint8), (1, 4, 4, 8))
    assert packed.flatten().tolist() == [200, 0 + 8 * 16, 1 + 15 * 16, 0 + 3 * 4 + 2 * 16 + 1 * 64, 1 + 8 + 128]


def test_integers_are_cut_from_their_high_bits_down() -> None:
    layout = CodeLayout.of(torch.tensor([3, 16, 6]))
    assert layout.counts == (2, 2, 4, 8)
    assert layout.bits.tolist() == [8, 8, 4, 4] + 4 * [2] + 8 * [1]
    # Two bytes of direction 1; four bits of direction 2; two bits of both others; one bit of direction 0.
    parts = zip(layout.directions.tolist(), layout.shifts.tolist(), layout.filled.tolist(), strict=True)
    assert [(direction, shift) for direction, shift, filled in parts if not filled] == [(1, 8), (1, 0), (2, 2), (0, 1), (2, 0), (0, 0)]
    packed = layout.pack(torch.tensor([[0b101], [0x1234], [0b110110]])).flatten()
    assert (packed & torch.tensor([255, 255, 15, 15, 1])).tolist() == [0x12, 0x34, 0b1101, 0b10 + (0b10 << 2), 1]


@given(widths=st.lists(st.sampled_from((0, *WIDTHS)), max_size=40), seed=st.integers(0, 1000))
def test_integers_of_mixed_widths_survive_packing_in_as_many_bytes_as_announced(widths: list[int], seed: int) -> None:
    bits = torch.tensor(widths, dtype=torch.int64)
    layout, numbers = CodeLayout.of(bits), integers_of(widths, 2, 3, seed=seed)
    packed = layout.pack(numbers)
    assert packed.shape == (2, 3, packed_bytes(bits), 5)
    assert torch.equal(unpacked(layout, packed, len(widths)), numbers)


def test_levels_that_fill_up_a_row_belong_to_no_direction() -> None:
    layout = CodeLayout.of(torch.tensor([1, 2]))
    assert layout.counts == (0, 0, 4, 8)
    assert layout.filled.tolist() == [False, True, True, True, False] + 7 * [True]
    numbers = torch.tensor([[1], [3]])
    packed = layout.pack(numbers)
    packed ^= torch.tensor([[0b11111100], [0b11111110]]).to(torch.uint8)
    assert torch.equal(unpacked(layout, packed, 2), numbers)


def test_slices_of_a_larger_buffer_are_unpacked() -> None:
    layout, numbers = CodeLayout.of(torch.tensor([8, 4, 2, 1])), integers_of([8, 4, 2, 1], 2)
    buffer = torch.full((2, 9, 50), 255, dtype=torch.uint8)
    buffer[:, 3:7, 10:15] = layout.pack(numbers)
    assert torch.equal(unpacked(layout, buffer[:, 3:7, 10:15], 4), numbers)

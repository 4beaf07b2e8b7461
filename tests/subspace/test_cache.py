"""SubspaceCache equals its plain reference, whatever the ranks, windows, padding, chunks and bits."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import SubspaceBases, SubspaceCache
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.coefficients import TILE
from tests import tiny
from tests.reference.subspace import SubspaceOracle

TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}
# The rows of levels are those of coefficients, which other tests hold to their reference.
CODED = [None, pytest.param("int8", marks=pytest.mark.full)]
# A coefficient halfway between two levels may be rounded either way.
BITS_TOLERANCE = {"atol": 3e-3, "rtol": 3e-3}
PROMPT = 40


@cache
def pair(rotation: str = "aware", ranks: str = "even") -> tuple[Any, SubspaceBases]:
    """A tiny grouped model and bases for it."""
    model = tiny.llama()
    texts = [tiny.ids(1, 96, seed=seed)[0].tolist() for seed in range(4)]
    options: dict[str, Any] = {"rank": (3, 4)} if ranks == "even" else {"bytes_ratio": 0.5, "multiple_of": 1}
    return model, SubspaceBases.calibrate(model, None, texts, rotation=rotation, progress=False, **options)


def run(model: Any, given: Any, text: torch.Tensor, chunks: list[int], mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of every token, fed in so many at a time."""
    logits, start = [], 0
    with torch.no_grad():
        for tokens in chunks:
            stop, options = start + tokens, {}
            if mask is not None:
                options["attention_mask"] = mask[:, :stop]
                options["position_ids"] = (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:]
            logits.append(model(text[:, start:stop], past_key_values=given, **options).logits)
            start = stop
    return torch.cat(logits, 1)


def compare(model: Any, bases: Any, chunks: list[int], *, rows: int = 2, mask: torch.Tensor | None = None, **options: Any) -> None:
    text = tiny.ids(rows, sum(chunks))
    plain = tiny.llama()
    real = None if mask is None else mask[:, : chunks[0]].bool()
    tile = TILE if options.get("coefficients") == "int8" else None
    window = {"sinks": options.get("sinks", 4), "recent": options.get("recent", 64)}
    oracle = SubspaceOracle(plain.config, bases, tile=tile, real=real, **window)
    expected = run(plain, oracle, text, chunks, mask)
    got = run(model, SubspaceCache(model, bases, **options), text, chunks, mask)
    if mask is not None:
        expected, got = expected[mask.bool()], got[mask.bool()]
    torch.testing.assert_close(got, expected, **(TOLERANCE if tile is None else BITS_TOLERANCE))


STEPS = [1] * 30


@pytest.mark.parametrize("ranks", ["even", "uneven"])
@pytest.mark.parametrize("rotation", ["aware", "post"])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (2, 7), (4, 0), (0, 5)])
def test_steps_equal_the_reference(rotation: str, ranks: str, sinks: int, recent: int) -> None:
    model, bases = pair(rotation, ranks)
    compare(model, bases, [PROMPT, *STEPS], sinks=sinks, recent=recent)


@pytest.mark.parametrize("rotation", ["aware", "post"])
@pytest.mark.parametrize("chunks", [[1] * 50, [5, 9, 1, 1, 20, 1, 2], [3, 30, 1, 1], [64, 17, 1]])
def test_chunks_equal_the_reference(rotation: str, chunks: list[int]) -> None:
    model, bases = pair(rotation)
    compare(model, bases, chunks, sinks=2, recent=6)


@pytest.mark.parametrize("chunks", [[PROMPT, *STEPS], [20, 20, *STEPS]])
@pytest.mark.parametrize("recent", [0, 7])
def test_left_padded_rows_equal_the_reference(recent: int, chunks: list[int]) -> None:
    model, bases = pair()
    mask = torch.ones(3, sum(chunks), dtype=torch.long)
    mask[0, :11] = 0
    mask[2, :1] = 0
    compare(model, bases, chunks, rows=3, mask=mask, sinks=2, recent=recent)


@pytest.mark.parametrize("rotation", ["aware", "post"])
@pytest.mark.parametrize("recent", [0, 7])
def test_eight_bits_equal_the_reference(rotation: str, recent: int) -> None:
    model, bases = pair(rotation, "uneven")
    compare(model, bases, [PROMPT, *STEPS, 5, 1, 1], sinks=2, recent=recent, coefficients="int8")


@pytest.mark.parametrize("rotation", ["aware", "post"])
def test_full_rank_equals_a_dynamic_cache(rotation: str) -> None:
    model = tiny.llama()
    size = model.config.head_dim
    bases = SubspaceBases.calibrate(model, None, [tiny.ids(1, 96)[0].tolist()], rank=(size, size), rotation=rotation, progress=False)
    text, plain = tiny.ids(2, 70), tiny.llama()
    chunks = [30, 10, *STEPS]
    expected = run(plain, DynamicCache(config=plain.config), text, chunks)
    got = run(model, SubspaceCache(model, bases, sinks=1, recent=3), text, chunks)
    torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("rotation", ["aware", "post"])
def test_full_rank_in_bfloat16_is_no_further_from_float32_than_a_dynamic_cache(rotation: str) -> None:
    exact, half, plain = tiny.llama(), tiny.llama().bfloat16(), tiny.llama().bfloat16()
    size = half.config.head_dim
    bases = SubspaceBases.calibrate(half, None, [tiny.ids(1, 96)[0].tolist()], rank=(size, size), rotation=rotation, progress=False)
    text, chunks = tiny.ids(2, 100), [30, 10, *STEPS, 30]
    expected = run(exact.bfloat16().float(), DynamicCache(config=exact.config), text, chunks)
    usual = (run(plain, DynamicCache(config=plain.config), text, chunks).float() - expected).abs().mean()
    ours = (run(half, SubspaceCache(half, bases, sinks=1, recent=3), text, chunks).float() - expected).abs().mean()
    assert ours < 1.25 * usual


@pytest.mark.parametrize("coefficients", CODED)
@pytest.mark.parametrize("rotation", ["aware", "post"])
@pytest.mark.parametrize("recent", [0, 6])
@pytest.mark.parametrize("chunks", [[30, *STEPS], [60], [7, 13, 20, *([1] * 20)], [1] * 60])
def test_a_row_with_padding_anywhere_is_that_row_alone(chunks: list[int], recent: int, rotation: str, coefficients: Any) -> None:
    # In float64, so that no coefficient is rounded to another level because of arithmetic in another order.
    model, bases = tiny.llama().double(), dataclasses.replace(pair(rotation)[1], fingerprint=None)
    text, mask = tiny.ids(4, 60), torch.ones(4, 60, dtype=torch.long)
    mask[0, :11] = 0
    mask[1, 28:33] = 0
    mask[2, 3:50:4] = 0
    mask[2, 40:] = 0
    options: dict[str, Any] = {"sinks": 2, "recent": recent, "coefficients": coefficients}
    together = run(model, SubspaceCache(model, bases, **options), text, chunks, mask)
    ends = torch.tensor(chunks).cumsum(0)
    for row, real in enumerate(mask.bool()):
        # The row's own tokens, in the same chunks.
        own = [int(real[end - tokens : end].sum()) for end, tokens in zip(ends.tolist(), chunks, strict=True)]
        alone = run(model, SubspaceCache(model, bases, **options), text[row : row + 1, real], [tokens for tokens in own if tokens])
        torch.testing.assert_close(together[row, real], alone[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("coefficients", [None, "int8"])
@pytest.mark.parametrize("recent", [0, 6])
def test_recorded_tokens_are_taken_back_exactly(coefficients: Any, recent: int) -> None:
    model, bases = pair()
    text = tiny.ids(2, 90)
    given = SubspaceCache(model, bases, sinks=2, recent=recent, coefficients=coefficients)
    run(model, given, text[:, :45], [40, 5])
    twin = copy.deepcopy(given)
    given.activate_past_recording()
    run(model, given, text[:, 45:65], [3, 17])
    given.crop(-18)
    run(model, twin, text[:, 45:47], [1, 1])
    expected = run(model, twin, text[:, 70:80], [1] * 10)
    # The model itself rounds blocks of tokens otherwise than single ones.
    torch.testing.assert_close(run(model, given, text[:, 70:80], [1] * 10), expected, atol=2e-5, rtol=2e-5)


def test_taking_back_what_the_window_lost_is_refused() -> None:
    model, bases = pair()
    given = SubspaceCache(model, bases, sinks=2, recent=6)
    run(model, given, tiny.ids(1, 30), [30])
    with pytest.raises(UnsupportedError, match="activate_past_recording"):
        given.crop(-1)


def test_bytes_are_those_of_coefficients_and_ends() -> None:
    model, bases = pair()
    given = SubspaceCache(model, bases, sinks=2, recent=6)
    run(model, given, tiny.ids(1, 512), [512])
    full = DynamicCache(config=model.config)
    run(tiny.llama(), full, tiny.ids(1, 512), [512])
    owned = sum(t.numel() * 4 for name, t in given.owned_tensors().items() if "coefficients" in name)
    whole = sum(layer.keys.numel() * 8 for layer in full.layers)
    size = model.config.head_dim
    assert owned <= whole * (3 + 4) / (2 * size) * 1.13


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sinks": -1}, "sinks"),
        ({"recent": 1.5}, "recent"),
        ({"coefficients": "int4"}, "coefficients"),
        ({"bases_dtype": torch.int8}, "bases_dtype"),
        ({"bases_dtype": torch.float8_e4m3fn}, "bases_dtype"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options: dict[str, Any], name: str) -> None:
    model, bases = pair()
    with pytest.raises(ConfigError, match=name):
        SubspaceCache(model, bases, **options)


def test_bases_that_were_first_used_in_inference_mode_let_gradients_through() -> None:
    model = tiny.llama()
    bases = SubspaceBases.calibrate(model, None, [tiny.ids(1, 96)[0].tolist()], rank=4, progress=False)
    with torch.inference_mode():
        run(model, SubspaceCache(model, bases, sinks=0, recent=0), tiny.ids(1, 20), [10, 10])
    cache = SubspaceCache(model, bases, sinks=0, recent=0)
    for span in tiny.ids(1, 20).split(10, dim=1):
        logits = model(span, past_key_values=cache).logits
    logits.sum().backward()
    assert float(model.model.layers[0].self_attn.k_proj.weight.grad.abs().max()) > 0

"""SubspaceCache with a codec equals its plain reference, whatever the bits, windows, padding and chunks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import KVCodec, SubspaceCache
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError
from tests import testbed, tiny
from tests.reference.subspace import SubspaceOracle
from tests.subspace.running import BITS, calibrated, padded_anywhere, pair, run

# In float64, so that no coefficient gets another code because of arithmetic in another order; blocks have their scores in float32.
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}
# A model's blocks of tokens are rounded otherwise than single ones.
ROUNDING = {"atol": 2e-5, "rtol": 2e-5}
PROMPT, STEPS = 40, [1] * 30


def compare(
    model: Any,
    codec: KVCodec,
    chunks: list[int],
    *,
    rows: int = 2,
    mask: torch.Tensor | None = None,
    build: Any = tiny.llama,
    **window: int,
) -> None:
    model, plain, text = model.double(), build().double(), tiny.ids(rows, sum(chunks))
    oracle = SubspaceOracle(plain.config, codec, real=None if mask is None else mask.bool(), **window)
    expected = run(plain, oracle, text, chunks, mask)
    got = run(model, SubspaceCache(model, codec, **window), text, chunks, mask)
    if mask is not None:
        expected, got = expected[mask.bool()], got[mask.bool()]
    torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rotation", ["aware", "post"])
# With 4 sinks alone a coefficient lies on the edge of its code, and rounding decides.
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (2, 7), (3, 0), (0, 6)])
def test_steps_equal_the_reference(rotation: str, bits: str, sinks: int, recent: int) -> None:
    compare(*pair(rotation, bits), [PROMPT, *STEPS], sinks=sinks, recent=recent)


@pytest.mark.parametrize("rotation", ["aware", "post"])
@pytest.mark.parametrize("chunks", [[1] * 50, [5, 9, 1, 1, 20, 1, 2], [3, 30, 1, 1], [64, 17, 1]])
def test_chunks_equal_the_reference(rotation: str, chunks: list[int]) -> None:
    compare(*pair(rotation), chunks, sinks=2, recent=6)


@pytest.mark.parametrize("rotation", ["aware", "post"])
@pytest.mark.parametrize("recent", [0, 6])
@pytest.mark.parametrize("chunks", [[30, *STEPS], [60], [30, 30], [7, 13, 20, *([1] * 20)], pytest.param([1] * 60, marks=pytest.mark.full)])
def test_rows_with_padding_anywhere_equal_the_reference(chunks: list[int], recent: int, rotation: str) -> None:
    compare(*pair(rotation), chunks, rows=4, mask=padded_anywhere(), sinks=2, recent=recent)


@pytest.mark.parametrize("build", [tiny.gemma2, tiny.gpt2])
def test_soft_caps_windows_and_models_without_rotation_equal_the_reference(build: Any) -> None:
    codec = KVCodec.calibrate(build(), None, [tiny.ids(1, 96)[0].tolist()], 0.3, progress=False)
    compare(build(), codec, [30, 10, *[1] * 20], build=build, sinks=1, recent=5)


@pytest.mark.parametrize("rotation", ["aware", "post"])
def test_a_codec_of_float32_is_no_further_from_it_in_bfloat16_than_a_dynamic_cache(rotation: str) -> None:
    half, plain = tiny.llama().bfloat16(), tiny.llama().bfloat16()
    exact, text, chunks = tiny.llama().bfloat16().float(), tiny.ids(2, 100), [30, 10, *STEPS, 30]
    codec = calibrated(rotation).at(1.0)
    expected = run(exact, DynamicCache(config=exact.config), text, chunks)
    usual = (run(plain, DynamicCache(config=plain.config), text, chunks).float() - expected).abs().mean()
    given = SubspaceCache(half, codec, sinks=1, recent=3)
    ours = (run(half, given, text, chunks).float() - expected).abs().mean()
    assert ours < 1.25 * usual
    assert given.layers[0].exact_keys.dtype == torch.bfloat16


def test_recorded_tokens_of_padded_rows_are_taken_back_exactly() -> None:
    model, codec = pair()
    text, mask, given = tiny.ids(2, 90), torch.ones(2, 90, dtype=torch.long), SubspaceCache(model, codec, sinks=2, recent=3)
    mask[0, :9] = 0
    run(model, given, text[:, :45], [45], mask)
    twin = copy.deepcopy(given)
    given.activate_past_recording()
    for held, stop in ((given, 65), (twin, 50)):
        run(model, held, text, [1] * (stop - 45), mask, start=45)
    given.crop(-15)
    torch.testing.assert_close(*(run(model, held, text, [1] * 40, mask, start=50) for held in (given, twin)), **ROUNDING)
    with pytest.raises(UnsupportedError, match="crop"):
        given.crop(-89)


def test_tokens_that_are_still_exact_are_taken_back_unrecorded() -> None:
    model, codec = pair()
    for recent, seen, left in ((20, 20, 12), (0, 33, 18), (0, 17, 1), (6, 30, 24)):
        text = tiny.ids(1, 50)
        given, expected = (SubspaceCache(model, codec, sinks=2, recent=recent) for _ in range(2))
        run(model, given, text[:, :seen], [seen])
        given.crop(left - seen)
        run(model, expected, text[:, :left], [left])
        torch.testing.assert_close(run(model, given, text[:, 33:], [1] * 17), run(model, expected, text[:, 33:], [1] * 17), **ROUNDING)


def test_taking_back_what_the_window_lost_is_refused_and_changes_nothing() -> None:
    model, codec = pair()
    given = SubspaceCache(model, codec, sinks=2, recent=6)
    run(model, given, tiny.ids(1, 30), [30])
    twin = copy.deepcopy(given)
    with pytest.raises(UnsupportedError, match="activate_past_recording"):
        given.crop(-7)
    for tokens in (1, -31):
        with pytest.raises(ConfigError, match="tokens_to_remove"):
            given.crop(tokens)
    assert torch.equal(*(run(model, each, tiny.ids(1, 3, seed=1), [1] * 3) for each in (given, twin)))


@pytest.mark.parametrize("chunks", [[40, *STEPS], [20, 20, *STEPS]])
def test_positions_of_the_callers_own_are_followed(chunks: list[int]) -> None:
    """That begin anywhere, jump, and start in the middle of a text that had none of its own."""
    model, plain, codec = tiny.llama(), tiny.llama(), calibrated("aware").at(1.5)
    text, ids, start = tiny.ids(2, 70), torch.stack([torch.arange(70) + 9, torch.arange(70)]), 0
    ids[1, 45:] += 30
    given, expected = SubspaceCache(model, codec, sinks=2, recent=3), DynamicCache(config=plain.config)
    for tokens in chunks:
        span = slice(start, start + tokens)
        options = {} if not start and len(chunks) > 31 else {"position_ids": ids[:, span]}
        with torch.no_grad():
            both = [runner(text[:, span], past_key_values=held, **options).logits for runner, held in ((model, given), (plain, expected))]
        torch.testing.assert_close(*both, atol=1e-3, rtol=1e-3)
        start += tokens


# What it goes through


def test_kernels_are_chosen_by_the_machine_that_loads_a_cache(tmp_path: Path) -> None:
    model, codec = pair()
    saved = SubspaceCache(model, codec, sinks=2, recent=6, backend="triton")
    run(model, saved, tiny.ids(1, 40), [40])
    saved.save(tmp_path / "cache.safetensors")
    loaded = SubspaceCache.load(tmp_path / "cache.safetensors", model)
    assert torch.isfinite(run(model, loaded, tiny.ids(1, 3), [1, 1, 1])).all()


def test_recording_without_a_crop_keeps_256_tokens_more() -> None:
    model, codec = pair()
    given = SubspaceCache(model, codec, sinks=2, recent=6)
    run(model, given, tiny.ids(1, 10), [10])
    given.activate_past_recording()
    text = tiny.ids(1, 100)
    for _ in range(4):
        run(model, given, text, [1] * 100)
    assert all(layer.exact_keys.shape[2] <= 2 + 6 + 15 + 256 for layer in given.layers)
    given.crop(-100)
    assert given.seen == 310
    with pytest.raises(UnsupportedError, match="crop"):
        given.crop(-300)


def test_a_codec_that_was_first_used_in_inference_mode_serves_outside_of_it() -> None:
    model = tiny.llama()
    expected = run(model, SubspaceCache(model, pair()[1], sinks=0, recent=0), tiny.ids(1, 20), [10, *[1] * 10])
    with torch.inference_mode():
        codec = pair()[1]
        began = SubspaceCache(model, codec, sinks=0, recent=0)
        run(model, began, tiny.ids(1, 20)[:, :15], [10, *[1] * 5])
    assert torch.equal(run(model, began, tiny.ids(1, 20)[:, 15:], [1] * 5), expected[:, 15:])
    cache = SubspaceCache(model, codec, sinks=0, recent=0)
    assert torch.equal(run(model, cache, tiny.ids(1, 20), [10, *[1] * 10]), expected)


# Refusals


def test_gradients_through_codes_are_refused() -> None:
    model, codec = pair()
    given = SubspaceCache(model, codec, sinks=0, recent=0)
    with pytest.raises(UnsupportedError, match="codes are integers"):
        model(tiny.ids(1, 10), past_key_values=given)
    model.requires_grad_(False)
    assert model(tiny.ids(1, 10), past_key_values=SubspaceCache(model, codec)).logits.shape[1] == 10


@pytest.mark.parametrize(
    ("options", "name"),
    [({"sinks": -1}, "sinks"), ({"recent": 1.5}, "recent"), ({"backend": "cuda"}, "backend"), ({"adaptive": {"chunk": 64}}, "adaptive")],
)
def test_what_makes_no_sense_is_refused_by_name(options: dict[str, Any], name: str) -> None:
    model, codec = pair()
    with pytest.raises(ConfigError, match=name):
        SubspaceCache(model, codec, **options)


def test_without_a_codec_of_the_model_both_ways_to_one_are_named() -> None:
    with pytest.raises(ConfigError, match=r"KVCodec\.calibrate\(.*KVCodec\.from_pretrained\("):
        SubspaceCache(tiny.llama())
    for wrong in ("folder", {"rank": 3}, tiny.llama()):
        with pytest.raises(ConfigError, match=r"codec: expected .*KVCodec"):
            SubspaceCache(tiny.llama(), wrong)
    codec = calibrated("aware")
    with pytest.raises(FingerprintMismatch, match="weights differ"):
        SubspaceCache(tiny.llama(seed=1), codec)
    with pytest.raises((ConfigError, FingerprintMismatch)):
        SubspaceCache(tiny.llama(num_hidden_layers=5), codec)


def test_other_rows_or_another_precision_than_those_held_are_refused_and_change_nothing() -> None:
    model, codec = pair()
    given = SubspaceCache(model, codec, sinks=2, recent=4)
    run(model, given, tiny.ids(2, 20), [20])
    twin = copy.deepcopy(given)
    with pytest.raises(ConfigError, match=r"holds 2 rows of torch\.float32, and the model came with 3 rows"):
        run(model, given, tiny.ids(3, 1), [1])
    assert torch.equal(*(run(model, each, tiny.ids(2, 3, seed=1), [1] * 3) for each in (given, twin)))


def test_a_mask_that_differs_by_head_is_refused() -> None:
    model, codec = pair()
    given, mask = SubspaceCache(model, codec, sinks=0, recent=0), torch.ones(1, 4, 1, 5, dtype=torch.bool)
    mask[:, 1, :, 0] = False
    run(model, given, tiny.ids(1, 4), [4])
    with torch.no_grad(), pytest.raises(UnsupportedError, match="differs by head"):
        model(tiny.ids(1, 1), past_key_values=given, attention_mask=mask)


def test_long_texts_take_little_more_than_the_share_of_their_codes() -> None:
    model, tokenizer = testbed.load()
    ids = torch.tensor(tokenizer(testbed.held_out()[:60_000], verbose=False)["input_ids"])[None]
    codec = KVCodec.calibrate(model, None, [ids[0, :512].tolist()], 0.1, metric="plain", progress=False)
    model = model.bfloat16()
    given = SubspaceCache(model, codec, sinks=4, recent=0)
    shape = codec.in_place.layers[0].shape
    keys, positions = torch.zeros(1, shape.heads, 8192, shape.key_dim, dtype=torch.bfloat16), torch.arange(8192)[None]
    for index in range(codec.layer_count):
        given.adopt_layer(index, keys, keys, positions)
    assert given.report().bytes <= 1.03 * codec.bytes_ratio * 8192 * 2 * codec.in_place.elements

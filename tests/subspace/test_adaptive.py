"""SubspaceCache with bases that follow the text: whole models, fed in every way."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import AdaptiveSubspace, KVCodec, SubspaceCache
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.codes import TILE
from tests import tiny
from tests.subspace.test_cache import padded_anywhere, run

TOLERANCE = {"atol": 2e-3, "rtol": 1e-3}
# A model's blocks of tokens are rounded otherwise than single ones.
ROUNDING = {"atol": 2e-5, "rtol": 2e-5}
SIZE, STEPS = 8, [1] * 40
# What makes a cache; with "codec", its bits.
MODES: dict[str, dict[str, Any]] = {
    "codec": {"codec": {"bytes_ratio": 0.15}},
    "rank": {"rank": (3, 4), "widths": 4},
    "bytes": {"bytes_ratio": 0.4},
}
ALL: dict[str, dict[str, Any]] = {"codec": {"codec": {"energy": 1, "widths": 24}}, "rank": {"rank": SIZE, "widths": 24}}


@cache
def exact_model() -> Any:
    """In float64, so that nothing is decided by arithmetic in another order."""
    return tiny.llama(num_hidden_layers=2).double()


@cache
def plain_model() -> Any:
    return tiny.llama(num_hidden_layers=2).double()


@cache
def calibrated(rotation: str) -> KVCodec:
    texts = [tiny.ids(1, 96, seed=seed)[0].tolist() for seed in range(4)]
    return KVCodec.calibrate(tiny.llama(num_hidden_layers=2), None, texts, rotation=rotation, progress=False)


def make(mode: dict[str, Any], model: Any = None, rotation: str = "aware", **options: Any) -> SubspaceCache:
    """A cache that looks at its bases after 32 tokens and whatever a tile loses, and without a codec begins after 16."""
    window = {"sinks": options.pop("sinks", 2), "recent": options.pop("recent", 6)}
    follow = {"chunk": 32, "agreement": 0.0} | {name: each for name, each in mode.items() if name != "codec"} | options
    codec = calibrated(rotation).at(**mode["codec"]) if "codec" in mode else None
    if codec is None:
        follow = {"warmup": 16, "rotation": rotation} | follow
    return SubspaceCache(exact_model() if model is None else model, codec, adaptive=AdaptiveSubspace(**follow), **window)


def bases_of(given: SubspaceCache) -> int:
    """The most bases of a head."""
    return 1 + max(int(getattr(layer, f"{side}_current").max()) for layer in given.layers for side in ("key", "value"))


@pytest.mark.parametrize("rotation", ["aware", "post"])
@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("chunks", [[30, 10, *STEPS], [1] * 60, [5, 20, 30, 25]])
def test_24_bits_of_all_directions_equal_a_dynamic_cache(chunks: list[int], mode: str, rotation: str) -> None:
    text = tiny.ids(2, sum(chunks))
    expected = run(plain_model(), DynamicCache(config=plain_model().config), text, chunks)
    for sinks, recent in ((0, 0), (1, 3)):
        given = make(ALL[mode], rotation=rotation, sinks=sinks, recent=recent, tau_k=0.0, tau_v=0.0)
        torch.testing.assert_close(run(exact_model(), given, text, chunks), expected, **TOLERANCE)


@pytest.mark.parametrize("sketch", ["gram", pytest.param("fd", marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recent", [0, pytest.param(6, marks=pytest.mark.full)])
def test_how_tokens_are_fed_changes_nothing_in_the_first_layer(recent: int, mode: str, sketch: str) -> None:
    text, found = tiny.ids(2, 120), []
    for chunks in ([120], [1] * 120, [7, 20, 33, 1, 1, 58], [15, 1, 1, 103], [90, *([1] * 30)]):
        given = make(MODES[mode], sketch=sketch, recent=recent)
        run(exact_model(), given, text, chunks)
        layer = given.layers[0]
        assert layer.coded == 120 - 2 - recent
        found.append((layer.key_basis_of, layer.value_basis_of, *layer.decoded()))
    for other in found[1:]:
        assert torch.equal(found[0][0], other[0])
        assert torch.equal(found[0][1], other[1])
        for first, second in zip(found[0][2:], other[2:], strict=True):
            torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-4)
    assert bases_of(given) >= 3


def alone(real: torch.Tensor, chunks: list[int]) -> list[int]:
    """How a padded row's own tokens come."""
    ends = torch.tensor(chunks).cumsum(0).tolist()
    own = [int(real[end - tokens : end].sum()) for end, tokens in zip(ends, chunks, strict=True)]
    return [tokens for tokens in own if tokens]


@pytest.mark.parametrize("rotation", ["aware", "post"])
@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("chunks", [[40, *([1] * 20)], [60], [7, 10, 13, 28, 1, 1]])
def test_with_all_bits_a_row_with_padding_anywhere_is_that_row_alone(chunks: list[int], mode: str, rotation: str) -> None:
    text, mask = tiny.ids(4, 60), padded_anywhere()
    for recent in (0, 6):
        together = run(exact_model(), make(ALL[mode], rotation=rotation, recent=recent), text, chunks, mask)
        for row, real in enumerate(mask.bool()):
            given = make(ALL[mode], rotation=rotation, recent=recent)
            own = run(exact_model(), given, text[row : row + 1, real], alone(real, chunks))
            torch.testing.assert_close(together[row, real], own[0], **TOLERANCE)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "bytes"])
@pytest.mark.parametrize("chunks", [[40, *([1] * 20)], [60], [7, 10, 13, 28, 1, 1]])
def test_with_few_bits_a_row_with_padding_anywhere_is_that_row_alone(chunks: list[int], mode: str) -> None:
    """Bits out of a budget are shared by the rows of a batch."""
    text, mask = tiny.ids(4, 60), padded_anywhere()
    together = run(exact_model(), make(MODES[mode]), text, chunks, mask)
    for row, real in enumerate(mask.bool()):
        own = run(exact_model(), make(MODES[mode]), text[row : row + 1, real], alone(real, chunks))
        torch.testing.assert_close(together[row, real], own[0], **TOLERANCE)


def test_padding_that_is_not_a_number_is_in_no_basis() -> None:
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :12] = 0
    given, other = (make(MODES["rank"]) for _ in range(2))
    full = DynamicCache(config=plain_model().config)
    run(plain_model(), full, tiny.ids(2, 40), [40], mask)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for cached, filling in ((given, 1.0), (other, float("nan"))):
        for index, layer in enumerate(full.layers):
            keys, values = (each.clone() for each in (layer.keys, layer.values))
            keys[0, :, :12] = values[0, :, :12] = filling
            cached.adopt_layer(index, keys, values, positions, torch.tensor([12, 0]))
        assert cached.layers[0].coded
    for name in ("key_decode", "value_decode", "codes"):
        assert torch.equal(getattr(given.layers[0], name), getattr(other.layers[0], name))


def logits_of(given: SubspaceCache, text: torch.Tensor, mask: torch.Tensor, start: int, stop: int, step: int = 1) -> torch.Tensor:
    found = []
    with torch.no_grad():
        for at in range(start, stop, step):
            end = min(stop, at + step)
            options = {"attention_mask": mask[:, :end], "position_ids": (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, at:]}
            found.append(exact_model()(text[:, at:end], past_key_values=given, **options).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_has_too_few_tokens_keeps_all_exact_until_it_has_them(mode: str) -> None:
    """Whatever the other rows have."""
    if "codec" in MODES[mode]:
        pytest.skip("a codec does not wait")
    text, mask = tiny.ids(3, 90), torch.ones(3, 90, dtype=torch.long)
    mask[0, :30] = 0
    given = make(MODES[mode])
    full = DynamicCache(config=plain_model().config)
    expected = run(plain_model(), full, text[:, :48], [40, *[1] * 8], mask[:, :48])
    got = logits_of(given, text, mask, 0, 40, 40), logits_of(given, text, mask, 40, 48)
    # The row has 18 tokens, 2 of them sinks.
    torch.testing.assert_close(torch.cat(got, 1)[0, 30:47], expected[0, 30:47], atol=2e-4, rtol=2e-4)
    assert not torch.allclose(torch.cat(got, 1)[1, 40:], expected[1, 40:], atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("before", "drafts", "kept"), [(49, 5, 0), (45, 20, 2), (12, 24, 5), (17, 5, 1), (10, 30, 0), (60, 20, 19)])
def test_recorded_tokens_are_taken_back_exactly(before: int, drafts: int, kept: int, mode: str) -> None:
    """Also where the warm-up ended among them, or a basis."""
    text = tiny.ids(2, 200)
    given = make(MODES[mode])
    run(exact_model(), given, text[:, :before], [before - 3, 3])
    twin = copy.deepcopy(given)
    for cached in (given, twin):
        cached.activate_past_recording()
    for _ in range(2):
        run(exact_model(), given, text[:, before : before + drafts], [drafts])
        given.crop(kept - drafts)
        if kept:
            run(exact_model(), twin, text[:, before : before + kept], [kept])
            twin.crop(0)
        before += kept
    # As steps that are not to be taken back, and as one block.
    for cached in (given, twin):
        for layer in cached.layers:
            layer.record_past = False
    chunks = [1, 1, 17, 1, 18, 1]
    expected = run(exact_model(), twin, text[:, 140:179], chunks)
    torch.testing.assert_close(run(exact_model(), given, text[:, 140:179], chunks), expected, **ROUNDING)


@pytest.mark.parametrize("mode", MODES)
def test_what_was_not_recorded_is_not_taken_back(mode: str) -> None:
    given = make(MODES[mode])
    run(exact_model(), given, tiny.ids(1, 40), [40])
    with pytest.raises(UnsupportedError, match="activate_past_recording"):
        given.crop(-1)
    assert given.get_seq_length() == 40
    given.crop(0)


def test_tokens_before_the_first_basis_are_taken_back_unrecorded() -> None:
    text, given, twin = tiny.ids(1, 60), make(MODES["rank"]), make(MODES["rank"])
    run(exact_model(), given, text[:, :14], [14])
    given.crop(-4)
    run(exact_model(), twin, text[:, :10], [10])
    torch.testing.assert_close(*(run(exact_model(), each, text[:, 20:], STEPS) for each in (given, twin)), **ROUNDING)


@pytest.mark.parametrize("sketch", ["gram", pytest.param("fd", marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [[9, 1], [10, 30, 1]])
def test_copies_and_files_go_on_alike(before: list[int], mode: str, sketch: str, tmp_path: Path) -> None:
    """From within the warm-up and from behind it."""
    text, done = tiny.ids(3, 130), sum(before)
    mask = torch.ones_like(text)
    mask[0, :3] = 0
    given = make(MODES[mode], sketch=sketch)
    run(exact_model(), given, text, before, mask)
    given.save(tmp_path / "cache.safetensors")
    others = [copy.deepcopy(given), SubspaceCache.load(tmp_path / "cache.safetensors", exact_model())]
    assert others[1].settings() == given.settings()
    expected = logits_of(given, text, mask, done, done + 32)
    for other in others:
        assert other.get_seq_length() == done
        assert torch.equal(logits_of(other, text, mask, done, done + 32), expected)
    assert bases_of(given) >= (2 if done > 32 else 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [9, 60])
def test_rows_that_are_moved_go_on_as_they_were(before: int, mode: str) -> None:
    """As beams do, within the warm-up and behind it."""
    text, order, more = tiny.ids(3, 110), torch.tensor([2, 0, 0]), [1] * 45
    given = make(MODES[mode])
    run(exact_model(), given, text[:, :before], [before])
    twin = copy.deepcopy(given)
    given.reorder_cache(order)
    given.batch_repeat_interleave(2)
    given.batch_select_indices(torch.tensor([1, 3, 4]))
    if before < 16 and mode == "bytes":  # Bits are those of all rows, which are others now.
        run(exact_model(), given, text[order, 60:105], more)
        return
    expected = run(exact_model(), twin, text[:, 60:105], more)[order]
    torch.testing.assert_close(run(exact_model(), given, text[order, 60:105], more), expected, **ROUNDING)
    assert bases_of(given) >= 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [[9], [60, 1]])
def test_a_cache_that_was_reset_is_as_a_new_one(before: list[int], mode: str) -> None:
    given = make(MODES[mode])
    run(exact_model(), given, tiny.ids(3, sum(before), seed=5), before)
    given.reset()
    text, chunks = tiny.ids(2, 70), [40, *([1] * 30)]
    expected = run(exact_model(), make(MODES[mode]), text, chunks)
    assert torch.equal(run(exact_model(), given, text, chunks), expected)


@pytest.mark.parametrize("ratio", [0.1, 0.4])
def test_codes_stay_within_the_budget_and_go_where_most_would_be_lost(ratio: float) -> None:
    model = tiny.llama(num_hidden_layers=2).double()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.view(2, SIZE, -1)[:, 2:] *= 1e-3
    given = make({"bytes_ratio": ratio}, model, warmup=64)
    run(model, given, tiny.ids(2, 70), [30, 40])
    for layer in given.layers:
        assert layer.codes.shape[1] <= ratio * 2 * 2 * 2 * SIZE
    flat = given.layers[1].value_widths[0]
    assert int(flat.sum()) < int(given.layers[0].value_widths[0].sum())


@pytest.mark.parametrize("mode", MODES)
def test_after_a_prompt_its_exact_tokens_are_gone(mode: str) -> None:
    for chunks in ([200], [1] * 40):
        given = make(MODES[mode])
        run(exact_model(), given, tiny.ids(2, sum(chunks)), chunks)
        for layer in given.layers:
            assert layer.recent_keys.shape[2] == layer.recent_values.shape[2] == 6
            assert layer.recent_keys.untyped_storage().nbytes() <= (6 + 1) * 2 * 2 * SIZE * 8
            assert layer.key_pending.shape[2] == TILE
        per_token = [name for name, each in given.owned_tensors().items() if max(each.shape[1:]) >= 32]
        assert {name.split(".")[-1] for name in per_token} <= {"codes"}


def test_gradients_through_codes_are_refused() -> None:
    for mode in MODES.values():
        model = tiny.llama(num_hidden_layers=2)
        with pytest.raises(UnsupportedError, match="codes are integers"):
            model(tiny.ids(1, 10), past_key_values=make(mode, model))


@pytest.mark.parametrize("mode", ALL)
def test_a_bfloat16_model_is_as_close_to_float32_as_with_a_dynamic_cache(mode: str) -> None:
    half, text, chunks = tiny.llama(num_hidden_layers=2).bfloat16(), tiny.ids(2, 100), [60, *STEPS]
    wide = tiny.llama(num_hidden_layers=2).bfloat16().float()
    expected = run(wide, DynamicCache(config=half.config), text, chunks)
    usual = run(tiny.llama(num_hidden_layers=2).bfloat16(), DynamicCache(config=half.config), text, chunks).float()
    options = {"codec": {"energy": 1, "widths": 16}} if mode == "codec" else {"rank": SIZE}
    ours = run(half, make(options, half), text, chunks)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - expected).abs().mean() < 1.25 * (usual - expected).abs().mean()


# Refusals


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rank": 3, "bytes_ratio": 0.5}, "bytes_ratio, rank, energy"),
        ({"rank": 0}, "rank"),
        ({"rank": (3, 4, 5)}, "rank"),
        ({"rank": (3, True)}, "rank"),
        ({"bytes_ratio": 0.0}, "bytes_ratio"),
        ({"bytes_ratio": 1.5}, "bytes_ratio"),
        ({"rank": 3, "widths": 7}, "widths"),
        ({"rank": 3, "widths": (4, 8)}, "widths"),
        ({"sketch": "svd"}, "sketch"),
        ({"sketch_size": 8}, "sketch_size"),
        ({"sketch": "fd", "sketch_size": 0}, "sketch_size"),
        ({"rank": 9, "sketch": "fd", "sketch_size": 8}, "sketch_size"),
        ({"chunk": 40}, "chunk"),
        ({"chunk": 0}, "chunk"),
        ({"warmup": 10}, "warmup"),
        ({"tau_k": -0.1}, "tau_k"),
        ({"tau_v": 1.1}, "tau_v"),
        ({"rotation": "before"}, "rotation"),
        ({"decay": float("nan")}, "decay"),
        ({"agreement": 2}, "agreement"),
        ({"agreement": None}, "agreement"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        AdaptiveSubspace(**options)


def test_bits_that_nobody_gives_or_two_do_are_refused() -> None:
    model = tiny.llama(num_hidden_layers=2)
    with pytest.raises(ConfigError, match="bytes_ratio, rank, energy: expected one of them without a codec"):
        SubspaceCache(model, adaptive=AdaptiveSubspace())
    with pytest.raises(ConfigError, match="bytes_ratio, rank, energy: expected none beside a codec"):
        SubspaceCache(model, calibrated("aware"), adaptive=AdaptiveSubspace(bytes_ratio=0.5))
    with pytest.raises(ConfigError, match="adaptive: "):
        SubspaceCache(model, adaptive={"rank": 3})
    with pytest.raises(ConfigError, match=r"^rank: "):
        run(model, make({"rank": (3, SIZE + 1)}, model), tiny.ids(1, 5), [5])

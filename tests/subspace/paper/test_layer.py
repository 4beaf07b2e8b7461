"""SubspaceCache by the paper: equal to a plain walk over all tokens, however these come."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import AdaptiveSubspace, SubspaceCache
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.subspace.paper.calibrated import calibrate_bases
from hf_kvcaches.subspace.paper.settings import Bases
from tests import tiny
from tests.subspace.paper.reference import PaperOracle
from tests.subspace.test_cache import padded_anywhere, run

# The models compute norms and sketches in float32.
TOLERANCE = {"atol": 1e-3, "rtol": 1e-3}
ROUNDING = {"atol": 2e-5, "rtol": 2e-5}
SIZE, STEPS = 8, [1] * 40
SMALL: dict[str, Any] = {"warmup": 16, "chunk": 32}
MODES: dict[str, dict[str, Any]] = {
    "rank": {"rank": (5, 6)},
    "ratio": {"bytes_ratio": 0.8, "rotation": "post"},
    "energy": {"energy": 0.95},
    "fd": {"rank": 6, "sketch": "fd", "sketch_size": 7},
}


@cache
def exact_model() -> Any:
    """In float64, so that nothing is decided by arithmetic in another order."""
    return tiny.llama(num_hidden_layers=2).double()


@cache
def plain_model() -> Any:
    return tiny.llama(num_hidden_layers=2).double()


@cache
def calibrated(rotation: str) -> Bases:
    texts = [tiny.ids(1, 96, seed=seed)[0].tolist() for seed in range(4)]
    return calibrate_bases(tiny.llama(num_hidden_layers=2), None, texts, rotation=rotation, progress=False)


def make(sinks: int = 2, recent: int = 6, model: Any = None, **options: Any) -> SubspaceCache:
    return SubspaceCache(model or exact_model(), adaptive=AdaptiveSubspace(**SMALL | options), sinks=sinks, recent=recent)


def compare(chunks: list[int], *, rows: int = 2, mask: torch.Tensor | None = None, sinks: int = 2, recent: int = 6, **options: Any) -> Any:
    """Compare with the reference, and return that one and the cache."""
    given, text = make(sinks, recent, **options), tiny.ids(rows, sum(chunks))
    ranks = given.adaptive.rank
    oracle = PaperOracle(plain_model().config, given.adaptive, ranks, sinks, recent, None if mask is None else mask.bool())
    expected = run(plain_model(), oracle, text, chunks, mask)
    got = run(exact_model(), given, text, chunks, mask)
    assert oracle.closest > 1e-4, "a residual is as large as its limit, and rounding decides"
    if mask is not None:
        expected, got = expected[mask.bool()], got[mask.bool()]
    torch.testing.assert_close(got, expected, **TOLERANCE)
    return oracle, given


# Equal to the reference


@pytest.mark.parametrize("options", [{}, {"tau_k": 0.3, "tau_v": 0.45}, {"decay": 0.5, "gamma": "paper"}, {"chunk": None}])
@pytest.mark.parametrize("rotation", ["aware", "post"])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (2, 6)])
def test_steps_equal_the_reference(rotation: str, options: dict[str, Any], sinks: int, recent: int) -> None:
    oracle, given = compare([50, *STEPS], rank=(5, 6), rotation=rotation, sinks=sinks, recent=recent, **options)
    begun = {tile for (layer, *_), tiles in oracle.begins.items() for tile in tiles if layer == 0}
    assert given.layers[0].blocks == tuple(sorted(begun))
    assert len(begun) == 1 if options.get("chunk", 1) is None else len(begun) > 1


@pytest.mark.parametrize("chunks", [[1] * 70, [5, 30, 1, 1, 20, 1, 2], [64, 17, 1, 20]])
@pytest.mark.parametrize("rotation", ["aware", "post"])
def test_chunks_of_a_prompt_equal_the_reference(rotation: str, chunks: list[int]) -> None:
    compare(chunks, rank=(5, 6), rotation=rotation)


@pytest.mark.parametrize("chunks", [[40, *([1] * 20)], [60], [7, 10, 13, 28, 1, 1]])
@pytest.mark.parametrize("recent", [0, 6])
def test_rows_with_padding_anywhere_equal_the_reference(recent: int, chunks: list[int]) -> None:
    compare(chunks, rows=4, mask=padded_anywhere(), recent=recent, rank=(5, 6), tau_k=0.3)


@pytest.mark.parametrize("rotation", ["aware", "post"])
@pytest.mark.parametrize("chunk", [None, 32])
def test_calibrated_bases_serve_from_the_first_token_on(rotation: str, chunk: int | None) -> None:
    _, given = compare([20, *STEPS], rank=(5, 6), rotation=rotation, bases=calibrated(rotation), chunk=chunk)
    assert given.adaptive.warmup == 0
    assert (len(given.layers[0].blocks) == 1) == (chunk is None)


@pytest.mark.parametrize(
    "options", [{"rank": SIZE}, {"rank": SIZE, "rotation": "post"}, {"energy": 1.0}, {"bytes_ratio": 1.0, "tau_k": 0.0}]
)
@pytest.mark.parametrize("chunks", [[30, 10, *STEPS], [1] * 60, [5, 20, 30, 25]])
def test_all_directions_equal_a_dynamic_cache(chunks: list[int], options: dict[str, Any]) -> None:
    text = tiny.ids(2, sum(chunks))
    expected = run(plain_model(), DynamicCache(config=plain_model().config), text, chunks)
    for sinks, recent in ((0, 0), (1, 3)):
        got = run(exact_model(), make(sinks, recent, **options), text, chunks)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("build", [tiny.gemma2, tiny.gpt2])
def test_soft_caps_windows_and_models_without_rotation_equal_a_dynamic_cache(build: Any) -> None:
    model, plain, text, chunks = build().double(), build().double(), tiny.ids(2, 60), [30, 10, *[1] * 20]
    expected = run(plain, DynamicCache(config=plain.config), text, chunks)
    got = run(model, make(1, 5, model, rank=SIZE), text, chunks)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunks", [[40, *STEPS], [20, 20, *STEPS]])
def test_positions_of_the_callers_own_are_followed(chunks: list[int]) -> None:
    ids = torch.stack([torch.arange(80) + 9, torch.arange(80)])
    ids[1, 45:] += 30
    text, given, expected, start = tiny.ids(2, 80), make(rank=SIZE), DynamicCache(config=plain_model().config), 0
    for tokens in chunks:
        options = {} if not start and len(chunks) > 41 else {"position_ids": ids[:, start : start + tokens]}
        with torch.no_grad():
            both = [
                model(text[:, start : start + tokens], past_key_values=cache, **options).logits
                for model, cache in ((exact_model(), given), (plain_model(), expected))
            ]
        torch.testing.assert_close(*both, atol=1e-4, rtol=1e-4)
        start += tokens


# Bases


@pytest.mark.parametrize("mode", MODES)
def test_how_tokens_come_changes_nothing_in_the_first_layer(mode: str) -> None:
    text, found = tiny.ids(2, 120), []
    for chunks in ([120], [1] * 120, [7, 20, 33, 1, 1, 58], [90, *([1] * 30)]):
        given = make(**MODES[mode])
        run(exact_model(), given, text, chunks)
        layer = given.layers[0]
        found.append((layer.blocks, *layer._decoded(slice(0, layer.coded))))
    for blocks, *states in found[1:]:
        assert blocks == found[0][0]
        for first, second in zip(found[0][1:], states, strict=True):
            torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-6)


def adopted(keys: torch.Tensor, values: torch.Tensor, **options: Any) -> Any:
    """The first layer of a cache with these keys and values, (batch, 2, tokens, 8)."""
    given = make(0, 0, rotation="post", **options)
    given.adopt_layer(0, keys, values, torch.arange(keys.shape[2])[None])
    return given.layers[0]


def spread(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 2, tokens, SIZE, generator=torch.Generator().manual_seed(seed)) * 2.0 ** -torch.arange(SIZE)


def test_a_head_that_turns_gets_a_new_basis_with_its_tile_and_others_keep_theirs() -> None:
    keys, values = spread(2, 160), spread(2, 160, seed=1)
    keys[1, 0, 96:] = 2 * keys[1, 0, 96:].flip(-1)
    layer = adopted(keys, values, rank=3, chunk=1600, warmup=64, tau_k=0.5, tau_v=0.5)
    assert layer.blocks[:2] == (0, 6)
    changed = (layer.key_bases[:, :, 1:] != layer.key_bases[:, :, :1]).flatten(2).any(-1)
    assert changed.tolist() == [[False, False], [True, False]]
    assert torch.equal(layer.value_bases[:, :, 1:], layer.value_bases[:, :, :1].expand(-1, -1, len(layer.blocks) - 1, -1, -1))
    decoded, _ = layer._decoded(slice(0, 160))
    lost = (decoded - keys).square().sum(-1)[1, 0] / keys.square().sum(-1)[1, 0]
    assert lost[96:].mean() < 0.9


def test_a_calm_text_has_a_basis_for_each_chunk_and_zeros_have_no_residual() -> None:
    for keys in (spread(1, 160), torch.zeros(1, 2, 160, SIZE)):
        layer = adopted(keys, keys, rank=4, chunk=48, warmup=32)
        assert layer.blocks == (0, 3, 6, 9)
        assert layer.key_bases.isfinite().all()


def test_chunks_count_whole_tiles_behind_the_warm_up() -> None:
    keys = spread(1, 160)
    assert adopted(keys, keys, rank=4, chunk=32, warmup=64, tau_k=1.0, tau_v=1.0).blocks == (0, 6, 8)
    assert adopted(keys, keys, rank=4, chunk=32, warmup=16, tau_k=0.0, tau_v=1.0).blocks == (0, *range(1, 10))


def test_each_head_keeps_the_fewest_directions_with_the_energy() -> None:
    keys = spread(1, 64)
    keys[:, 1, :, 1:] *= 1e-3
    layer = adopted(keys, keys, energy=0.9, chunk=32, warmup=32)
    for head in range(2):
        energies = torch.linalg.svdvals(keys[0, head, :32]).square()
        rank = int((energies.cumsum(0) / energies.sum() < 0.9).sum()) + 1
        assert layer.key_bases[0, head].any(-1).sum(-1).unique().tolist() == [rank]
    assert layer.key_coefficients.shape[3] < SIZE


def test_a_share_of_the_bytes_is_a_share_of_the_directions() -> None:
    keys = spread(1, 64)
    for ratio, rank in ((0.25, 2), (0.3, 2), (0.05, 1)):
        assert adopted(keys, keys, bytes_ratio=ratio).key_coefficients.shape[3] == rank


def test_coefficients_are_in_the_dtype_of_the_model_and_nothing_else_is_kept_for_each_token() -> None:
    keys = spread(1, 1600).bfloat16()
    layer = adopted(keys, keys, rank=4, chunk=320, warmup=64)
    assert layer.key_coefficients.dtype == layer.value_coefficients.dtype == torch.bfloat16
    per_token = {name for name, tensor in layer.owned_tensors().items() if max(tensor.shape[1:]) >= 1600}
    assert per_token == {"key_coefficients", "value_coefficients"}


# Rows


def alone(real: torch.Tensor, chunks: list[int]) -> list[int]:
    """How a padded row's own tokens come."""
    ends = torch.tensor(chunks).cumsum(0).tolist()
    own = [int(real[end - tokens : end].sum()) for end, tokens in zip(ends, chunks, strict=True)]
    return [tokens for tokens in own if tokens]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [[40, *([1] * 20)], [60], [7, 10, 13, 28, 1, 1]])
def test_a_row_with_padding_anywhere_is_that_row_alone(chunks: list[int], mode: str) -> None:
    text, mask = tiny.ids(4, 60), padded_anywhere()
    together = run(exact_model(), make(**MODES[mode]), text, chunks, mask)
    for row, real in enumerate(mask.bool()):
        own = run(exact_model(), make(**MODES[mode]), text[row : row + 1, real], alone(real, chunks))
        torch.testing.assert_close(together[row, real], own[0], **TOLERANCE)


def test_padding_that_is_not_a_number_is_in_no_basis() -> None:
    keys, positions = spread(2, 80), (torch.arange(80) - torch.tensor([[12], [0]])).clamp(min=0)
    found = []
    for filling in (1.0, float("nan")):
        given, keys = make(0, 0, rank=4), keys.clone()
        keys[0, :, :12] = filling
        given.adopt_layer(0, keys, keys, positions, torch.tensor([12, 0]))
        found.append(given.layers[0].owned_tensors())
    for name in ("key_coefficients", "key_bases", "key_sketch", "value_limit"):
        assert torch.equal(*(tensors[name] for tensors in found))


def go_on(given: SubspaceCache, text: torch.Tensor, mask: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Logits of tokens of rows with padding, one after the other."""
    positions, found = (mask.cumsum(1) - 1).clamp(min=0), []
    with torch.no_grad():
        for index in range(start, stop):
            options = {"attention_mask": mask[:, : index + 1], "position_ids": positions[:, index : index + 1]}
            found.append(exact_model()(text[:, index : index + 1], past_key_values=given, **options).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [9, 61])
@pytest.mark.parametrize("padding", [0, 7])
def test_rows_are_reordered_repeated_and_selected(padding: int, before: int, mode: str) -> None:
    """As beams do, within the warm-up and behind it."""
    text, mask, order = tiny.ids(3, 110), torch.ones(3, 110, dtype=torch.long), torch.tensor([2, 0, 0])
    mask[0, :padding] = 0
    given = make(**MODES[mode])
    run(exact_model(), given, text[:, :before], [before - 1, 1], mask)
    twin = copy.deepcopy(given)
    given.reorder_cache(order)
    given.batch_repeat_interleave(2)
    given.batch_select_indices(torch.tensor([1, 3, 4]))
    expected = go_on(twin, text, mask, before, 110)[order]
    torch.testing.assert_close(go_on(given, text[order], mask[order], before, 110), expected, **ROUNDING)


# What a cache goes through


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [10, 61])
def test_copies_and_files_go_on_alike(before: int, mode: str, tmp_path: Path) -> None:
    text, mask = tiny.ids(3, 110), torch.ones(3, 110, dtype=torch.long)
    mask[0, :3] = 0
    given = make(**MODES[mode])
    run(exact_model(), given, text, [before - 1, 1], mask)
    given.save(tmp_path / "cache.safetensors")
    others = [copy.deepcopy(given), SubspaceCache.load(tmp_path / "cache.safetensors", exact_model())]
    others.append(SubspaceCache.from_bytes(given.to_bytes(), exact_model()))
    assert others[1].settings() == given.settings()
    expected = go_on(given, text, mask, before, 100)
    assert len(given.layers[0].blocks) > 1
    for other in others:
        assert torch.equal(go_on(other, text, mask, before, 100), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [9, 61])
def test_a_cache_that_was_reset_is_as_a_new_one(before: int, mode: str) -> None:
    given = make(**MODES[mode])
    run(exact_model(), given, tiny.ids(3, before, seed=5), [before])
    given.reset()
    text, chunks = tiny.ids(2, 70), [40, *([1] * 30)]
    assert torch.equal(run(exact_model(), given, text, chunks), run(exact_model(), make(**MODES[mode]), text, chunks))


def test_what_inference_mode_made_goes_on_outside_of_it() -> None:
    text, given = tiny.ids(1, 90), make(rank=(5, 6))
    with torch.inference_mode():
        run(exact_model(), given, text[:, :50], [50])
    expected = run(exact_model(), make(rank=(5, 6)), text, [50, *STEPS])[:, 50:]
    assert torch.equal(run(exact_model(), given, text[:, 50:], STEPS), expected)


def test_exact_tokens_are_taken_back_and_coded_ones_are_not() -> None:
    text, given, twin = tiny.ids(1, 80), make(rank=(5, 6)), make(rank=(5, 6))
    run(exact_model(), given, text[:, :45], [45])
    run(exact_model(), twin, text[:, :42], [42])
    given.crop(-3)
    torch.testing.assert_close(*(run(exact_model(), each, text[:, 42:70], [1] * 28) for each in (given, twin)), **ROUNDING)
    with pytest.raises(UnsupportedError, match="crop"):
        given.crop(-20)
    with pytest.raises(UnsupportedError, match="activate_past_recording"):
        given.activate_past_recording()
    assert given.get_seq_length() == 70


def test_a_bfloat16_model_is_as_close_to_float32_as_with_a_dynamic_cache() -> None:
    half, text, chunks = tiny.llama(num_hidden_layers=2).bfloat16(), tiny.ids(2, 100), [60, *STEPS]
    wide = tiny.llama(num_hidden_layers=2).bfloat16().float()
    expected = run(wide, DynamicCache(config=half.config), text, chunks)
    usual = run(tiny.llama(num_hidden_layers=2).bfloat16(), DynamicCache(config=half.config), text, chunks).float()
    ours = run(half, make(model=half, rank=SIZE), text, chunks)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - expected).abs().mean() < 1.25 * (usual - expected).abs().mean()


def test_a_cache_with_calibrated_bases_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="save"):
        make(rank=4, bases=calibrated("aware")).save(tmp_path / "cache.safetensors")

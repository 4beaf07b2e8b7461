"""SubspaceCache by the paper: equal to a plain walk over all tokens, however these come."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvcaches import AdaptiveSubspace, SubspaceCache
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.subspace.paper.settings import Bases
from tests import tiny
from tests.scripts.running import import_script
from tests.subspace.paper.reference import PaperOracle
from tests.subspace.running import padded_anywhere, run

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
    return import_script("papers.falsify_subspace").calibrated_bases(tiny.llama(num_hidden_layers=2), texts, rotation)


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


# Bases


def adopted(keys: torch.Tensor, values: torch.Tensor, **options: Any) -> Any:
    """The first layer of a cache with these keys and values, (batch, 2, tokens, 8)."""
    given = make(0, 0, rotation="post", **options)
    given.adopt_layer(0, keys, values, torch.arange(keys.shape[2])[None])
    return given.layers[0]


def spread(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 2, tokens, SIZE, generator=torch.Generator().manual_seed(seed)) * 2.0 ** -torch.arange(SIZE)


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
    expected = run(exact_model(), given, text, [1] * (100 - before), mask, start=before)
    assert len(given.layers[0].blocks) > 1
    for other in others:
        assert torch.equal(run(exact_model(), other, text, [1] * (100 - before), mask, start=before), expected)


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


def test_a_cache_with_calibrated_bases_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="save"):
        make(rank=4, bases=calibrated("aware")).save(tmp_path / "cache.safetensors")


# Options

RULES, FD = "bytes_ratio, rank, energy", {"sketch": "fd"}
# The option that is named, and what is given; with a rank of 3 where a single value is.
WRONG: list[tuple[str, Any]] = [
    *((RULES, options) for options in ({}, {"rank": 3, "bytes_ratio": 0.5})),
    *(("rank", {"rank": rank}) for rank in (0, (3, 4, 5), (3, True))),
    *(("bytes_ratio", {"bytes_ratio": 0.0}), ("bytes_ratio", {"bytes_ratio": 1.5}), ("energy", {"energy": True})),
    *(("sketch_size", FD | options) for options in ({"rank": 3, "sketch_size": 0}, {"rank": 9, "sketch_size": 8}, {"energy": 0.9})),
    *(("sketch_size", 8), ("sketch", "svd"), ("chunk", 40), ("chunk", 0), ("warmup", 10), ("warmup", None), ("tau_k", -0.1)),
    *(("tau_v", 1.1), ("rotation", "before"), ("gamma", 1), ("decay", float("nan")), ("decay", None)),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_settings_that_make_no_sense_are_refused_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        AdaptiveSubspace(**wrong if isinstance(wrong, dict) else {"rank": 3, name: wrong})


def test_a_rank_above_the_head_size_and_settings_as_a_dict_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^rank: .*1 to 8 for keys"):
        make(rank=(3, 9))
    with pytest.raises(ConfigError, match="adaptive: "):
        SubspaceCache(exact_model(), adaptive={"rank": 3})

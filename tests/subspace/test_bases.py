"""Bases as an artifact: what they say of themselves, and that they come back from disk for the right model only."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from hf_kvcaches import ArtifactError, FingerprintMismatch, SubspaceBases, SubspaceCache
from hf_kvcaches.stores.reading import read_safetensors
from hf_kvcaches.subspace.bases import LayerBases
from tests import tiny
from tests.core.artifact_helpers import rewrite_manifest, tensor_file

TEXTS = [tiny.ids(60, seed=seed).tolist() for seed in range(4)]


def calibrate(model=None, **options) -> SubspaceBases:
    options = {"bytes_ratio": 0.6, "multiple_of": 1, "progress": False, **options}
    return SubspaceBases.calibrate(tiny.llama() if model is None else model, None, TEXTS, **options)


def same(one: LayerBases, other: LayerBases) -> bool:
    for field in dataclasses.fields(LayerBases):
        here, there = getattr(one, field.name), getattr(other, field.name)
        pairs = list(zip(here, there, strict=True)) if isinstance(here, tuple) else [(here, there)]
        if not all(torch.equal(a, b) and a.dtype == b.dtype == torch.float32 for a, b in pairs):
            return False
    return True


@pytest.fixture(scope="module")
def bases() -> SubspaceBases:
    return calibrate()


@pytest.mark.parametrize(
    "options", [{}, {"share": "layer"}, {"bytes_ratio": None, "rank": (2, 5), "rotation": "post", "metric": "plain", "gamma": "paper"}]
)
def test_bases_come_back_from_a_folder_as_they_were(tmp_path: Path, options: dict) -> None:
    before = calibrate(**options)
    before.save_pretrained(tmp_path)
    after = SubspaceBases.from_pretrained(tmp_path, model=tiny.llama())
    assert after.settings == before.settings
    assert after.ranks == before.ranks
    assert all(same(one, other) for one, other in zip(before.layers, after.layers, strict=True))


def test_layers_without_bases_stay_without(tmp_path: Path) -> None:
    before = calibrate(tiny.gemma2())
    assert [layer is None for layer in before.layers] == [True, False, True, False]
    before.save_pretrained(tmp_path)
    after = SubspaceBases.from_pretrained(tmp_path)
    assert after.ranks == before.ranks
    assert [ranks is None for ranks in after.ranks] == [True, False, True, False]


def test_a_basis_that_heads_share_is_stored_once(tmp_path: Path, bases: SubspaceBases) -> None:
    shared = calibrate(share="layer")
    shared.save_pretrained(tmp_path / "shared")
    bases.save_pretrained(tmp_path / "own")
    names = {name: set(read_safetensors(tensor_file(tmp_path / name))[0]) for name in ("shared", "own")}
    assert {name for name in names["own"] if name.startswith("layers.0.key_encode")} == {"layers.0.key_encode.0", "layers.0.key_encode.1"}
    assert {name for name in names["shared"] if name.startswith("layers.0.key_encode")} == {"layers.0.key_encode.0"}
    layer = SubspaceBases.from_pretrained(tmp_path / "shared").layers[0]
    assert layer is not None
    assert len(layer.key_encode) == layer.kv_heads == 2


def test_another_model_is_refused_when_loading_and_when_asked(tmp_path: Path, bases: SubspaceBases) -> None:
    bases.save_pretrained(tmp_path)
    with pytest.raises(FingerprintMismatch, match=r"subspace-bases from .* was made for another model: weights differ"):
        SubspaceBases.from_pretrained(tmp_path, model=tiny.llama(seed=1))
    bases.require_model(tiny.llama())
    with pytest.raises(FingerprintMismatch, match="weights differ"):
        SubspaceBases.from_pretrained(tmp_path).require_model(tiny.llama(seed=1))


def test_ranks_and_bytes_are_those_of_the_tensors(bases: SubspaceBases) -> None:
    elements = sum(len(basis) for layer in bases.layers for each in (layer.key_encode, layer.value_encode) for basis in each)
    assert bases.bytes_per_token() == 2 * elements
    assert bases.bytes_per_token(dtype_bytes=1) == elements
    full = 4 * 2 * 2 * 8  # layers, keys and values, heads, head_dim
    assert bases.bytes_ratio == elements / full
    for layer, ranks in zip(bases.layers, bases.ranks, strict=True):
        assert ranks == [(len(key), len(value)) for key, value in zip(layer.key_encode, layer.value_encode, strict=True)]
        assert [tuple(each.shape) for each in layer.key_decode] == [(8, rank) for rank, _ in ranks]
        assert [tuple(each.shape) for each in layer.value_decode] == [(8, rank) for _, rank in ranks]


def test_the_card_tells_how_they_were_made(tmp_path: Path, bases: SubspaceBases) -> None:
    bases.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    for words in ("240 tokens in 4 sequences", "bytes_ratio = 0.6", "| rotation | aware |", "- subspace-bases", "SubspaceCache"):
        assert words in card
    keys, values = zip(*bases.ranks[0], strict=True)
    assert f"| 0 | {', '.join(map(str, keys))} | {', '.join(map(str, values))} |" in card


def test_they_show_themselves_in_a_line(bases: SubspaceBases) -> None:
    assert repr(bases).startswith(f"SubspaceBases(4 of 4 layers, {bases.bytes_ratio:.3f} of the bytes, rotation='aware'")
    assert str(bases.fingerprint) in repr(bases)
    assert "tensor" not in repr(bases)


def test_tensors_that_do_not_fit_are_refused_by_name(bases: SubspaceBases) -> None:
    tensors = bases.tensors()
    for broken in ({"layers.1.key_decode.0": torch.zeros(8, 9)}, {"layers.1.gamma": torch.ones(1)}):
        with pytest.raises(ArtifactError, match=r"layers\.1\."):
            SubspaceBases.restore({**tensors, **broken}, bases.metadata())
    SubspaceBases.restore(tensors, bases.metadata())


def test_missing_content_is_an_artifact_error(tmp_path: Path, bases: SubspaceBases) -> None:
    bases.save_pretrained(tmp_path)
    rewrite_manifest(tmp_path, metadata={"layers": 4})
    with pytest.raises(ArtifactError, match="doesn't make a subspace-bases"):
        SubspaceBases.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_narrow_bases_are_cast_to_float32(tmp_path: Path, bases: SubspaceBases, dtype: torch.dtype) -> None:
    narrow = dataclasses.replace(bases, layers=tuple(cast(layer, dtype) for layer in bases.layers))
    rounded = dataclasses.replace(bases, layers=tuple(cast(cast(layer, dtype), torch.float32) for layer in bases.layers))
    narrow.save_pretrained(tmp_path)
    model, text, logits = tiny.llama(), tiny.ids(1, 40), []
    for each in (rounded, narrow, SubspaceBases.from_pretrained(tmp_path)):
        assert all(map(same, each.layers, rounded.layers))
        with torch.no_grad():
            cache = SubspaceCache(model, each, sinks=1, recent=4)
            logits.append(torch.cat([model(chunk, past_key_values=cache).logits for chunk in text.split(30, 1)], 1))
    assert all(torch.equal(each, logits[0]) for each in logits)


def cast(layer: LayerBases, dtype: torch.dtype) -> LayerBases:
    def to(held):
        return tuple(tensor.to(dtype) for tensor in held) if isinstance(held, tuple) else held.to(dtype)

    return LayerBases(**{field.name: to(getattr(layer, field.name)) for field in dataclasses.fields(LayerBases)})

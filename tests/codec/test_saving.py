"""A codec as an artifact: it comes back from disk as it was, for the right model only, and nothing broken is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvcaches import ArtifactError, FingerprintMismatch, KVCodec
from hf_kvcaches.core.files import read_file
from hf_kvcaches.core.hub import FILE_NAME
from tests import tiny
from tests.codec.measured import calibrate
from tests.core.artifact_helpers import rewrite


@pytest.fixture(scope="module")
def codec() -> KVCodec:
    return calibrate()


@pytest.mark.parametrize(
    "options", [{}, {"widths": (1, 3, 16)}, {"rank": (2, 5), "rotation": "post", "metric": "plain", "gamma": "paper"}, {"energy": 0.9}]
)
def test_a_codec_comes_back_from_a_folder_as_it_was(tmp_path: Path, options: dict[str, Any]) -> None:
    before = calibrate(**options)
    before.save_pretrained(tmp_path)
    after = KVCodec.from_pretrained(tmp_path, model=tiny.llama())
    assert (after.settings, after.ranks, after.fingerprint) == (before.settings, before.ranks, before.fingerprint)
    tensors = before.tensors()
    assert set(read_file(tmp_path / FILE_NAME).tensors) == set(tensors)
    assert all(torch.equal(tensor, tensors[name]) and tensor.dtype == tensors[name].dtype for name, tensor in after.tensors().items())
    keys = [torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(layer)) for layer in range(4)]
    for mine, theirs in zip(before.encode(keys, keys), after.encode(keys, keys), strict=True):
        assert torch.equal(mine[0], theirs[0])
    for one, other in zip(after.at(0.3).tensors().values(), before.at(0.3).tensors().values(), strict=True):
        assert torch.equal(one, other)


def test_layers_that_are_not_coded_stay_so(tmp_path: Path) -> None:
    before = calibrate(tiny.gemma2())
    before.save_pretrained(tmp_path)
    after = KVCodec.from_pretrained(tmp_path)
    assert [ranks is None for ranks in after.ranks] == [True, False, True, False]
    assert after.ranks == before.ranks


def test_another_model_is_refused_when_loading_and_when_asked(tmp_path: Path, codec: KVCodec) -> None:
    codec.save_pretrained(tmp_path)
    with pytest.raises(FingerprintMismatch, match=r"kv-codec from .* was made for another model: weights differ"):
        KVCodec.from_pretrained(tmp_path, model=tiny.llama(seed=1))
    assert KVCodec.from_pretrained(tmp_path, model=tiny.llama().to(torch.bfloat16)).bytes_ratio == codec.bytes_ratio
    with pytest.raises(FingerprintMismatch, match="weights differ"):
        KVCodec.from_pretrained(tmp_path).require_model(tiny.llama(seed=1))


def test_the_card_tells_how_it_was_made(tmp_path: Path, codec: KVCodec) -> None:
    codec.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    share = f"{codec.bytes_ratio:.4f} of exact keys and values in 16 bits ({codec.bytes_per_token} bytes per token)"
    for words in (
        "120 tokens in 3 sequences of up to 256",
        "bytes_ratio = 0.125",
        share,
        "| rotation | aware |",
        "| metric | loss |",
        "- kv-codec",
    ):
        assert words in card
    keys, values = zip(*codec.ranks[0], strict=True)
    assert f"| 0 | {', '.join(map(str, keys))} | {', '.join(map(str, values))} |" in card


@pytest.mark.parametrize(
    "broken",
    [
        {"layers.1.keys.encode": torch.zeros(2, 8, 9)},
        {"layers.1.values.mean": torch.ones(1, 8)},
        {"layers.1.keys.steps": torch.ones(2, 8, 3)},
        {"layers.1.keys.widths": torch.full((2, 8), 7, dtype=torch.uint8)},
        {"layers.1.keys.widths": torch.full((2, 8), 4, dtype=torch.int64)},
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(codec: KVCodec, broken: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ArtifactError, match=rf"^{next(iter(broken)).rpartition('.')[0]}.*Calibrate anew"):
        KVCodec.restore({**codec.tensors(), **broken}, codec.metadata())
    KVCodec.restore(codec.tensors(), codec.metadata())


@pytest.mark.parametrize("missing", ["layers.1.keys.steps", "layers.1.values."])
def test_a_layer_of_which_a_part_is_missing_is_refused(
    tmp_path: Path, codec: KVCodec, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: tensor for name, tensor in codec.tensors().items() if not name.startswith(missing)}
    monkeypatch.setattr(KVCodec, "tensors", lambda self: tensors)
    codec.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError):
        KVCodec.from_pretrained(tmp_path)


def test_sides_with_different_heads_are_refused(codec: KVCodec) -> None:
    tensors = {name: tensor[:1] if name.startswith("layers.1.values.") else tensor for name, tensor in codec.tensors().items()}
    with pytest.raises(ArtifactError, match=r"^layers\.1\."):
        KVCodec.restore(tensors, codec.metadata())


@pytest.mark.parametrize("metadata", [{"layers": 4}, {"settings": {}}, {"layers": 4, "settings": {"rule": {}, "widths": []}}])
def test_missing_content_is_an_artifact_error(tmp_path: Path, codec: KVCodec, metadata: dict[str, Any]) -> None:
    codec.save_pretrained(tmp_path)
    rewrite(tmp_path, metadata=metadata)
    with pytest.raises(ArtifactError, match="doesn't make a kv-codec"):
        KVCodec.from_pretrained(tmp_path)


def test_flipped_bytes_are_refused(tmp_path: Path, codec: KVCodec) -> None:
    codec.save_pretrained(tmp_path)
    content = bytearray((tmp_path / FILE_NAME).read_bytes())
    content[-5] ^= 1
    (tmp_path / FILE_NAME).write_bytes(bytes(content))
    with pytest.raises(ArtifactError):
        KVCodec.from_pretrained(tmp_path)

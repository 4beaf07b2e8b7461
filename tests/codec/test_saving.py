"""A codec as an artifact: it comes back from disk as it was, for the right model only, and nothing broken is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvcaches import ArtifactError, KVCodec
from hf_kvcaches.core.files import FILE_NAME, read_file
from tests import tiny
from tests.codec.measured import calibrate


@pytest.fixture(scope="module")
def codec() -> KVCodec:
    return calibrate()


@pytest.mark.parametrize("options", [{}, {"bytes_ratio": 0.9, "recent": 5}, {"rotation": "post", "metric": "plain", "shards": 2}])
def test_a_codec_comes_back_from_a_folder_as_it_was(tmp_path: Path, options: dict[str, Any]) -> None:
    before = calibrate(**options)
    before.save_pretrained(tmp_path)
    after = KVCodec.from_pretrained(tmp_path, model=tiny.llama())
    assert (after.settings, after.layer_count, after.fingerprint) == (before.settings, 4, before.fingerprint)
    tensors = before.tensors()
    assert set(read_file(tmp_path / FILE_NAME).tensors) == set(tensors)
    assert all(torch.equal(tensor, tensors[name]) and tensor.dtype == tensors[name].dtype for name, tensor in after.tensors().items())
    keys = [torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(layer)) for layer in range(4)]
    for mine, theirs in zip(before.encode(keys, keys), after.encode(keys, keys), strict=True):
        assert torch.equal(mine[0], theirs[0])
    for one, other in zip(after.at(0.3).tensors().values(), before.at(0.3).tensors().values(), strict=True):
        assert torch.equal(one, other)


def test_the_card_tells_how_it_was_made(tmp_path: Path, codec: KVCodec) -> None:
    codec.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    share = f"{codec.bytes_ratio:.4f} of exact keys and values in 16 bits ({codec.bytes_per_token} bytes per token)"
    for words in ("120 tokens in 3 sequences of up to 256", share, "- kv-codec"):
        assert words in card
    for fact in ("share of the bytes | 0.125", "rotation | aware", "metric | loss"):
        assert f"| {fact} |" in card


@pytest.mark.parametrize("form", ["in_place", "slots"])
def test_tensors_that_do_not_fit_are_refused(codec: KVCodec, form: str) -> None:
    KVCodec.restore(codec.tensors(), codec.metadata())
    wrong = {"rows": torch.zeros(2, 16, 9), "mean": torch.ones(1, 8), "steps": torch.ones(2, 16, 3)}
    bits = [torch.full((16,), 7, dtype=torch.uint8), torch.full((32,), 4, dtype=torch.int64)]
    for name, broken in [*wrong.items(), *(("widths", widths) for widths in bits)]:
        with pytest.raises(ArtifactError, match=r"don't fit each other. Calibrate anew"):
            KVCodec.restore({**codec.tensors(), f"{form}.1.{name}": broken}, codec.metadata())


@pytest.mark.parametrize("missing", ["in_place.1.steps", "slots.1.", "packed.2."])
def test_a_layer_of_which_a_part_is_missing_is_refused(
    tmp_path: Path, codec: KVCodec, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: tensor for name, tensor in codec.tensors().items() if not name.startswith(missing)}
    monkeypatch.setattr(KVCodec, "tensors", lambda self: tensors)
    codec.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError):
        KVCodec.from_pretrained(tmp_path)


def test_forms_of_different_layers_are_refused(codec: KVCodec) -> None:
    metadata = codec.metadata()
    with pytest.raises(ArtifactError, match="The forms of a codec have the layers"):
        KVCodec.restore(codec.tensors(), metadata | {"slots": dict(list(metadata["slots"].items())[1:])})

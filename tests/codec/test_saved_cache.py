"""Caches in files and messages whose reader has the codec."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvcaches import ArtifactError, ConfigError, EquipCache, FingerprintMismatch, GrowingCache, KVCodec, SubspaceCache, UnsupportedError
from tests import tiny
from tests.codec.measured import calibrate

MODEL = tiny.llama()
IDS = tiny.ids(3, 40, seed=1)
MASK = torch.ones_like(IDS)
MASK[0, :9] = 0
MASK[2, :38] = 0  # fewer tokens than stay exact


@pytest.fixture(scope="module")
def codec() -> KVCodec:
    return calibrate(MODEL)


@pytest.fixture(scope="module")
def fine(codec: KVCodec) -> KVCodec:
    return codec.at(0.5)


@torch.no_grad()
def filled(cache: Any, ids: torch.Tensor = IDS, mask: torch.Tensor | None = MASK, model: Any = MODEL) -> Any:
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    return cache


def moved(cache: Any, codec: KVCodec | None, mask: torch.Tensor | None, path: Path) -> list[Any]:
    """The cache out of a file, and out of a message."""
    cache.save(path, codec, mask)
    read = type(cache).load(path, cache.model, codec)
    return [read, type(cache).from_bytes(cache.to_bytes(codec, mask), cache.model, codec)]


def real(states: torch.Tensor) -> torch.Tensor:
    """Of all tokens that are no padding, (tokens, kv_heads, head_dim)."""
    return states.transpose(1, 2)[MASK.bool()]


def test_exact_keys_and_values_come_back_from_fine_codes(fine: KVCodec, tmp_path: Path) -> None:
    cache = filled(GrowingCache(MODEL))
    for again in moved(cache, fine, MASK, tmp_path / "cache"):
        assert again.seen == 40
        for layer, other in zip(cache.layers, again.layers, strict=True):
            torch.testing.assert_close(real(layer.keys), real(other.keys), atol=0.15, rtol=0)
            torch.testing.assert_close(real(layer.values), real(other.values), atol=0.15, rtol=0)


def test_codes_take_their_bytes_and_the_first_tokens_stay_exact(codec: KVCodec, tmp_path: Path) -> None:
    cache = filled(GrowingCache(MODEL))
    cache.save(tmp_path / "exact")
    again, sent = moved(cache, codec, MASK, tmp_path / "coded")
    saved = [(tmp_path / name).stat().st_size for name in ("exact", "coded")]
    exact = sum(tensor.numel() * 4 for layer in cache.layers for tensor in (layer.keys, layer.values))
    # 32 bits become 2 of 40 tokens; 4 of each row stay, and codes of so few tokens of so small a model take half as many more.
    assert saved[0] - saved[1] > exact * (1 - 1.6 / 16 - 1 / 10)
    for layer, other, third in zip(cache.layers, again.layers, sent.layers, strict=True):
        for row, padding in enumerate((40 - MASK.sum(1)).tolist()):
            assert torch.equal(layer.keys[row, :, padding : padding + 4], other.keys[row, :, padding : padding + 4])
        assert torch.equal(other.keys, third.keys)
        assert not torch.equal(layer.values, other.values)


def test_rows_are_coded_as_if_alone(codec: KVCodec, tmp_path: Path) -> None:
    together, _ = moved(filled(GrowingCache(MODEL)), codec, MASK, tmp_path / "all")
    for row, padding in enumerate((40 - MASK.sum(1)).tolist()):
        alone, _ = moved(filled(GrowingCache(MODEL), IDS[row : row + 1, padding:], None), codec, None, tmp_path / "one")
        for layer, other in zip(together.layers, alone.layers, strict=True):
            # Sums of rows beside each other are rounded in another order: now and then a number falls into the next step.
            near = (layer.keys[row, :, padding:] - other.keys[0]).abs() < 1e-4
            assert near.float().mean() > 0.95


def test_a_mask_of_the_prompt_is_enough_behind_generated_tokens(fine: KVCodec, tmp_path: Path) -> None:
    cache = GrowingCache(MODEL)
    MODEL.generate(IDS[:2], attention_mask=MASK[:2], past_key_values=cache, max_new_tokens=5, do_sample=False)
    [again, _] = moved(cache, fine, MASK[:2], tmp_path / "cache")
    torch.testing.assert_close(cache.layers[1].keys[0, :, 9:], again.layers[1].keys[0, :, 9:], atol=0.15, rtol=0)


@pytest.mark.parametrize("kind", ["subspace", "equip"])
def test_a_cache_of_codes_leaves_the_codec_out(kind: str, codec: KVCodec, tmp_path: Path) -> None:
    make = {
        "subspace": lambda: SubspaceCache(MODEL, codec, recent=4),
        "equip": lambda: EquipCache(MODEL, "streaming", budget=20, codec=codec),
    }
    cache = filled(make[kind]())
    cache.save(tmp_path / "alone")
    copies = moved(cache, codec, None, tmp_path / "with")
    known = sum(tensor.numel() * tensor.element_size() for tensor in codec.tensors().values())
    assert (tmp_path / "alone").stat().st_size - (tmp_path / "with").stat().st_size > known
    assert all(copy.codec is codec for copy in copies)


def test_a_message_is_read_from_a_function_up_to_its_end(codec: KVCodec) -> None:
    cache = filled(SubspaceCache(MODEL, codec, recent=4))
    source = io.BytesIO(cache.to_bytes(codec) + b"next")
    again = SubspaceCache.from_bytes(source.read, MODEL, codec)
    assert source.read() == b"next"
    assert torch.equal(again.layers[2].codes, cache.layers[2].codes[..., : cache.layers[2].coded])


def test_layers_with_a_window_stay_exact(tmp_path: Path) -> None:
    model = tiny.gemma2()
    cache = filled(GrowingCache(model), IDS[:1], None, model)
    [again, _] = moved(cache, calibrate(model), None, tmp_path / "cache")
    for layer, other in zip(cache.layers, again.layers, strict=True):
        assert torch.equal(layer.keys, other.keys) == (type(layer).__name__ != "GrowingLayer")


def test_what_does_not_fit_is_refused_and_says_why(codec: KVCodec, fine: KVCodec, tmp_path: Path) -> None:
    exact, path = filled(GrowingCache(MODEL)), tmp_path / "cache"
    with pytest.raises(ConfigError, match="attention_mask: expected 1 where a token of 3 rows is real, got None"):
        exact.save(path, codec)
    with pytest.raises(ConfigError, match="padding elsewhere"):
        exact.save(path, codec, MASK.flip(1))
    with pytest.raises(ConfigError, match="codec: expected a KVCodec"):
        exact.save(path, "int8", MASK)
    with pytest.raises(FingerprintMismatch, match="weights differ"):
        exact.save(path, calibrate(tiny.llama(seed=1)), MASK)
    with pytest.raises(UnsupportedError, match="no exact keys and values"):
        filled(EquipCache(MODEL, "streaming", budget=20)).save(path, codec, MASK)
    with pytest.raises(ConfigError, match="the cache's own"):
        filled(SubspaceCache(MODEL, codec)).save(path, fine)
    assert not path.exists()
    exact.save(path, codec, MASK)
    for other in (None, fine):
        with pytest.raises(ConfigError, match=f"codec: expected for .*cache the one of digest {codec.digest}"):
            GrowingCache.load(path, MODEL, other)
    exact.save(path)
    with pytest.raises(ConfigError, match="saved without one"):
        GrowingCache.load(path, MODEL, codec)


def test_messages_of_codes_come_back_whole_or_not_at_all(codec: KVCodec, fine: KVCodec) -> None:
    keys = [torch.randn(2, 2, 9, 8, generator=torch.Generator().manual_seed(layer)) for layer in range(4)]
    codes = codec.encode(keys, keys)
    data = codec.to_bytes(codes)
    back = codec.from_bytes(data)
    assert all(torch.equal(*pair) for mine, theirs in zip(codes, back, strict=True) for pair in zip(mine, theirs, strict=True))
    assert len(data) < sum(len(record) for records in codes for record in records) + 1000
    for length in range(len(data)):
        with pytest.raises(ArtifactError, match=r"end (in part .* )?after|begin with"):
            codec.from_bytes(data[:length])
    for place in range(0, len(data), 7):
        with pytest.raises(ArtifactError):
            codec.from_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
    with pytest.raises(ArtifactError, match=f"codes of the codec {codec.digest}"):
        fine.from_bytes(data)
    with pytest.raises(ArtifactError, match="Expected codes of a KVCodec, got bytes that begin with"):
        codec.from_bytes(filled(GrowingCache(MODEL)).to_bytes())
    with pytest.raises(ConfigError, match="codes: expected what this codec's encode gives"):
        codec.to_bytes(codes[:-1])

"""Libraries whose keys and values are the codes of a `KVCodec`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_kvcaches import FingerprintMismatch, KVCodec, WarmStartCache, WarmStartLibrary
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError
from hf_kvcaches.reuse import layout
from tests import tiny
from tests.segments.test_coded import codec_of
from tests.warmstart.warm import OPEN, library_of, logits_of, words


@pytest.mark.parametrize("changed", [0, 1, 5])
def test_fine_codes_start_a_prompt_as_plain_states_do(changed):
    model, earlier = tiny.llama(), tiny.ids(1, 60, seed=3)
    prompt = earlier.clone()
    prompt[0, 20 : 20 + changed] = (prompt[0, 20 : 20 + changed] + 1) % 90 + 3
    logits = []
    for quantization in (None, codec_of(model)):
        cache = WarmStartCache(model, library_of(model, earlier, quantization=quantization), gate=OPEN)
        logits.append(logits_of(model, prompt, cache, new=3))
        assert cache.report().reused_tokens >= 20
    torch.testing.assert_close(logits[1], logits[0], atol=4e-2, rtol=0)


def test_a_codec_is_part_of_what_a_folder_of_entries_is_for(tmp_path: Path):
    model, codec = tiny.llama(), codec_of(tiny.llama())
    location = f"disk:{tmp_path / 'library'}"
    library_of(model, tiny.ids(1, 40), quantization=codec, location=location)
    assert len(library_of(model, quantization=codec, location=location)) == 1
    assert len(library_of(model, quantization=codec.at(0.25), location=location)) == 0


def test_what_a_codec_can_not_store_is_refused():
    model = tiny.llama()
    with pytest.raises(FingerprintMismatch, match="KVCodec"):
        WarmStartLibrary(tiny.llama(seed=1), words(), quantization=codec_of(model))
    with pytest.raises(UnsupportedError, match="quantization: the codec has no codes for the layers"):
        WarmStartLibrary(tiny.gemma2(), words(), quantization=codec_of(tiny.gemma2()))


def test_a_saved_library_comes_back_with_its_codec(tmp_path: Path):
    model, prompt = tiny.llama(), tiny.ids(1, 60, seed=3)
    codec = codec_of(model).at(0.25)
    library = library_of(model, prompt, quantization=codec)
    library.save_pretrained(tmp_path / "library")
    codec.save_pretrained(tmp_path / "codec")
    again = WarmStartLibrary.from_pretrained(tmp_path / "library", model, words(), codec=KVCodec.from_pretrained(tmp_path / "codec"))
    assert again.ids() == library.ids()
    caches = [WarmStartCache(model, each, strategy="exact") for each in (library, again)]
    logits = [logits_of(model, prompt, cache, new=3) for cache in caches]
    assert torch.equal(logits[0], logits[1])
    assert [cache.report().strategy for cache in caches] == ["exact", "exact"]


def test_a_saved_library_is_refused_without_its_codec_and_with_another_one(tmp_path: Path):
    model, codec = tiny.llama(), codec_of(tiny.llama())
    library_of(model, tiny.ids(1, 40), quantization=codec).save_pretrained(tmp_path / "coded")
    with pytest.raises(ConfigError, match=rf"codec: expected .*{codec.digest}, got None\. Pass codec=KVCodec"):
        WarmStartLibrary.from_pretrained(tmp_path / "coded", model, words())
    other = codec.at(0.25)
    with pytest.raises(ConfigError, match=f"{codec.digest}, got '{other.digest}'"):
        WarmStartLibrary.from_pretrained(tmp_path / "coded", model, words(), codec=other)
    library_of(model, tiny.ids(1, 40), quantization="int8").save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"codec: expected None.*\(int8\)"):
        WarmStartLibrary.from_pretrained(tmp_path / "plain", model, words(), codec=codec)


def test_entries_that_another_codec_coded_do_not_load(tmp_path: Path):
    model, codec = tiny.llama(), codec_of(tiny.llama())
    library = library_of(model, tiny.ids(1, 40), quantization=codec)
    packed = library._packed()
    packed.quantization = layout.name_of(codec.at(0.25))
    packed.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="Prompt 0 does not fit"):
        WarmStartLibrary.from_pretrained(tmp_path, model, words(), codec=codec.at(0.25))

"""Codecs as engines load them: for one engine and one checkpoint, and refused by name for others."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_kvcaches import ArtifactError, ConfigError, FingerprintMismatch, UnsupportedError
from hf_kvcaches.engines.engine_codec import OLDEST, EngineCodec, checkpoint_digest, require_version, save
from tests import tiny
from tests.codec.measured import calibrate


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny.llama().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, checkpoint):
    folder = tmp_path_factory.mktemp("codec")
    save(calibrate(), folder, "vllm", checkpoint)
    return folder


def test_a_codec_comes_back_for_its_engine_and_checkpoint(folder, checkpoint):
    loaded = EngineCodec.load(folder, "vllm")
    assert loaded.codec.digest == calibrate().digest
    loaded.require_checkpoint(checkpoint)


def test_another_engine_a_plain_codec_and_no_folder_are_refused_with_the_command(folder, tmp_path):
    calibrate().save_pretrained(tmp_path / "plain")
    for path, engine in ((folder, "lmcache"), (tmp_path / "plain", "vllm"), (tmp_path / "none", "vllm")):
        with pytest.raises(ConfigError, match=f"calibrate codec --for {engine}"):
            EngineCodec.load(path, engine)


def test_a_newer_format_is_refused_by_its_version(tmp_path):
    (tmp_path / "engine.json").write_text(json.dumps({"version": 99, "engine": "vllm"}))
    with pytest.raises(ArtifactError, match="expected version 1, got 99"):
        EngineCodec.load(tmp_path, "vllm")


def test_a_codec_with_another_rotation_or_without_codes_of_all_layers_is_not_saved(tmp_path, checkpoint):
    with pytest.raises(ConfigError, match="rotation: expected 'post' for lmcache, got 'aware'"):
        save(calibrate(), tmp_path, "lmcache", checkpoint)
    with pytest.raises(UnsupportedError, match="window"):
        save(calibrate(tiny.gemma2()), tmp_path, "vllm", checkpoint)


def test_one_changed_tensor_is_another_checkpoint(folder, checkpoint, tmp_path):
    tensors = load_file(f"{checkpoint}/model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"] += 2.0**-10
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FingerprintMismatch, match="other weights"):
        EngineCodec.load(folder, "vllm").require_checkpoint(str(tmp_path))


def test_a_checkpoint_in_several_files_is_the_same(checkpoint, tmp_path):
    tensors = load_file(f"{checkpoint}/model.safetensors")
    for number in range(2):
        save_file({name: tensors[name] for name in sorted(tensors)[number::2]}, tmp_path / f"model-{number}.safetensors")
    assert checkpoint_digest(str(tmp_path)) == checkpoint_digest(checkpoint)


def test_a_checkpoint_that_is_not_here_or_not_in_safetensors_is_refused(tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        checkpoint_digest(str(tmp_path))
    with pytest.raises(ConfigError, match="on this machine"):
        checkpoint_digest("no-such-owner/no-such-model")


@pytest.mark.parametrize("engine", list(OLDEST))
def test_older_versions_of_an_engine_are_refused_by_name(engine):
    with pytest.raises(UnsupportedError, match=rf"{engine} 0\.5\.0: expected {OLDEST[engine]} or newer"):
        require_version(engine, "0.5.0")
    require_version(engine, OLDEST[engine] + "+cpu")
    require_version(engine, "1.0.0rc1")

"""LMCache stores chunks as codes: its serde by itself, and behind an adapter of LMCache's that keeps files."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_kvcaches import ArtifactError, ConfigError, FingerprintMismatch, UnsupportedError
from hf_kvcaches.engines.engine_codec import EngineCodec
from tests.engines.conftest import BASE, RATIOS
from tests.stores.blob_helpers import free_port
from tests.testbed import held_out, load

pytest.importorskip("lmcache", reason="make engines installs it")

LAYERS, HEADS, DIM = 4, 2, 64


@pytest.fixture(scope="module")
def states() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a text of 512 tokens as they are cached, (layers, heads, tokens, dim) each."""
    model, tokenizer = load()
    ids = torch.tensor([tokenizer(held_out(), add_special_tokens=False)["input_ids"][9000:9512]])
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    keys, values = (torch.stack([getattr(layer, side)[0] for layer in cache.layers]) for side in ("keys", "values"))
    return keys, values


def apart(states: Any) -> torch.Tensor:
    """(2, layers, tokens, heads * dim), as of vLLM before 0.26."""
    return torch.stack([side.transpose(1, 2).flatten(2) for side in states])


def together(states: Any) -> torch.Tensor:
    """(layers, tokens, heads * 2 dim), as of vLLM from 0.26 on."""
    return torch.cat(states, -1).transpose(1, 2).flatten(2)


def together_with_a_plane(states: Any) -> torch.Tensor:
    return together(states)[None]


LAYOUTS = [apart, together, together_with_a_plane]


def key(model: str = BASE) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(chunk_hash=b"chunk", model_name=model, kv_rank=0)


def serde(folder: str, model: str = BASE, **options: Any) -> Any:
    from hf_kvcaches.engines.lmcache import CodecSerde

    return CodecSerde(EngineCodec.load(folder, "lmcache").codec, model, **options)


def buffer_for(own: Any, chunk: torch.Tensor) -> Any:
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    layout = MemoryLayoutDesc(shapes=[chunk.shape], dtypes=[chunk.dtype])
    return SimpleNamespace(tensor=torch.full((own.estimate_serialized_size(layout),), 7, dtype=torch.uint8))


def stored(own: Any, chunk: torch.Tensor) -> Any:
    buffer = buffer_for(own, chunk)
    assert own.serialize(SimpleNamespace(tensor=chunk), buffer, key()) == len(buffer.tensor)
    return buffer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_come_back_in_every_layout(states, lmcache_codecs, layout, dtype):
    own, chunk = serde(lmcache_codecs[0.25]), layout(states)[..., 100:356, :].to(dtype)
    found = torch.full_like(chunk, torch.nan)
    own.deserialize(stored(own, chunk), SimpleNamespace(tensor=found), key())
    assert float((found.float() - chunk.float()).norm() / chunk.float().norm()) < 0.08


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_buffer_has_the_promised_share_of_the_bytes_for_any_chunk(states, lmcache_codecs, ratio):
    own = serde(lmcache_codecs[ratio])
    for start, tokens in ((0, 256), (256, 256), (200, 64)):
        chunk = apart(states)[..., start : start + tokens, :].bfloat16()
        beside = 28 + LAYERS * (8 + 136 * tokens // 64)
        assert len(stored(own, chunk).tensor) - beside == pytest.approx(1.25 * ratio * 2 * chunk.numel(), rel=0.02)


def test_a_chunk_that_does_not_fit_is_refused_and_says_what_to_do(states, lmcache_codecs):
    own, chunk = serde(lmcache_codecs[0.125], bound=0.5), apart(states)
    with pytest.raises(ConfigError, match="bound"):
        stored(own, chunk)


@pytest.mark.parametrize("place", [0, 5, 9, 20, 60, 3000])
def test_a_damaged_buffer_is_refused(states, lmcache_codecs, place):
    own, chunk = serde(lmcache_codecs[0.125]), together(states)
    buffer = stored(own, chunk)
    buffer.tensor[place] ^= 64
    with pytest.raises(ArtifactError):
        own.deserialize(buffer, SimpleNamespace(tensor=torch.empty_like(chunk)), key())


def test_codes_of_another_codec_are_refused(states, lmcache_codecs):
    chunk = together(states)
    buffer = stored(serde(lmcache_codecs[0.25]), chunk)
    with pytest.raises(ArtifactError, match="another codec"):
        serde(lmcache_codecs[0.125]).deserialize(buffer, SimpleNamespace(tensor=torch.empty_like(chunk)), key())


def test_chunks_of_shards_latents_hybrids_and_other_models_are_refused(states, lmcache_codecs):
    own, chunk = serde(lmcache_codecs[0.25]), apart(states)
    for shape in ((2, LAYERS, 64, DIM), (LAYERS, 64, DIM), (1, 2, LAYERS, 64, DIM), (2, 3, 64, HEADS * DIM)):
        with pytest.raises(UnsupportedError, match="Shards of heads"):
            own.serialize(SimpleNamespace(tensor=torch.zeros(shape)), buffer_for(own, chunk), key())
    with pytest.raises(UnsupportedError, match="keep different things"):
        own.estimate_serialized_size(SimpleNamespace(shapes=[chunk.shape, chunk.shape]))
    with pytest.raises(UnsupportedError, match="expected chunks of"):
        own.serialize(SimpleNamespace(tensor=chunk), buffer_for(own, chunk), key("another-model"))


def test_options_of_the_serde_are_checked_when_it_is_made(lmcache_codecs, tmp_path):
    from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor

    import hf_kvcaches.engines.lmcache  # noqa: F401 - registers it

    with pytest.raises(ConfigError, match="codec and model"):
        create_serde_processor(SerdeConfig("hf-kvcaches", {"codec": lmcache_codecs[0.25], "modle": BASE}))
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(ConfigError, match="safetensors"):
        create_serde_processor(SerdeConfig("hf-kvcaches", {"codec": lmcache_codecs[0.25], "model": str(tmp_path)}))
    other = str(load()[0].config.name_or_path).replace("base", "deep")
    with pytest.raises(FingerprintMismatch):
        create_serde_processor(SerdeConfig("hf-kvcaches", {"codec": lmcache_codecs[0.25], "model": other}))


def wait(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(30_000), "LMCache did not answer"


def test_lmcache_stores_and_loads_chunks_through_an_adapter_that_keeps_files(states, lmcache_codecs, tmp_path):
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

    spec = {
        "type": "plugin",
        "module_path": "hf_kvcaches.engines.lmcache",
        "class_name": "CodecAdapter",
        "adapter_params": {"type": "fs", "base_path": str(tmp_path)},
    }
    adapter = create_l2_adapter(get_l2_adapter_config_class("plugin").from_dict(spec))
    from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor

    processor = create_serde_processor(SerdeConfig("hf-kvcaches", {"codec": lmcache_codecs[0.25], "model": BASE}))
    chunk = together(states)
    source, buffer = memory_object(chunk), memory_object(buffer_for(serde(lmcache_codecs[0.25]), chunk).tensor)
    task = processor.submit_serialize([source], [buffer], [key()])
    wait(processor.get_serialize_event_fd())
    assert processor.query_serialize_result(task)
    adapter.submit_store_task([key()], [buffer])
    wait(adapter.get_store_event_fd())
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file.stat().st_size < 0.36 * 2 * chunk.numel()
    read, found = memory_object(torch.zeros_like(buffer.tensor)), memory_object(torch.full_like(chunk, torch.nan))
    task = adapter.submit_load_task([key()], [read])
    wait(adapter.get_load_event_fd())
    assert adapter.query_load_result(task).test(0)
    task = processor.submit_deserialize([read], [found], [key()])
    wait(processor.get_deserialize_event_fd())
    assert processor.query_deserialize_result(task)
    assert float((found.tensor - chunk).norm() / chunk.norm()) < 0.08
    processor.close()
    adapter.close()


def test_the_server_of_lmcache_starts_with_the_adapter_and_the_serde_of_the_guide(lmcache_codecs, tmp_path):
    adapter = {
        "type": "plugin",
        "module_path": "hf_kvcaches.engines.lmcache",
        "class_name": "CodecAdapter",
        "adapter_params": {"type": "fs", "base_path": str(tmp_path / "chunks")},
        "serde": {"type": "hf-kvcaches", "codec": lmcache_codecs[0.125], "model": BASE},
    }
    ports = [argument for name in ("--port", "--http-port") for argument in (name, str(free_port()))]
    options = ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--disable-observability", *ports, "--l2-adapter", json.dumps(adapter)]
    command = str(Path(sys.executable).with_name("lmcache"))
    with (tmp_path / "log").open("w+b") as log, subprocess.Popen([command, "server", *options], stdout=log, stderr=log) as server:
        try:
            until = time.monotonic() + 120
            while b"Application startup complete" not in (output := (tmp_path / "log").read_bytes()) and time.monotonic() < until:
                assert server.poll() is None, output.decode()
                time.sleep(0.2)
        finally:
            server.terminate()
    assert b"Application startup complete" in output
    assert (tmp_path / "chunks").is_dir()


def memory_object(tensor: torch.Tensor) -> Any:
    """A piece of LMCache's memory with a tensor's content."""
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    raw = tensor.contiguous().view(torch.uint8).flatten().clone()
    metadata = MemoryObjMetadata(
        shape=tensor.shape,
        dtype=tensor.dtype,
        address=0,
        phy_size=raw.numel(),
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[tensor.shape],
        dtypes=[tensor.dtype],
    )
    return TensorMemoryObj(raw, metadata, None)

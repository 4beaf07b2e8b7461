"""A model whose weights can't be read where it runs has the identity that the caller gives it."""

import gc
import json
import os
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from hf_kvcaches import GrowingCache, KVCodec, ModelFingerprint, SegmentReuseCache, SegmentStore, SubspaceCache, set_fingerprint
from hf_kvcaches.core.identity import identity_of
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError
from tests import tiny
from tests.core.fingerprint_helpers import llama, two_adapters


def without_data(model: torch.nn.Module) -> torch.nn.Module:
    """The weights on the meta device, as where another program keeps them."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
    return model


def carried(fingerprint: ModelFingerprint) -> ModelFingerprint:
    return ModelFingerprint.from_dict(json.loads(json.dumps(fingerprint.to_dict())))


def test_weights_that_cannot_be_read_ask_for_a_fingerprint() -> None:
    model = without_data(tiny.llama())
    with pytest.raises(UnsupportedError, match=r"embed_tokens.weight.*meta device.*set_fingerprint"):
        ModelFingerprint.of(model)
    with SegmentStore("memory") as store:
        assert "set_fingerprint" in identity_of(model).reason
        codec = KVCodec.calibrate(tiny.llama(), None, [tiny.ids(60).tolist()], progress=False)
        for ask in (lambda: SubspaceCache(model, codec), lambda: GrowingCache(model).save("unused")):
            with pytest.raises((FingerprintMismatch, UnsupportedError), match="set_fingerprint"):
                ask()
        SegmentReuseCache(model, store, mode="auto")


def test_a_given_fingerprint_says_what_cannot_be_read() -> None:
    expected = ModelFingerprint.of(tiny.llama())
    model = without_data(tiny.llama())
    set_fingerprint(model, carried(expected))
    assert ModelFingerprint.of(model) == expected
    assert identity_of(model).digest == expected.digest
    codec = KVCodec.calibrate(tiny.llama(), None, [tiny.ids(60).tolist()], progress=False)
    SubspaceCache(model, codec)
    other = KVCodec.calibrate(tiny.llama(seed=1), None, [tiny.ids(60).tolist()], progress=False)
    with pytest.raises(FingerprintMismatch, match="weights differ"):
        SubspaceCache(model, other)
    set_fingerprint(model, None)
    with pytest.raises(UnsupportedError, match="set_fingerprint"):
        ModelFingerprint.of(model)


def test_what_can_be_read_is_read() -> None:
    model = tiny.llama()
    fingerprint = ModelFingerprint.of(model)
    set_fingerprint(model, fingerprint)
    model.model.norm.weight.data[0] += 1
    assert ModelFingerprint.of(model).differs_from(fingerprint) == ["weights differ"]
    model.model.layers[0].self_attn.scaling = 1.0
    assert "settings differ" in ModelFingerprint.of(without_data(model)).differs_from(fingerprint)[0]


@pytest.mark.parametrize(
    "other",
    [
        lambda: tiny.llama(hidden_size=48, num_attention_heads=6),
        lambda: tiny.llama(num_hidden_layers=2),
        lambda: tiny.llama().to(torch.bfloat16),
    ],
    ids=["shape", "layers", "dtype"],
)
def test_a_fingerprint_of_another_model_is_refused_and_the_one_before_stays(other) -> None:
    model, fingerprint = without_data(tiny.llama()), ModelFingerprint.of(tiny.llama())
    set_fingerprint(model, fingerprint)
    with pytest.raises(UnsupportedError, match="set_fingerprint"):
        set_fingerprint(model, ModelFingerprint.of(other()))
    assert ModelFingerprint.of(model) == fingerprint


def test_what_is_no_fingerprint_is_refused() -> None:
    with pytest.raises(ConfigError, match="fingerprint"):
        set_fingerprint(tiny.llama(), "a digest")


def test_adapters_that_cannot_be_read_are_known_too_and_merged_ones_are_refused() -> None:
    whole = two_adapters()
    fingerprint = ModelFingerprint.of(whole)
    model = without_data(two_adapters())
    set_fingerprint(model, fingerprint)
    assert ModelFingerprint.of(model) == ModelFingerprint.of(model.get_base_model()) == fingerprint
    model.set_adapter("medical")
    with pytest.raises(UnsupportedError, match="set_fingerprint"):
        ModelFingerprint.of(model)
    readable = two_adapters()
    set_fingerprint(readable, fingerprint)
    readable.merge_adapter()
    without_data(readable.get_base_model())
    with pytest.raises(UnsupportedError, match="set_fingerprint"):
        ModelFingerprint.of(readable)


def test_a_given_fingerprint_keeps_no_model_alive() -> None:
    model = llama()
    set_fingerprint(model, ModelFingerprint.of(model))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.full
def test_a_sharded_model_is_the_whole_one_by_its_given_fingerprint(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(sharded, args=(tmp_path, ModelFingerprint.of(tiny.llama()).to_dict()), nprocs=2)
    for rank in range(2):
        found = ModelFingerprint.from_dict(json.loads((tmp_path / str(rank)).read_text()))
        assert not found.differs_from(ModelFingerprint.of(tiny.llama()))


def sharded(rank: int, folder: Path, fingerprint: dict) -> None:
    """What one of the processes does."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"})
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = tiny.llama()
    for part in (*model.model.layers, model):
        fully_shard(part)
    assert "set_fingerprint" in identity_of(model).reason
    set_fingerprint(model, ModelFingerprint.from_dict(fingerprint))
    found = identity_of(model).fingerprint
    assert found is not None
    (folder / str(rank)).write_text(json.dumps(found.to_dict()))
    dist.destroy_process_group()

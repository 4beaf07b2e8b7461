"""Whatever a file says that has the right checksums, loading it gives an object or an `ArtifactError`, soon and without much memory."""

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cache as remembered
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_kvcaches import (
    EquipCache,
    GrowingCache,
    KVCache,
    KVCodec,
    SegmentPolicy,
    SegmentReuseCache,
    SegmentStore,
    SubspaceCache,
    WarmStartGate,
    WarmStartLibrary,
)
from hf_kvcaches.core.files import FILE_NAME, read_file
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch, UnsupportedError
from hf_kvcaches.translate.translator import CacheTranslator
from hf_kvcaches.warmstart.paper.maps import Adapters, TrainedAdapters
from tests import tiny
from tests.core.artifact_helpers import Basis, basis, forge, rewrite
from tests.translate.pairs import fitted
from tests.warmstart.warm import library_of, words

# Seconds of the processor for one load: no load that ends in an error may take longer than some that doesn't.
SECONDS = 5.0
HOSTILE = [10**9, 10**18, 10**250, -1, 0, 1e308, 0.5, True, None, "", "x" * 1000, "1e400", [], {}, [[[]]], {"a": []}, [10**9, 10**9]]


@remembered
def model() -> Any:
    return tiny.llama(num_hidden_layers=2)


@remembered
def codec() -> KVCodec:
    return KVCodec.calibrate(model(), None, [tiny.ids(1, 60)[0].tolist()], progress=False)


class Kind(NamedTuple):
    """How one is made in a folder, and loaded."""

    save: Callable[[Path], Any]
    load: Callable[[Path], Any]


def adapters() -> TrainedAdapters:
    return TrainedAdapters(Adapters(*((torch.eye(4).repeat(2, 1, 1),) * 2,) * 2), 4, "paper", 1, ({"kl": 0.5},))


ARTIFACTS = {
    "codec": Kind(lambda folder: codec().save_pretrained(folder), KVCodec.from_pretrained),
    "policy": Kind(lambda folder: SegmentPolicy(bound=0.1, measured=({"kl": 0.1},)).save_pretrained(folder), SegmentPolicy.from_pretrained),
    "gate": Kind(lambda folder: WarmStartGate(measured=({"kl": 0.1},)).save_pretrained(folder), WarmStartGate.from_pretrained),
    "translator": Kind(lambda folder: fitted().save_pretrained(folder), CacheTranslator.from_pretrained),
    "adapters": Kind(lambda folder: adapters().save_pretrained(folder), TrainedAdapters.from_pretrained),
    "library": Kind(
        lambda folder: library_of(model(), tiny.ids(1, 12)).save_pretrained(folder),
        lambda folder: WarmStartLibrary.from_pretrained(folder, model(), words()),
    ),
}


@pytest.fixture(scope="module", params=list(ARTIFACTS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Path]:
    kind, folder = ARTIFACTS[request.param], tmp_path_factory.mktemp("saved")
    kind.save(folder)
    assert kind.load(folder) is not None
    return kind, folder


def copied(saved: tuple[Kind, Path], to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(saved[1], to))


def holders(value: Any) -> Iterator[tuple[Any, Any]]:
    """All dicts and lists inside, each with the name or number of something in it."""
    for name, inside in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, name
        if isinstance(inside, dict | list):
            yield from holders(inside)


def outcome(load: Callable[[], Any]) -> str:
    """Why something is refused, or nothing where it is loaded. A setting of a policy or model that is elsewhere is refused as such."""
    before, reason = time.process_time(), ""
    try:
        load()
    except (ArtifactError, UnsupportedError) as error:
        reason = str(error)
    assert time.process_time() - before < SECONDS
    assert len(reason) < 3000
    return reason


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_metadata_with_a_hostile_value_anywhere(saved, tmp_path, data):
    folder = copied(saved, tmp_path / "copy")
    metadata = read_file(folder / FILE_NAME).header["metadata"]
    # Another encoder than the library's is the mistake of who loads it.
    holder, name = data.draw(st.sampled_from([place for place in holders(metadata) if place[1] != "encoder"]))
    what = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if what == "replace":
        holder[name] = data.draw(st.sampled_from(HOSTILE))
    elif what == "remove":
        del holder[name]
    elif isinstance(holder, dict):
        holder["more"] = 1
    else:
        holder.append(copy.deepcopy(holder[name]))
    rewrite(folder, metadata=metadata)
    outcome(lambda: saved[0].load(folder))


SHAPES = {
    "flat": lambda tensor: tensor.flatten(),
    "longer": lambda tensor: torch.cat([tensor, tensor]) if tensor.ndim else tensor[None],
    "shorter": lambda tensor: tensor[:-1] if tensor.ndim else tensor[None],
    "empty": lambda tensor: tensor.new_zeros(1 << 20, 0),
    "long": lambda tensor: tensor.new_zeros(1 << 20, 1),
    "deep": lambda tensor: tensor[(None,) * 8],
    "whole numbers": lambda tensor: tensor.long(),
    "bits": lambda tensor: tensor.bool(),
}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tensors_of_other_shapes_and_types(saved, tmp_path, data):
    folder = copied(saved, tmp_path / "copy")
    tensors = read_file(folder / FILE_NAME).tensors
    # A policy and a gate have no tensors.
    name, what = data.draw(st.sampled_from([(name, what) for name in sorted(tensors) for what in [*SHAPES, "gone"]] + [("", "one more")]))
    if what == "gone":
        del tensors[name]
    elif what == "one more":
        tensors["layers.1000000000.more"] = next(iter(tensors.values()), torch.ones(2, 3))
    else:
        tensors[name] = SHAPES[what](tensors[name])
    rewrite(folder, tensors)
    outcome(lambda: saved[0].load(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(saved, tmp_path, value):
    tensors = read_file(saved[1] / FILE_NAME).tensors
    for name in [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()][:6]:
        folder = copied(saved, tmp_path / "copy")
        spoilt = tensors[name].clone()
        spoilt.view(-1)[0] = value
        rewrite(folder, tensors | {name: spoilt})
        with pytest.raises(ArtifactError):
            saved[0].load(folder)


# What any artifact's files may be


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_saved(tmp_path, value):
    with pytest.raises(ValueError, match="expected finite values"):
        basis(value).save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


# Saved caches


def equip() -> KVCache:
    return EquipCache(model(), policy="h2o", budget=6)


CACHES: dict[str, Callable[[], KVCache]] = {
    "growing": lambda: GrowingCache(model()),
    "equip": equip,
    "subspace": lambda: SubspaceCache(model(), codec()),
    "segments": lambda: SegmentReuseCache(model(), SegmentStore("memory"), mode="exact"),
}


@pytest.fixture(scope="module", params=list(CACHES))
def saved_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[type[KVCache], Path]:
    cache, path = CACHES[request.param](), tmp_path_factory.mktemp("saved") / "cache"
    model().generate(tiny.ids(1, 9), past_key_values=cache, max_new_tokens=3, do_sample=False, pad_token_id=0)
    cache.save(path)
    assert type(cache).load(path, model()).seen == cache.seen
    return type(cache), path


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_saved_cache_with_a_hostile_value_anywhere(saved_cache, tmp_path, data):
    cls, path = saved_cache
    header, tensors = read_file(path)
    inside = {name: header[name] for name in ("settings", "layers")}
    holder, name = data.draw(st.sampled_from(list(holders(inside))))
    holder[name] = data.draw(st.sampled_from(HOSTILE))
    header |= inside
    if data.draw(st.booleans()):
        changed = data.draw(st.sampled_from(sorted(tensors)))
        tensors[changed] = SHAPES[data.draw(st.sampled_from(list(SHAPES)))](tensors[changed])
    forged = tmp_path / "forged"
    forge(forged, json.dumps(header), tensors)
    outcome(lambda: cls.load(forged, model()))


# Caches in folders


def test_a_cache_goes_into_a_folder_and_comes_back_from_it(tmp_path):
    cache = GrowingCache(model())
    model().generate(tiny.ids(1, 9), past_key_values=cache, max_new_tokens=2, do_sample=False)
    cache.save_pretrained(tmp_path / "new" / "folder")
    (tmp_path / "new" / "folder" / "notes.txt").write_text("mine")
    cache.save_pretrained(tmp_path / "new" / "folder")
    again = GrowingCache.from_pretrained(tmp_path / "new" / "folder", model())
    assert again.seen == cache.seen
    assert torch.equal(again.layers[1].keys, cache.layers[1].keys)
    assert (tmp_path / "new" / "folder" / "notes.txt").read_text() == "mine"
    with pytest.raises(FingerprintMismatch):
        GrowingCache.from_pretrained(tmp_path / "new" / "folder", tiny.llama(seed=1, num_hidden_layers=2))
    with pytest.raises(ConfigError, match="A file has that name"):
        cache.save_pretrained(tmp_path / "new" / "folder" / "notes.txt")


def test_a_folder_without_a_cache_and_a_name_of_none_are_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"expected kvcache\.safetensors, got none"):
        GrowingCache.from_pretrained(tmp_path, model())
    with pytest.raises(ArtifactError, match="no such folder"):
        GrowingCache.from_pretrained("nobody/nothing", model(), cache_dir=tmp_path, local_files_only=True)
    with pytest.raises(ArtifactError, match="Check the path"):
        GrowingCache.from_pretrained(tmp_path / "elsewhere" / "folder", model())


def test_an_artifact_behind_links_is_loaded_as_from_a_hub_cache(tmp_path):
    basis(3.0).save_pretrained(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(Path("..") / "blobs" / path.name)
    assert torch.equal(Basis.from_pretrained(tmp_path / "snapshot").content["basis"], torch.full((3, 4), 3.0))

"""Saved caches and translators belong to the model that computed them, at the time when it did."""

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from hf_kvcaches import EquipCache, GrowingCache, SegmentReuseCache, SegmentStore, TranslatedCache
from hf_kvcaches.errors import FingerprintMismatch
from tests import tiny
from tests.identity.changes import CHANGES, LASTING, PROMPT, Setup, ask, assert_like, plainly, two_adapters
from tests.translate.pairs import lossless

FEW = PROMPT[:, :20]


@pytest.mark.parametrize("name", CHANGES)
def test_a_cache_is_saved_by_the_model_that_filled_it_alone(name: str, tmp_path: Path) -> None:
    change, path, later = CHANGES[name], tmp_path / "cache.safetensors", tmp_path / "later.safetensors"
    setup = Setup(change.make())
    untouched, cache = copy.deepcopy(setup.runner), GrowingCache(setup.runner)
    ask(setup, cache, FEW)
    cache.save(path)
    with change.enter(setup):
        if not change.in_call:
            with pytest.raises(FingerprintMismatch):
                cache.save(later)
            with pytest.raises(FingerprintMismatch):
                GrowingCache.load(path, setup.runner)
        changed = GrowingCache(setup.runner)
        ask(setup, changed, FEW)
        if change.seen:
            changed.save(later)
            assert GrowingCache.load(later, setup.runner).seen == changed.seen
        else:
            with pytest.raises(FingerprintMismatch, match="can't be saved"):
                changed.save(later)
    if change.seen:
        with pytest.raises(FingerprintMismatch):
            GrowingCache.load(later, untouched)
    if change.comes_back:
        with pytest.raises(FingerprintMismatch):
            changed.save(later)
        cache.save(later)
        assert GrowingCache.load(path, setup.runner).seen == cache.seen


def test_a_chat_whose_turns_had_different_adapters_is_not_saved(tmp_path: Path) -> None:
    setup = Setup(two_adapters())
    cache = GrowingCache(setup.runner)
    first = ask(setup, cache, FEW)[0]
    setup.runner.set_adapter("medical")
    ask(setup, cache, torch.cat([first, FEW], dim=1))
    for adapter in ("medical", "law"):
        setup.runner.set_adapter(adapter)
        with pytest.raises(FingerprintMismatch, match="changed behind the first 22 tokens"):
            cache.save(tmp_path / "cache.safetensors")
    # Without the turn that the other adapter computed, all is of one model.
    cache.crop(22 - cache.seen)
    cache.save(tmp_path / "cache.safetensors")


def test_a_loaded_cache_goes_on_under_the_identity_that_filled_it(tmp_path: Path) -> None:
    setup = Setup(two_adapters())
    with SegmentStore("memory", quantization=None) as store:
        cache = SegmentReuseCache(setup.runner, store, mode="exact")
        first = ask(setup, cache, PROMPT)[0]
        cache.save(tmp_path / "cache.safetensors")
    loaded = SegmentReuseCache.load(tmp_path / "cache.safetensors", setup.runner)
    setup.runner.set_adapter("medical")
    ask(setup, loaded, torch.cat([first, FEW], dim=1))
    with pytest.raises(FingerprintMismatch, match="changed behind"):
        loaded.save(tmp_path / "cache.safetensors")


def test_a_loaded_cache_that_went_on_is_saved_again(tmp_path: Path) -> None:
    setup, path = Setup(two_adapters()), tmp_path / "cache.safetensors"
    cache = GrowingCache(setup.runner)
    tokens = ask(setup, cache, FEW)[0]
    for _ in range(2):
        cache.save(path)
        cache = GrowingCache.load(path, setup.runner)
        tokens = ask(setup, cache, torch.cat([tokens, FEW], dim=1))[0]
    assert cache.seen == tokens.shape[1] - 1


@torch.no_grad()
@pytest.mark.parametrize("changed", [None, "question", "edit", "answer"])
@pytest.mark.parametrize("new", [3, 8, 1])
def test_what_another_adapter_has_put_into_a_pruned_cache_is_not_saved(changed: str | None, new: int, tmp_path: Path) -> None:
    setup = Setup(two_adapters())
    runner, cache = setup.runner, EquipCache(setup.runner, "kvzip", budget=16, recent=2)
    runner(FEW, past_key_values=cache)
    cache.compress(runner, input_ids=FEW)
    for operation in ("question", "edit", "answer"):
        runner.set_adapter("medical" if operation == changed else "law")
        if operation == "edit":
            cache.edit(runner, 15, 18, PROMPT[0, :new])
        else:
            runner(PROMPT[:, :5], past_key_values=cache)
    runner.set_adapter("law")
    with pytest.raises(FingerprintMismatch, match="changed behind") if changed else nullcontext():
        cache.save(tmp_path / "cache.safetensors")


# A translator serves its models in every precision.
OF_TRANSLATORS = [name for name in LASTING if name != "dtype"]


@pytest.mark.parametrize("name", OF_TRANSLATORS)
def test_a_changed_producer_or_consumer_is_refused_when_it_encodes_makes_a_cache_or_fills_one(name: str) -> None:
    change = LASTING[name]
    setup = Setup(change.make())
    before, translator = plainly(setup, FEW), lossless(setup.runner)
    codes = translator.encode(setup.runner, FEW)
    cache = TranslatedCache(setup.runner, translator, codes)
    with change.enter(setup):
        if name == "dropout":  # which encoding leaves out
            assert translator.encode(setup.runner, FEW).to_bytes() == codes.to_bytes()
        else:
            with pytest.raises(FingerprintMismatch, match="producer"):
                translator.encode(setup.runner, FEW)
            with pytest.raises(FingerprintMismatch, match="producer"):
                next(translator.stream(setup.runner, FEW))
        with pytest.raises(FingerprintMismatch, match="consumer"):
            TranslatedCache(setup.runner, translator, codes)
        with pytest.raises(FingerprintMismatch, match="consumer"):
            ask(setup, cache, FEW)
    if change.comes_back:
        assert translator.encode(setup.runner, FEW).to_bytes() == codes.to_bytes()
        cache.reset()
        assert_like(ask(setup, cache, FEW), before)


def test_a_model_with_a_hook_is_no_producer_to_fit_a_translator_to() -> None:
    model = tiny.llama()
    model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    with pytest.raises(FingerprintMismatch, match="may change what it computes"):
        lossless(model)

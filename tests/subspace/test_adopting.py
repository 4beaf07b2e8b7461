"""A prompt's keys and values from another cache leave `SubspaceCache` as a prefill of its own does."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import AdaptiveSubspace, GrowingCache, KVCodec, SubspaceCache
from hf_kvcaches.errors import ConfigError, FingerprintMismatch
from tests import tiny
from tests.subspace.running import pair, run

pytestmark = pytest.mark.full

PROMPT, STEPS = 45, 20
TOLERANCE = {"rtol": 0, "atol": 1e-4}
WINDOW: dict[str, Any] = {"sinks": 2, "recent": 7}
# A basis of 16 tokens, and a new one after 32.
ADAPTIVE: dict[str, Any] = {"rank": (3, 4), "warmup": 16, "chunk": 32}


def settings_of(mode: str) -> tuple[Any, dict[str, Any]]:
    """A model, and what makes a cache for it."""
    if mode in ("aware", "post"):
        model, codec = pair(mode)
        return model, {"codec": codec, **WINDOW}
    changes = {
        "rank": {},
        "rank_post": {"rotation": "post"},
        "bytes": {"rank": None, "bytes_ratio": 0.5},
        "rank_fd": {"sketch": "fd"},
        "long_warmup": {"warmup": 64},
    }[mode]
    return tiny.llama(), {"adaptive": AdaptiveSubspace(**ADAPTIVE | changes), **WINDOW}


MODES = ("aware", "post", "rank", "rank_post", "bytes", "rank_fd", "long_warmup")


def both(
    mode: str, text: torch.Tensor, mask: torch.Tensor | None = None, source: Any = None, **options: Any
) -> tuple[Any, SubspaceCache, SubspaceCache]:
    """A model, a cache that adopted a prompt, and one with a prefill of its own."""
    model, settings = settings_of(mode)
    settings |= options
    past = DynamicCache(config=model.config) if source is None else source(model)
    plain = SubspaceCache(model, **settings)
    for cache in (past, plain):
        run(model, cache, text, [text.shape[1]], mask)
    return model, SubspaceCache.from_cache(past, model, attention_mask=mask, **settings), plain


def go_on(model: Any, caches: list[SubspaceCache], mask: torch.Tensor) -> None:
    """Asserts that the same tokens, one by one, give the same logits; `mask` says which are real."""
    text = tiny.ids(len(mask), PROMPT + STEPS, seed=5)
    torch.testing.assert_close(*(run(model, cache, text, [1] * STEPS, mask, start=PROMPT) for cache in caches), **TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("sinks", "recent"), [(2, 7), (0, 0), (64, 0)])
def test_decoding_goes_on_as_behind_a_prefill(mode: str, padded: bool, sinks: int, recent: int) -> None:
    mask = torch.ones(3, PROMPT + STEPS, dtype=torch.long)
    if padded:
        mask[0, :11] = 0
        mask[2, :41] = 0  # fewer than are kept exactly
    model, adopted, plain = both(mode, tiny.ids(3, PROMPT), mask[:, :PROMPT], sinks=sinks, recent=recent)
    got, expected = adopted.owned_tensors(), plain.owned_tensors()
    assert adopted.seen == plain.seen
    assert set(got) == set(expected)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4, equal_nan=True)
    go_on(model, [adopted, plain], mask)


def test_sliding_layers_are_copied() -> None:
    model = tiny.gemma2()
    codec = KVCodec.calibrate(model, None, [tiny.ids(1, 96)[0].tolist()], 0.3, progress=False)
    for past in (DynamicCache(config=model.config), DynamicCache(), GrowingCache(model)):
        plain = SubspaceCache(model, codec, **WINDOW)
        for cache in (past, plain):
            run(model, cache, tiny.ids(2, PROMPT), [PROMPT])
        go_on(model, [SubspaceCache.from_cache(past, model, codec, **WINDOW), plain], torch.ones(2, PROMPT + STEPS, dtype=torch.long))


@pytest.mark.parametrize("enable_grad", [False, True])
@pytest.mark.parametrize("mode", ["aware", "rank", "long_warmup"])
def test_nothing_is_shared_with_the_source(mode: str, enable_grad: bool) -> None:
    model, settings = settings_of(mode)
    with torch.set_grad_enabled(enable_grad):
        past = DynamicCache(config=model.config)
        model(tiny.ids(2, PROMPT), past_key_values=past)
        before = [layer.keys.detach().clone() for layer in past.layers]
        cache = SubspaceCache.from_cache(past, model, **settings)
    blocks = {tensor.untyped_storage().data_ptr() for layer in past.layers for tensor in (layer.keys, layer.values)}
    held = cache.owned_tensors().values()
    assert not blocks & {tensor.untyped_storage().data_ptr() for tensor in held}
    assert not any(tensor.requires_grad for tensor in held)
    run(model, cache, tiny.ids(2, STEPS, seed=5), [1] * STEPS)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(past.layers, before, strict=True))
    tensors = [weakref.ref(tensor) for layer in past.layers for tensor in (layer.keys, layer.values)]
    del past
    gc.collect()
    assert not any(each() is not None for each in tensors)


# What comes after.


@pytest.mark.parametrize("mode", ["aware", "rank", "long_warmup"])
def test_saved_it_comes_back_if_it_is_known_who_computed_it(mode: str, tmp_path: Path) -> None:
    model, adopted, plain = both(mode, tiny.ids(2, PROMPT), source=GrowingCache)
    adopted.save(tmp_path / "cache.safetensors")
    loaded = SubspaceCache.load(tmp_path / "cache.safetensors", model)
    go_on(model, [loaded, plain], torch.ones(2, PROMPT + STEPS, dtype=torch.long))
    model, foreign, _ = both(mode, tiny.ids(2, PROMPT))
    with pytest.raises(FingerprintMismatch, match="does not say which model"):
        foreign.save(tmp_path / "foreign.safetensors")


def test_a_layer_that_holds_tokens_adopts_none() -> None:
    _, adopted, _ = both("aware", tiny.ids(1, PROMPT))
    keys = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ConfigError, match="empty layer, got one that has seen 45 tokens"):
        adopted.adopt_layer(0, keys, keys, torch.arange(5)[None])

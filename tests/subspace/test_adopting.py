"""A prompt's keys and values from another cache leave `SubspaceCache` as a prefill of its own does."""

import gc
import weakref
from collections.abc import Iterable
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

PROMPT, STEPS = 45, [1] * 20
TOLERANCE = {"rtol": 0, "atol": 1e-4}
WINDOW: dict[str, Any] = {"sinks": 2, "recent": 7}
# A basis of 16 tokens, and a new one after 32.
ADAPTIVE: dict[str, Any] = {"rank": (3, 4), "warmup": 16, "chunk": 32}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterable[None]:
    with torch.no_grad():
        yield


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


def same_state(adopted: SubspaceCache, plain: SubspaceCache) -> None:
    """Asserts that all tensors are the same."""
    assert adopted.seen == plain.seen
    got, expected = adopted.owned_tensors(), plain.owned_tensors()
    assert set(got) == set(expected)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4, equal_nan=True)


def go_on(
    model: Any, adopted: SubspaceCache, plain: SubspaceCache, chunks: list[int], mask: torch.Tensor | None = None, rows: int = 2
) -> None:
    """Asserts that the same tokens give the same logits."""
    more, found = tiny.ids(rows, sum(chunks), seed=5), []
    for cache in (adopted, plain):
        logits, start = [], 0
        for chunk in chunks:
            options: dict[str, Any] = {}
            if mask is not None:
                mask = torch.nn.functional.pad(mask[:, : cache.seen], (0, cache.seen + chunk - mask[:, : cache.seen].shape[1]), value=1)
                options = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1)[:, -chunk:]}
            logits.append(model(more[:, start : start + chunk], past_key_values=cache, **options).logits)
            start += chunk
        found.append(torch.cat(logits, 1))
    torch.testing.assert_close(found[0], found[1], **TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
def test_decoding_goes_on_as_behind_a_prefill(mode: str) -> None:
    model, adopted, plain = both(mode, tiny.ids(2, PROMPT))
    same_state(adopted, plain)
    go_on(model, adopted, plain, STEPS)


@pytest.mark.parametrize("mode", MODES)
def test_padded_rows_go_on_as_behind_a_prefill(mode: str) -> None:
    mask = torch.ones(3, PROMPT, dtype=torch.long)
    mask[0, :11] = 0
    mask[2, :41] = 0  # fewer than are kept exactly
    model, adopted, plain = both(mode, tiny.ids(3, PROMPT), mask)
    same_state(adopted, plain)
    go_on(model, adopted, plain, STEPS, mask, rows=3)


@pytest.mark.parametrize("mode", ["aware", "rank"])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (4, 64), (64, 0)])
def test_any_window(mode: str, sinks: int, recent: int) -> None:
    model, adopted, plain = both(mode, tiny.ids(2, PROMPT), sinks=sinks, recent=recent)
    same_state(adopted, plain)
    go_on(model, adopted, plain, STEPS)


def test_sliding_layers_are_copied() -> None:
    model = tiny.gemma2()
    codec = KVCodec.calibrate(model, None, [tiny.ids(1, 96)[0].tolist()], 0.3, progress=False)
    text = tiny.ids(2, PROMPT)
    for past in (DynamicCache(config=model.config), DynamicCache(), GrowingCache(model)):
        plain = SubspaceCache(model, codec, **WINDOW)
        for cache in (past, plain):
            run(model, cache, text, [PROMPT])
        adopted = SubspaceCache.from_cache(past, model, codec, **WINDOW)
        go_on(model, adopted, plain, STEPS)


@pytest.mark.parametrize("mode", ["aware", "rank"])
def test_bfloat16(mode: str) -> None:
    model = tiny.llama().bfloat16()
    options: dict[str, Any] = {"adaptive": AdaptiveSubspace(**ADAPTIVE)}
    if mode == "aware":
        texts = [tiny.ids(1, 96)[0].tolist()]
        options = {"codec": KVCodec.calibrate(model, None, texts, 0.4, progress=False)}
    past, plain, text = DynamicCache(config=model.config), SubspaceCache(model, **options, **WINDOW), tiny.ids(2, PROMPT)
    for cache in (past, plain):
        run(model, cache, text, [PROMPT])
    adopted = SubspaceCache.from_cache(past, model, **options, **WINDOW)
    more = tiny.ids(2, 20, seed=5)
    torch.testing.assert_close(run(model, adopted, more, STEPS), run(model, plain, more, STEPS), rtol=0, atol=0.15)


@pytest.mark.parametrize("enable_grad", [False, True])
@pytest.mark.parametrize("mode", MODES)
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
    run(model, cache, tiny.ids(2, 20, seed=5), STEPS)
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
    go_on(model, SubspaceCache.load(tmp_path / "cache.safetensors", model), plain, STEPS)
    model, foreign, _ = both(mode, tiny.ids(2, PROMPT))
    with pytest.raises(FingerprintMismatch, match="does not say which model"):
        foreign.save(tmp_path / "foreign.safetensors")


def test_a_layer_that_holds_tokens_adopts_none() -> None:
    _, adopted, _ = both("aware", tiny.ids(1, PROMPT))
    keys = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ConfigError, match="empty layer, got one that has seen 45 tokens"):
        adopted.adopt_layer(0, keys, keys, torch.arange(5)[None])

"""Any source with any holder: a prompt is answered by its source, and what follows by the cache that takes over its keys and values."""

import gc
import time
import weakref
from collections.abc import Callable
from functools import cache as remembered
from functools import partial
from typing import Any

import pytest
import torch
from transformers import BloomConfig, DynamicCache, PreTrainedModel

from hf_kvcaches import (
    ConfigError,
    EquipCache,
    GrowingCache,
    KVCache,
    KVCodec,
    SegmentReuseCache,
    SegmentStore,
    SubspaceCache,
    UnsupportedError,
    WarmStartCache,
    WarmStartLibrary,
)
from hf_kvcaches.translate.cache import TranslatedCache
from tests import tiny
from tests.helpers.prompts import greedy
from tests.translate.pairs import lossless
from tests.warmstart.warm import words

PROMPT = tiny.ids(1, 90, seed=3)
NEW = 6


@remembered
def model() -> PreTrainedModel:
    return tiny.llama()


@remembered
def codec(of: PreTrainedModel) -> KVCodec:
    # Steps so small that rounding may choose either of two.
    return KVCodec.calibrate(of, None, [tiny.ids(48, seed=seed).tolist() for seed in (1, 2)], bytes_ratio=1.5, progress=False)


translator = remembered(lossless)


def segments(of: PreTrainedModel, prompt: torch.Tensor, **options: Any) -> KVCache:
    """A cache whose store has the prompt but for its end."""
    store = SegmentStore("memory", quantization=None)
    first = SegmentReuseCache(of, store, mode="exact")
    of.generate(prompt[:, :70], past_key_values=first, max_new_tokens=1, pad_token_id=0)
    first.reset()
    store.flush()
    return SegmentReuseCache(of, store, mode="exact", **options)


def warm_start(of: PreTrainedModel, prompt: torch.Tensor, **options: Any) -> KVCache:
    """A cache whose library has the prompt."""
    library = WarmStartLibrary(of, words(), quantization=None)
    library.add([prompt[0]])
    return WarmStartCache(of, library, **options)


def translated(of: PreTrainedModel, prompt: torch.Tensor, **options: Any) -> KVCache:
    """A cache with codes of the prompt."""
    return TranslatedCache(of, translator(of), translator(of).encode(of, prompt[:, :-1]), **options)


SOURCES = {"segments": segments, "warm_start": warm_start, "translated": translated}
HOLDERS: dict[str, tuple[type[Any], Callable[[PreTrainedModel], tuple[Any, ...]], dict[str, Any]]] = {
    "growing": (GrowingCache, lambda of: (), {}),
    "equip": (EquipCache, lambda of: ("streaming",), {"budget": 40}),
    "equip_original": (EquipCache, lambda of: ("keydiff",), {"budget": 0.4, "recent": 8, "positions": "original"}),
    "equip_pages": (EquipCache, lambda of: ("streaming",), {"budget": 40, "page_size": 8}),
    "equip_window": (EquipCache, lambda of: ("snapkv",), {"budget": 80}),
    "subspace": (SubspaceCache, lambda of: (codec(of),), {"sinks": 2, "recent": 8}),
}


def new_holder(name: str, of: PreTrainedModel) -> Any:
    kind, arguments, options = HOLDERS[name]
    return kind(of, *arguments(of), **options)


answer = partial(greedy, new=NEW)


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("source", SOURCES)
def test_the_prompt_is_answered_as_by_the_source_and_the_rest_as_by_the_holder(source: str, holder: str) -> None:
    of, prompt = model(), PROMPT
    alone = answer(of, prompt, SOURCES[source](of, prompt), new=1)
    cache = SOURCES[source](of, prompt, decode_with=new_holder(holder, of))
    got = answer(of, prompt, cache)
    torch.testing.assert_close(got.logits[0], alone.logits[0], rtol=1e-4, atol=1e-4)

    past = DynamicCache(config=of.config)
    with torch.no_grad():
        of(input_ids=prompt, past_key_values=past)
    kind, arguments, options = HOLDERS[holder]
    if holder == "equip_window":
        expected_cache = new_holder(holder, of)
        expected = answer(of, prompt, expected_cache)
        assert_close(got, expected)
    else:
        expected_cache = kind.from_cache(past, of, *arguments(of), **options)
        more = got.sequences[:, -NEW:-1]
        with torch.no_grad():
            logits = [of(input_ids=token[None], past_key_values=expected_cache).logits[:, -1] for token in more.T]
        torch.testing.assert_close(torch.stack(got.logits[1:]), torch.stack(logits), rtol=1e-4, atol=1e-4)
    assert cache.report().kept == expected_cache.report().kept
    assert cache.report().decode_with.kept == expected_cache.report().kept


@pytest.mark.parametrize("source", ["segments", "warm_start"])
def test_sliding_layers_of_a_hybrid_model_go_to_the_holder_too(source: str) -> None:
    of, prompt = tiny.gemma2(), PROMPT
    for make in (GrowingCache, lambda model: EquipCache(model, "streaming", 40, positions="original")):
        cache = SOURCES[source](of, prompt, decode_with=make(of))
        assert_close(answer(of, prompt, cache), answer(of, prompt, make(of)))


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_of_the_source_is_kept_once_the_prompt_is_answered(source: str) -> None:
    of, prompt = model(), PROMPT
    cache = SOURCES[source](of, prompt, decode_with=new_holder("equip", of))
    buffers: list[weakref.ref[torch.Tensor]] = []
    handle = of.model.layers[-1].register_forward_pre_hook(tiny.observing(lambda *_: buffers.extend(_buffers(cache))))
    answer(of, prompt, cache, new=1)
    handle.remove()
    assert buffers
    end = time.monotonic() + 30  # a thread that stores the prompt may hold its last blob a moment longer than the store waits for it
    while any(buffer() is not None for buffer in buffers) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert all(buffer() is None for buffer in buffers)
    assert cache.report().bytes == cache.report().decode_with.bytes


def _buffers(cache: Any) -> list[weakref.ref[torch.Tensor]]:
    return [weakref.ref(layer.key_buffer) for layer in cache.source_layers if layer.key_buffer is not None]


def test_layers_are_freed_one_by_one_where_nothing_is_to_be_stored() -> None:
    of, prompt = model(), PROMPT
    cache = warm_start(of, prompt, decode_with=new_holder("equip", of))
    alive: list[int] = []
    for layer in of.model.layers:
        layer.register_forward_pre_hook(tiny.observing(lambda *_: alive.append(len(_buffers(cache)))))
    answer(of, prompt, cache, new=1)
    for layer in of.model.layers:
        layer._forward_pre_hooks.clear()
    layers = of.config.num_hidden_layers
    assert alive[-layers:] == list(range(layers, 0, -1))


def test_a_pass_that_breaks_off_while_it_hands_over_asks_for_reset() -> None:
    of, prompt = model(), PROMPT
    cache = warm_start(of, prompt, decode_with=new_holder("growing", of))
    handle = of.model.layers[2].mlp.register_forward_pre_hook(tiny.observing(_fail))
    with pytest.raises(KeyboardInterrupt):
        answer(of, prompt, cache)
    handle.remove()
    with pytest.raises(ConfigError, match=r"reset\(\)"), torch.no_grad():
        of(input_ids=prompt[:, -1:], past_key_values=cache)
    cache.reset()
    assert_close(answer(of, prompt, cache), answer(of, prompt, GrowingCache(of)))


@pytest.mark.parametrize("holder", ["growing", "equip"])
def test_a_pass_between_reused_tokens_that_breaks_off_while_it_hands_over_asks_for_reset(holder: str) -> None:
    of, store = model(), SegmentStore("memory", quantization=None)
    spans = [tiny.ids(1, 40, seed=seed) for seed in range(4)]
    of.generate(torch.cat(spans[:3], 1), past_key_values=SegmentReuseCache(of, store, mode="auto"), max_new_tokens=1, pad_token_id=0)
    store.flush()
    prompt = torch.cat([spans[3], spans[1], spans[2]], 1)
    cache = SegmentReuseCache(of, store, mode="approximate", repair=0.0, decode_with=new_holder(holder, of))
    handle = of.model.layers[2].mlp.register_forward_pre_hook(tiny.observing(_fail))
    with pytest.raises(KeyboardInterrupt):
        answer(of, prompt, cache)
    handle.remove()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"reset\(\)"), torch.no_grad():
            of(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
    cache.reset()
    answer(of, prompt, cache)
    assert cache.report().reused_tokens


def _fail(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_model_that_lets_no_cache_answer_is_refused_when_the_cache_is_made() -> None:
    of = tiny.build(BloomConfig(vocab_size=tiny.VOCABULARY, hidden_size=32, n_layer=2, n_head=4))
    assert SegmentReuseCache(of, SegmentStore("memory"), mode="exact").seen == 0
    with pytest.raises(UnsupportedError, match=r"decode_with needs.*AttentionInterface"):
        SegmentReuseCache(of, SegmentStore("memory"), mode="exact", decode_with=GrowingCache(of))


def test_a_prompt_of_embeddings_is_read_by_the_holder_itself() -> None:
    of, prompt = model(), PROMPT
    embeddings = of.get_input_embeddings()(prompt).detach()
    results = []
    for cache in (segments(of, prompt, decode_with=new_holder("equip", of)), new_holder("equip", of)):
        results.append(of.generate(inputs_embeds=embeddings, past_key_values=cache, max_new_tokens=NEW, do_sample=False, pad_token_id=0))
    assert torch.equal(*results)


def test_what_cannot_work_is_refused_when_the_cache_is_made() -> None:
    of, prompt = model(), PROMPT
    make = segments
    with pytest.raises(UnsupportedError, match=r"'h2o' looks at all queries.*'future', 'keydiff'"):
        make(of, prompt, decode_with=EquipCache(of, "h2o", 40))
    with pytest.raises(UnsupportedError, match=r"^decode_with: question_start: .*context alone"):
        make(of, prompt, decode_with=EquipCache(of, "future", 40, question_start=-9))
    with pytest.raises(ConfigError, match="decode_with: expected a GrowingCache, an EquipCache or a SubspaceCache"):
        make(of, prompt, decode_with=DynamicCache())
    with pytest.raises(ConfigError, match="decode_with: expected a GrowingCache"):
        make(of, prompt, decode_with=make(of, prompt))
    with pytest.raises(ConfigError, match="same model"):
        make(of, prompt, decode_with=GrowingCache(tiny.llama()))
    with pytest.raises(ConfigError, match="same model"):
        make(of, prompt, decode_with=GrowingCache(of.config))
    used = GrowingCache(of)
    answer(of, prompt, used)
    with pytest.raises(ConfigError, match="a new cache"):
        make(of, prompt, decode_with=used)
    taken = GrowingCache(of)
    make(of, prompt, decode_with=taken)
    with pytest.raises(ConfigError, match="a new cache"):
        make(of, prompt, decode_with=taken)


def test_assisted_decoding_of_the_prompt_is_refused_before_anything_is_stored() -> None:
    of, prompt = model(), PROMPT
    cache = warm_start(of, prompt, decode_with=new_holder("growing", of))
    with pytest.raises(UnsupportedError, match="assist"):
        answer(of, prompt, cache, prompt_lookup_num_tokens=3)
    assert cache.seen == 0

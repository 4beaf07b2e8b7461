"""Segments as the codes of a `KVCodec`: keys without rotation, which any place of a prompt can use."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from hf_kvcaches import KVCodec, SegmentReuseCache, SegmentStore
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError
from tests import tiny
from tests.conformance.entries import calibrated
from tests.helpers.prompts import left_padded
from tests.segments.test_cache import MODELS, A, B, C, D, first_logits, joined

TURNING = [name for name in MODELS if name not in ("gemma2", "sliding")]


def codec_of(model) -> KVCodec:
    """As fine as the packed form can be: 12 bits a number."""
    return calibrated(model, lambda model: KVCodec.calibrate(model, None, tiny.ids(6, 64).tolist(), bytes_ratio=1.5, progress=False))


@pytest.mark.parametrize("name", TURNING)
@pytest.mark.parametrize("mode", ["exact", "approximate"])
def test_fine_codes_give_what_plain_segments_give(name, mode):
    model = MODELS[name]()
    logits = []
    for quantization in (None, codec_of(model)):
        with SegmentStore("memory", quantization=quantization) as store:
            first_logits(model, joined(A, B, C), SegmentReuseCache(model, store, mode="auto"))
            cache = SegmentReuseCache(model, store, mode=mode)
            logits.append(first_logits(model, joined(A, D, B), cache))
            assert cache.report().computed_tokens < 64
    torch.testing.assert_close(logits[1], logits[0], atol=3e-2, rtol=0)


def test_a_segment_takes_the_bytes_of_its_codes_and_the_first_tokens_of_a_text():
    model = tiny.llama()
    sizes = {}
    for ratio in (0.125, 0.25):
        codec = codec_of(model).at(ratio)
        with SegmentStore("memory", quantization=codec) as store:
            first_logits(model, joined(A, B, C), SegmentReuseCache(model, store, mode="auto"))
            report = store.report()
            sizes[ratio] = report.bytes - report.tokens * codec.packed_ratio * 4 * 2 * 2 * 8 * 2
    exact = 4 * 4 * 2 * 2 * 8 * 4  # 4 tokens in float32: 4 layers, both sides, 2 heads of 8
    assert all(exact <= size < exact + 6000 for size in sizes.values())


def test_processes_with_the_same_codec_share_a_place_and_others_see_nothing(shared_location: str, tmp_path: Path):
    model, prompt = tiny.llama(), joined(A, B, C)
    codec = codec_of(model)
    with SegmentStore(shared_location, quantization=codec) as store:
        first_logits(model, prompt, SegmentReuseCache(model, store, mode="auto"))
    codec.save_pretrained(tmp_path / "codec")
    for again, found in ((KVCodec.from_pretrained(tmp_path / "codec"), True), (codec.at(0.25), False)):
        with SegmentStore(shared_location, quantization=again) as store:
            cache = SegmentReuseCache(model, store, mode="auto")
            context = nullcontext() if found else pytest.warns(RuntimeWarning, match="none for this model")
            with context:
                first_logits(model, prompt, cache)
            assert (cache.report().reused_tokens > 0) is found


def test_rows_of_a_padded_batch_are_filled():
    model = tiny.llama()
    with SegmentStore("memory", quantization=codec_of(model)) as store:
        first_logits(model, joined(A, B, C), SegmentReuseCache(model, store, mode="auto"))
        prompts = [joined(A, B, D), joined(A, D)]
        ids, mask = left_padded(prompts)
        cache = SegmentReuseCache(model, store, mode="auto")
        together = first_logits(model, ids, cache, attention_mask=mask)
        assert cache.report().reused_tokens > 0
        for row, prompt in enumerate(prompts):
            alone = first_logits(model, prompt, SegmentReuseCache(model, store, mode="auto"))
            torch.testing.assert_close(together[row : row + 1], alone, atol=3e-2, rtol=0)


def test_what_a_codec_can_not_store_is_refused():
    with pytest.raises(UnsupportedError, match="window"):
        SegmentReuseCache(tiny.gemma2(), SegmentStore("memory", quantization=codec_of(tiny.gemma2())))
    with pytest.raises(FingerprintMismatch, match="KVCodec"):
        SegmentReuseCache(tiny.llama(seed=1), SegmentStore("memory", quantization=codec_of(tiny.llama())))
    rotated = KVCodec.calibrate(tiny.llama(), None, tiny.ids(2, 32).tolist(), rotation="post", progress=False)
    with pytest.raises(ConfigError, match="rotation='aware'"):
        SegmentStore("memory", quantization=rotated)
    with pytest.raises(ConfigError, match="KVCodec"):
        SegmentStore("memory", quantization=0.125)

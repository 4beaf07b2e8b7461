"""Near-identical segments and probes, as the paper has them."""

from __future__ import annotations

import pytest
import torch

from hf_kvcaches import SegmentReuseCache, SegmentStore
from hf_kvcaches.segments.paper import NearReuseCache, ProbeRule, canonical
from hf_kvcaches.segments.report import SegmentReport
from tests import testbed, tiny
from tests.warmstart.warm import words

HEAD, PART = tiny.ids(1, 40, seed=1), tiny.ids(1, 64, seed=2)


@pytest.fixture(scope="module")
def model():
    return tiny.llama()


def run(model, ids: torch.Tensor, kind: type[SegmentReuseCache], *arguments, **options) -> SegmentReport:
    cache = kind(model, *arguments, **options)
    with torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=1, pad_token_id=0)
    report, store = cache.report(), cache.store
    del cache  # or it holds the prompt until it is asked again
    store.flush()
    return report


def test_spans_between_near_changes_are_found(model):
    options = {"mode": "approximate", "spans": [[(40, 104)]]}
    changed = PART.clone()
    changed[0, [15, 31]] = (changed[0, [15, 31]] + 1) % tiny.VOCABULARY
    reused, end = [], tiny.ids(1, 9, seed=8)
    for kind in (SegmentReuseCache, NearReuseCache):
        store = SegmentStore("memory")
        run(model, torch.cat([HEAD, PART, end], 1), SegmentReuseCache, store, words(), **options)
        reused.append(run(model, torch.cat([tiny.ids(1, 40, seed=3), changed, end], 1), kind, store, words(), **options).reused_tokens)
    # Verbatim 31 tokens, less repaired ones; and twice 15, of which no anchor is whole.
    assert reused[1] >= reused[0] + 20 > 40


def test_texts_are_compared_without_case_spaces_and_numbers():
    assert canonical("On  2026-07-26 at 10:30\nThe Lion") == "on 0 at 0 the lion"


def test_a_probe_admits_what_its_own_start_admits_and_rejects_what_another_does_not():
    model, tokenizer = testbed.load("base")
    page = torch.tensor([tokenizer(testbed.held_out()[:3000])["input_ids"][:200]])
    moved = torch.cat([tiny.ids(1, 30, seed=5) + 300, page[:, 60:]], 1)
    seen = {}
    for threshold in (-1.0, 1.0):
        store = SegmentStore("memory")
        run(model, page, SegmentReuseCache, store)
        rule = ProbeRule(model, store, threshold=threshold)
        seen[threshold] = run(model, moved, SegmentReuseCache, store, admit=rule).tiers
        assert rule.scores
        assert all(-1 <= score < 1 for score in rule.scores)
    assert seen[-1.0].get("probed", 0) > 100
    assert "probed" not in seen[1.0]

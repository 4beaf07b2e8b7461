"""A cache on the command line is a call of its class, read and never evaluated."""

import pytest
import torch

from hf_kvcaches import (
    AdaptiveSubspace,
    EquipCache,
    KeepProbe,
    KVCodec,
    Policy,
    SegmentPolicy,
    SegmentReuseCache,
    SegmentStore,
    SnapKVPolicy,
    SubspaceCache,
)
from hf_kvcaches.cli.specs import makers, parse
from hf_kvcaches.errors import ConfigError
from tests import testbed


@pytest.fixture(scope="module")
def loaded():
    return testbed.load()


@pytest.mark.parametrize(
    "text",
    [
        "EquipCache(policy='streaming', budget=512)",
        "EquipCache('snapkv', budget=[64, 0.5, 64, 64], recent=None)",
        "EquipCache(KeepProbe('probe'), budget=0.25, head_budgets=HeadBudgets('shares'))",
        "SubspaceCache(KVCodec('codec'), sinks=4)",
        "SegmentReuseCache(SegmentStore('memory', max_bytes='1GiB'), decode_with=EquipCache(budget=-1))",
    ],
)
def test_a_spec_is_written_as_it_is_read(text):
    assert repr(parse(text)) == text
    assert repr(parse(" GrowingCache ")) == "GrowingCache()"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("EquipCache(budget=open('x').read())", "a class, or a call of it"),
        ("EquipCache(budget=2**10000000)", "a class, or a call of it"),
        ("EquipCache(budget=__import__('os').system('true'))", "a class, or a call of it"),
        ("EquipCache(**{'budget': 3})", "a class, or a call of it"),
        ("EquipCache(budget=1, budget=2)", "a class, or a call of it"),
        ("hf_kvcaches.EquipCache()", "a class, or a call of it"),
        ("EquipCache()()", "a class, or a call of it"),
        ("'EquipCache'", "a class, or a call of it"),
        ("EquipCache(", "a class, or a call of it"),
        ("(" * 500, "a class, or a call of it"),
        ("", "a class, or a call of it"),
        ("DynamicCache()", "one of 'GrowingCache'"),
        ("equipcache", "one of 'GrowingCache'"),
        ("TranslatedCache(CacheTranslator('x'))", "codes of a single prompt"),
    ],
)
def test_what_is_no_cache_is_refused(text, message):
    with pytest.raises(ConfigError, match="cache: expected") as error:
        parse(text)
    assert message in str(error.value)


def maker(text, loaded):
    [make] = makers([parse(text)], *loaded).values()
    return make


def test_each_text_gets_a_new_cache_and_shares_what_the_spec_makes(loaded):
    holder = "EquipCache(SnapKVPolicy(window=4), budget=9)"
    make = maker(f"SegmentReuseCache(SegmentStore('memory', max_bytes=1000), decode_with={holder})", loaded)
    first, second = make(), make()
    assert isinstance(first, SegmentReuseCache)
    assert first is not second
    assert first.store is second.store
    assert isinstance(first.store, SegmentStore)
    assert first.store.max_bytes == 1000
    assert first.tokenizer is loaded[1]
    assert first.holder is not second.holder
    assert isinstance(first.holder, EquipCache)
    assert isinstance(first.holder.policy, SnapKVPolicy)


def test_classes_that_are_saved_are_loaded_from_their_folder(loaded, tmp_path):
    model, tokenizer = loaded
    codec = KVCodec.calibrate(model, tokenizer, [testbed.held_out()[:600]], metric="plain", progress=False)
    codec.save_pretrained(tmp_path / "codec")
    SegmentPolicy(repair=0.25).save_pretrained(tmp_path / "policy")
    KeepProbe.calibrate(model, tokenizer, [testbed.held_out()[:600]], progress=False).save_pretrained(tmp_path / "probe")
    cache = maker(f"SubspaceCache(KVCodec('{tmp_path / 'codec'}'), sinks=2)", loaded)()
    assert isinstance(cache, SubspaceCache)
    assert cache.codec.digest == codec.digest
    reuse = maker(f"SegmentReuseCache(SegmentStore(), policy=SegmentPolicy('{tmp_path / 'policy'}'))", loaded)()
    assert reuse.policy.repair == 0.25
    assert isinstance(maker(f"EquipCache(KeepProbe('{tmp_path / 'probe'}'), budget=0.25)", loaded)().policy, Policy)


def test_a_value_object_is_made_and_a_pool_gets_the_model(loaded):
    assert maker("SubspaceCache(adaptive=AdaptiveSubspace(rank=4))", loaded)().adaptive == AdaptiveSubspace(rank=4)
    cache = maker("EquipCache('streaming', budget=32, pool=PagePool(8, 16))", loaded)()
    with torch.no_grad():
        loaded[0](torch.tensor([[3, 4, 5]]), past_key_values=cache)
    assert max(cache.report().kept) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("EquipCache(bugdet=3)", "options: expected what EquipCache takes"),
        ("SubspaceCache(KVCodek('x'))", "expected one of 'AdaptiveSubspace', .*'KVCodec'"),
        ("SubspaceCache(adaptive=AdaptiveSubspace(rang=4))", "Look up the arguments of AdaptiveSubspace"),
        ("SubspaceCache(KVCodec('/no/such/folder'))", "/no/such/folder"),
    ],
)
def test_wrong_arguments_are_refused(text, message, loaded):
    with pytest.raises(ValueError, match=message):
        maker(text, loaded)

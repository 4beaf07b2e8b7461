"""Arguments become caches, read and never evaluated, and texts, prompts and pairs from files as people have them."""

import ast

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
from hf_kvcaches.cli import inputs
from hf_kvcaches.cli.arguments import parse
from hf_kvcaches.errors import ConfigError
from tests import testbed


@pytest.fixture(scope="module")
def loaded():
    return testbed.load()


PAIRS = '{"source": "The day", "target": [5, 6]}\n\n{"target": "x", "source": [7], "note": 1}'
NO_PAIRS = ('{"source": "a", "target": 3}', '["a", "b"]', "{", '{"source": ["a"], "target": "b"}', '{"source": "a"}')
TEXTS, NO_TEXTS = '"a b"\n\n[1, 2]\n{"text": "c", "more": 1}', ("{", "3", '{"prompt": "a"}', '["a"]', "[true]")


@pytest.mark.parametrize(
    ("names", "lines", "expected", "wrong"),
    [
        (["text"], TEXTS, [["a b"], [[1, 2]], ["c"]], NO_TEXTS),
        (["source", "target"], PAIRS, [["The day", [5, 6]], [[7], "x"]], NO_PAIRS),
    ],
)
def test_lines_of_a_file_are_texts_or_ids_and_a_wrong_one_is_named(names, lines, expected, wrong, tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text(f"{lines}\n")
    assert inputs.read_lines(file, *names) == expected
    for line in wrong:
        file.write_text(f"{lines}\n{line}\n")
        with pytest.raises(ConfigError, match=rf"some\.jsonl, line {lines.count(chr(10)) + 2}"):
            inputs.read_lines(file, *names)


def test_a_text_file_is_cut_into_pieces_and_a_short_rest_is_left_out(loaded, tmp_path):
    tokenizer = loaded[1]
    (tmp_path / "a.txt").write_text(testbed.held_out("prose")[:2000])
    (tmp_path / "b.txt").write_text("short")
    (tmp_path / "c.jsonl").write_text('"as it is"\n')
    ids = tokenizer((tmp_path / "a.txt").read_text(), verbose=False)["input_ids"]
    *found, short, text = inputs.read_texts([tmp_path / name for name in ("a.txt", "b.txt", "c.jsonl")], tokenizer, 50)
    assert [len(piece) for piece in found[:-1]] == [50] * (len(found) - 1)
    assert 25 <= len(found[-1]) <= 50
    assert [token for piece in found for token in piece] == ids[: sum(map(len, found))]
    assert (short, text) == (tokenizer("short")["input_ids"], "as it is")


def test_texts_are_taken_from_all_over():
    assert inputs.spaced([[number] for number in range(10)], 3) == [[0], [3], [6]]
    assert inputs.spaced([[1], [2]], 3) == [[1], [2]]


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        inputs.read_text(tmp_path / "a.txt")


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
    assert ast.unparse(parse(text)) == text
    assert ast.unparse(parse(" GrowingCache ")) == "GrowingCache()"


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
    return next(iter(inputs.makers([parse(text)], *loaded).values()))


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

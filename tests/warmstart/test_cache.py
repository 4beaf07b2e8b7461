"""`WarmStartCache` inside `generate`: lossless where it says exact, and elsewhere what one token after the other gives."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_kvcaches import ModelFingerprint, WarmStartCache, WarmStartGate, WarmStartLibrary
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError
from hf_kvcaches.reuse.index import as_ids
from hf_kvcaches.warmstart import cache as warmstart
from tests import tiny
from tests.segments.reference import Source, as_planned, reused_positions
from tests.segments.test_cache import MODELS, A, B, C, D, joined
from tests.warmstart.warm import OPEN, SHUT, answer, forced, left_padded, library_of, logits_of, tokens_run, words

E = tiny.ids(1, 40, seed=11)
EARLIER = joined(A, B, C)
# 29 tokens of the beginning, 47 that stand later and 31 that stand there too, with other tokens between.
CHANGED = joined(A, D[:, :5], B, D[:, 5:8], C)
MOVED = joined(D, B, A, D[:, ::2])


SUMMED = joined(A, B, E)


def test_a_short_common_beginning_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    library = library_of(model, joined(A, B))
    for worth, served in ((A.shape[1] + 1, "cold"), (A.shape[1], "prefix")):
        monkeypatch.setattr(warmstart, "WORTH", worth)
        cache = WarmStartCache(model, library, strategy="exact")
        close(logits_of(model, joined(A, C), cache), logits_of(model, joined(A, C)))
        assert cache.report().strategies == (served,)


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=atol, rtol=0)


# The same prompt, and none like it


@pytest.mark.parametrize("name", list(MODELS))
def test_the_same_prompt_runs_one_token_and_goes_on_as_without_a_library(name: str) -> None:
    model = MODELS[name]()
    cache = WarmStartCache(model, library_of(model, EARLIER, D))
    with tokens_run(model) as seen:
        got = logits_of(model, EARLIER, cache, 6)
    assert seen == [1] * 6
    close(got, logits_of(model, EARLIER, new=6))
    report = cache.report()
    assert (report.strategies, report.reused_tokens, report.computed_tokens, report.refusals) == (("exact",), 106, 1, ("",))


@pytest.mark.parametrize("strategy", ["auto", "align", "exact"])
def test_without_a_neighbour_nothing_is_lost(strategy: Any) -> None:
    model = tiny.llama()
    cache = WarmStartCache(model, library_of(model), strategy=strategy)
    close(logits_of(model, EARLIER, cache, 6), logits_of(model, EARLIER, new=6))
    report = cache.report()
    assert (report.strategies, report.neighbours, report.reused_tokens, report.computed_tokens) == (("cold",), (None,), 0, 107)
    assert report.refusals == ("No entry is like it.",)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_keys_and_values_are_near(quantization: Any) -> None:
    model = tiny.llama(initializer_range=0.1)
    cache = WarmStartCache(model, library_of(model, EARLIER, quantization=quantization))
    got, expected = logits_of(model, EARLIER, cache), logits_of(model, EARLIER)
    assert cache.report().strategies == ("exact",)
    assert 1e-5 < float((got - expected).abs().max()) < 0.1 * float(expected.abs().max())


def test_in_half_precision_the_same_prompt_has_the_bits_of_the_entry() -> None:
    model = tiny.llama(initializer_range=0.1).bfloat16()
    cache = WarmStartCache(model, library_of(model, EARLIER))
    got = logits_of(model, EARLIER, cache, 4)
    source = Source(model, EARLIER)
    for layer, (keys, values) in zip(cache.layers, source.layers, strict=True):
        assert torch.equal(layer.keys[:, :, :106], keys[:, :, :106])
        assert torch.equal(layer.values[:, :, :106], values[:, :, :106])
    close(got, logits_of(model, EARLIER, new=4), atol=0.05)


# Stretches


@pytest.mark.parametrize("repair", [0.0, 0.3])
@pytest.mark.parametrize("prompt", [CHANGED, MOVED], ids=["changed", "moved"])
@pytest.mark.parametrize("name", list(MODELS))
def test_stretches_give_what_one_token_after_the_other_gives(name: str, prompt: torch.Tensor, repair: float) -> None:
    model = MODELS[name]()
    cache = WarmStartCache(model, library_of(model, EARLIER), strategy="align", gate=WarmStartGate(reusable=0.0, repair=repair))
    with tokens_run(model) as seen:
        got = logits_of(model, prompt, cache)
    report, positions = cache.report(), reused_positions(cache)
    assert report.strategies == ("align",)
    assert sum(seen) == report.computed_tokens + cache.plans[0].probed
    assert report.reused_tokens == len(positions) == prompt.shape[1] - report.computed_tokens
    assert len(positions) >= 40
    expected, reference = as_planned(model, prompt, cache.plans[0], Source(model, EARLIER))
    close(got[:, 0], expected)
    assert not torch.allclose(expected, logits_of(model, prompt)[:, 0], atol=1e-4)
    for mine, theirs in zip(cache.layers, reference.layers, strict=True):
        held = theirs.keys.shape[2]
        close(mine.keys[:, :, -held:], theirs.keys)
        close(mine.values[:, :, -held:], theirs.values)


def test_too_little_in_common_is_refused_with_the_share() -> None:
    model = tiny.llama()
    cache = WarmStartCache(model, library_of(model, EARLIER), strategy="align")
    prompt = joined(D, E, B[:, :20], D[:, :10])
    close(logits_of(model, prompt, cache), logits_of(model, prompt))
    report = cache.report()
    assert report.strategies == ("cold",)
    assert "below 40%" in report.refusals[0]


def test_a_common_beginning_is_bit_equal_and_more_than_stretches_where_it_is_longer() -> None:
    model = tiny.llama()
    library = library_of(model, EARLIER, joined(E, B))
    for strategy in ("exact", "align", "auto"):
        prompt = joined(A, B, D)
        cache = WarmStartCache(model, library, strategy=strategy)  # type: ignore[arg-type]
        with tokens_run(model) as seen:
            got = logits_of(model, prompt, cache, 3)
        assert seen == [17, 1, 1]
        close(got, logits_of(model, prompt, new=3))
        assert cache.report().strategies == ("prefix",)
        assert cache.report().neighbours == (library.ids()[0],)
        for layer, (keys, values) in zip(cache.layers, Source(model, EARLIER).layers, strict=True):
            assert torch.equal(layer.keys[:, :, :76], keys[:, :, :76])
            assert torch.equal(layer.values[:, :, :76], values[:, :, :76])


def test_a_prompt_that_an_entry_begins_with_and_one_that_begins_with_an_entry() -> None:
    model = tiny.llama()
    library = library_of(model, joined(A, B))
    for prompt, strategy, computed in (
        (A, "prefix", 1),
        (EARLIER, "prefix", 31),
        (A[:, :2], "prefix", 1),
        (joined(A[:, :1], D), "cold", 18),
    ):
        cache = WarmStartCache(model, library, strategy="exact")
        close(logits_of(model, prompt, cache, 3), logits_of(model, prompt, new=3))
        assert (cache.report().strategies, cache.report().computed_tokens) == ((strategy,), computed)


# Batches, beams, chats


def test_rows_with_padding_are_served_each_by_itself() -> None:
    model = tiny.llama()
    library = library_of(model, EARLIER, joined(E, D))
    rows = [EARLIER, CHANGED, joined(E, D[:, :7]), joined(C[:, ::3], E[:, ::2]), D[:, :2]]
    ids, mask = left_padded(*rows)
    cache = WarmStartCache(model, library)
    got = logits_of(model, ids, cache, 5, attention_mask=mask)
    report = cache.report()
    assert report.strategies == ("exact", "align", "prefix", "cold", "cold")
    assert (report.strategy, report.neighbour, report.similarity, report.refused) == ("mixed", None, None, "")
    assert report.reused_tokens + report.computed_tokens == int(mask.sum())
    for number, row in enumerate(rows):
        alone = WarmStartCache(model, library)
        close(got[number : number + 1], logits_of(model, row, alone, 5))
        assert alone.report().strategies == report.strategies[number : number + 1]
        assert alone.report().neighbours == report.neighbours[number : number + 1]
        assert reused_positions(alone) == reused_positions(cache, number)
    exact = WarmStartCache(model, library, strategy="exact")
    close(logits_of(model, ids, exact, 5, attention_mask=mask), logits_of(model, ids, new=5, attention_mask=mask))


def test_beams_and_a_chat_go_on_behind_stretches_as_behind_one_token_after_the_other() -> None:
    model = tiny.llama()
    library, beams = library_of(model, EARLIER), {"num_beams": 3, "num_return_sequences": 2, "output_scores": True}
    cache, chat = (WarmStartCache(model, library, strategy="align") for _ in range(2))
    got, first = answer(model, CHANGED, cache, 6, **beams), answer(model, CHANGED, chat, 6)
    assert (cache.report().strategies, chat.report().strategies) == (("align",) * 3, ("align",))
    _, reference = as_planned(model, CHANGED, chat.plans[0], Source(model, EARLIER))
    reference.crop(-1)
    repeated = copy.deepcopy(reference)
    repeated.batch_repeat_interleave(3)
    expected = answer(model, CHANGED, repeated, 6, **beams)
    assert torch.equal(got.sequences, expected.sequences)
    close(got.sequences_scores, expected.sequences_scores)
    assert torch.equal(first.sequences, answer(model, CHANGED, reference, 6).sequences)
    turn = joined(first.sequences, C[:, ::2])
    close(logits_of(model, turn, chat, 5), logits_of(model, turn, reference, 5))
    # The last turn gives the new tokens alone.
    mask = torch.ones(1, chat.seen + 17, dtype=torch.long)
    close(logits_of(model, D, chat, 4, attention_mask=mask), logits_of(model, D, reference, 4, attention_mask=mask))


def test_copies_go_on_alike_and_share_the_library() -> None:
    model = tiny.llama()
    cache = WarmStartCache(model, library_of(model, EARLIER))
    text = answer(model, CHANGED, cache, 3).sequences
    other, sent = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    assert other.library is cache.library
    assert sent.store is None
    expected = forced(model, joined(text[:, -1:], D), cache)
    for each in (other, sent):
        close(forced(model, joined(text[:, -1:], D), each), expected, atol=1e-5)
        assert each.report().strategies == ("align",)
    # A cache that was emptied is served again.
    for empty in (other.reset, lambda: other.crop(-other.seen)):
        empty()
        close(logits_of(model, EARLIER, other, 3), logits_of(model, EARLIER, new=3))
        assert other.report().strategies == ("exact",)


# Reports


def test_a_report_says_what_was_done_by_which_entry_and_why_not_more() -> None:
    model = tiny.llama()
    library = library_of(model, EARLIER)
    (key,) = library.ids()
    cache = WarmStartCache(model, library)
    logits_of(model, CHANGED, cache)
    report = cache.report()
    assert (report.strategies, report.neighbours) == (("align",), (key,))
    assert (report.strategy, report.neighbour, report.similarity) == ("align", key, report.similarities[0])
    assert report.similarities[0] == pytest.approx(library.near(CHANGED[0].numpy())[0][1])
    assert 0 < report.similarities[0] < 1
    # 29 of the beginning, and of 47 all but 30%; the last 16 are computed, and of the others too few are left to look for.
    assert (report.reused_tokens, report.computed_tokens) == (29 + 32, 115 - 61)
    assert library.report().saved_tokens == 29 + 47
    assert report.as_dict()["neighbours"] == (key,)
    assert "align" in str(report)
    cache.reset()
    assert (cache.report().strategies, cache.report().reused_tokens, cache.report().computed_tokens) == ((), 0, 0)
    shut = WarmStartCache(model, library, gate=SHUT)
    close(logits_of(model, MOVED, shut), logits_of(model, MOVED))
    assert shut.report().strategies == ("cold",)
    assert shut.report().similarities == (None,)
    assert "below 101%" in shut.report().refusals[0]


# Models and arguments


def test_without_rotary_positions_only_common_beginnings_are_reused() -> None:
    model = tiny.gpt2()
    library = library_of(model, EARLIER)
    for prompt, strategy, computed in ((EARLIER, "exact", 1), (joined(A, B, D), "prefix", 17), (MOVED, "cold", MOVED.shape[1])):
        cache = WarmStartCache(model, library, gate=OPEN)
        close(logits_of(model, prompt, cache, 4), logits_of(model, prompt, new=4))
        assert (cache.report().strategies, cache.report().computed_tokens) == ((strategy,), computed)
    with pytest.raises(UnsupportedError, match="strategy='align': its keys can't be moved"):
        WarmStartCache(model, library, strategy="align")


def test_models_whose_keys_change_with_the_length_or_that_have_a_learned_prompt_are_refused() -> None:
    model = tiny.llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(UnsupportedError, match="model"):
        WarmStartLibrary(model, words()).add(A[0])
    with pytest.raises(UnsupportedError, match="model"):
        WarmStartCache(model, WarmStartLibrary(model, words()))
    peft = pytest.importorskip("peft")
    plain = tiny.llama()
    wrapped = peft.get_peft_model(plain, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedError, match="learned prompt"):
        WarmStartCache(wrapped, WarmStartLibrary(plain, words()))


def test_a_model_that_changed_is_served_cold_and_the_report_says_so() -> None:
    model = tiny.llama()
    cache = WarmStartCache(model, library_of(model, EARLIER))
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(0.5)
    close(logits_of(model, EARLIER, cache), logits_of(model, EARLIER))
    assert cache.report().strategies == ("cold",)
    assert "The model has changed" in cache.report().refusals[0]
    with pytest.raises(FingerprintMismatch, match="The model has changed"):
        cache.library.add(A[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"library": "memory"}, "library: expected a WarmStartLibrary"),
        ({"library": None}, "library: expected a WarmStartLibrary, got None. Make one with"),
        ({"strategy": "fast"}, "strategy: expected one of 'auto'"),
        ({"tail": 1.5}, "tail"),
        ({"gate": 0.9}, "gate: expected a WarmStartGate"),
        ({"strategy": "slots"}, "strategy: expected one of"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    model = tiny.llama()
    with pytest.raises(ConfigError, match=message):
        WarmStartCache(model, **{"library": library_of(model), **arguments})


def test_a_gate_admits_prompts_of_its_least_cosine_and_one_for_another_encoder_is_refused() -> None:
    model = tiny.llama()
    library = library_of(model, EARLIER)
    [(_, cosine)] = library.near(as_ids(MOVED[0]))
    for tau, strategy in ((cosine - 1e-3, "align"), (cosine + 1e-3, "cold")):
        cache = WarmStartCache(model, library, gate=replace(OPEN, tau=tau, encoder=library.encoder.name))
        logits_of(model, MOVED, cache)
        assert cache.report().strategy == strategy
    former = replace(OPEN, tau=0.5, encoder="input embeddings, version 2")
    with pytest.raises(ConfigError, match="gate: expected one for the library's encoder, 'token ids, version 1', got 'input"):
        WarmStartCache(model, library, gate=former)
    WarmStartCache(model, library, gate=replace(former, tau=-1.0))


def test_a_library_of_another_model_is_refused() -> None:
    library = library_of(tiny.llama())
    with pytest.raises(FingerprintMismatch, match="another model"):
        WarmStartCache(tiny.llama(seed=1), library)
    # The same weights elsewhere are the same model.
    other = tiny.llama()
    assert ModelFingerprint.of(other).digest == library.digest
    library.add(EARLIER[0])
    cache = WarmStartCache(other, library)
    logits_of(other, EARLIER, cache)
    assert cache.report().strategies == ("exact",)


# Prompts that enter the library


def test_a_prompt_that_was_computed_is_in_the_library_for_the_next_request() -> None:
    model = tiny.llama()
    library = library_of(model)
    ids, mask = left_padded(EARLIER, joined(D, E))
    logits_of(model, ids, WarmStartCache(model, library, remember=True), 2, attention_mask=mask)
    library.flush()
    library.refresh()
    for prompt in (EARLIER, joined(D, E)):
        cache = WarmStartCache(model, library)
        with tokens_run(model) as seen:
            got = logits_of(model, prompt, cache, 3)
        assert (cache.report().strategy, seen) == ("exact", [1, 1, 1])
        close(got, logits_of(model, prompt, new=3))
    assert len(library.ids()) == 2


def test_a_prompt_behind_a_beginning_in_the_library_enters_it_too() -> None:
    model = tiny.llama()
    library = library_of(model, joined(A, B))
    for strategy in ("prefix", "exact"):
        cache = WarmStartCache(model, library, remember=True)
        close(logits_of(model, EARLIER, cache, 3), logits_of(model, EARLIER, new=3))
        assert cache.report().strategy == strategy


@pytest.mark.parametrize(("prompt", "remember", "strategy"), [(CHANGED, True, "align"), (joined(D, E), False, "cold")])
def test_what_was_reused_inexactly_does_not_enter_the_library_nor_does_anything_unasked(
    prompt: torch.Tensor, remember: bool, strategy: str
) -> None:
    model = tiny.llama()
    library = library_of(model, EARLIER)
    cache = WarmStartCache(model, library, gate=OPEN, remember=remember)
    logits_of(model, prompt, cache, 3)
    assert cache.report().strategy == strategy
    library.flush()
    library.refresh()
    assert len(library.ids()) == 1

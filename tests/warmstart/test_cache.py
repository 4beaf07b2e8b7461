"""`WarmStartCache` inside `generate`: lossless where it says exact, and elsewhere what one token after the other gives."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache, MistralConfig, PreTrainedModel, Qwen2Config

from hf_kvcaches import ModelFingerprint, SlotProjector, WarmStartCache, WarmStartGate, WarmStartLibrary
from hf_kvcaches.core.rope import rotation_of
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, UnsupportedError
from hf_kvcaches.warmstart import planning
from hf_kvcaches.warmstart.summaries.slots import Slots
from tests import testbed, tiny
from tests.segments.reference import Source, step_by_step
from tests.segments.test_cache import MODELS, A, B, C, D, joined, loop
from tests.warmstart.warm import OPEN, SHUT, answer, behind_slots, forced, left_padded, library_of, logits_of, taken, tokens_run, words

E = tiny.ids(1, 40, seed=11)
EARLIER = joined(A, B, C)
# 29 tokens of the beginning, 47 that stand later and 31 that stand there too, with other tokens between.
CHANGED = joined(A, D[:, :5], B, D[:, 5:8], C)
MOVED = joined(D, B, A, D[:, ::2])


def test_a_short_common_beginning_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    library = library_of(model, joined(A, B), slots=0)
    for worth, served in ((A.shape[1] + 1, "cold"), (A.shape[1], "prefix")):
        monkeypatch.setattr(planning, "WORTH", worth)
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


@pytest.mark.parametrize("guard", [0, 8])
@pytest.mark.parametrize("prompt", [CHANGED, MOVED], ids=["changed", "moved"])
@pytest.mark.parametrize("name", list(MODELS))
def test_stretches_give_what_one_token_after_the_other_gives(name: str, prompt: torch.Tensor, guard: int) -> None:
    model = MODELS[name]()
    cache = WarmStartCache(model, library_of(model, EARLIER), strategy="align", gate=OPEN, guard=guard)
    with tokens_run(model) as seen:
        got = logits_of(model, prompt, cache)
    report, positions = cache.report(), taken(cache)
    assert report.strategies == ("align",)
    assert sum(seen) == report.computed_tokens
    assert report.reused_tokens == len(positions) == prompt.shape[1] - report.computed_tokens
    assert len(positions) >= 50
    expected, reference = step_by_step(model, prompt, positions, Source(model, EARLIER))
    close(got[:, 0], expected)
    assert not torch.allclose(expected, logits_of(model, prompt)[:, 0], atol=1e-4)
    for mine, theirs in zip(cache.layers, reference.layers, strict=True):
        held = theirs.keys.shape[2]
        close(mine.keys[:, :, -held:], theirs.keys)
        close(mine.values[:, :, -held:], theirs.values)


def test_all_tokens_between_stretches_make_it_cold() -> None:
    model = tiny.llama()
    cache = WarmStartCache(model, library_of(model, EARLIER), strategy="align", gate=OPEN, guard=200, tail=0)
    close(logits_of(model, joined(D, B), cache), logits_of(model, joined(D, B)))
    assert cache.report().strategies == ("cold",)
    assert cache.report().refusals == ("No entry shares a span with it.",)


def test_stretches_in_half_precision() -> None:
    model = tiny.llama(initializer_range=0.1).bfloat16()
    cache = WarmStartCache(model, library_of(model, EARLIER), strategy="align")
    got = logits_of(model, CHANGED, cache)[:, 0]
    expected, _ = step_by_step(model, CHANGED, taken(cache), Source(model, EARLIER))
    assert cache.report().strategies == ("align",)
    close(got, expected, atol=0.05)


def test_too_little_in_common_is_refused_with_the_share() -> None:
    model = tiny.llama()
    cache = WarmStartCache(model, library_of(model, EARLIER), strategy="align")
    prompt = joined(D, E, B[:, :20], D[:, :10])
    close(logits_of(model, prompt, cache), logits_of(model, prompt))
    report = cache.report()
    assert report.strategies == ("cold",)
    assert "7% of the tokens" in report.refusals[0]


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
        assert taken(alone) == taken(cache, number)
    exact = WarmStartCache(model, library, strategy="exact")
    close(logits_of(model, ids, exact, 5, attention_mask=mask), logits_of(model, ids, new=5, attention_mask=mask))


def test_beams_behind_stretches_are_those_of_one_token_after_the_other() -> None:
    model = tiny.llama()
    cache = WarmStartCache(model, library_of(model, EARLIER), strategy="align")
    options = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True}
    got = answer(model, CHANGED, cache, 6, **options)
    _, reference = step_by_step(model, CHANGED, taken(cache), Source(model, EARLIER))
    reference.crop(-1)
    reference.batch_repeat_interleave(3)
    expected = answer(model, CHANGED, reference, 6, **options)
    assert cache.report().strategies == ("align",) * 3
    assert torch.equal(got.sequences, expected.sequences)
    close(got.sequences_scores, expected.sequences_scores)
    assert not torch.allclose(got.sequences_scores, answer(model, CHANGED, None, 6, **options).sequences_scores, atol=1e-4)


def test_a_chat_goes_on_behind_what_was_reused() -> None:
    model = tiny.llama()
    cache = WarmStartCache(model, library_of(model, EARLIER), strategy="align")
    first = answer(model, CHANGED, cache, 6)
    _, reference = step_by_step(model, CHANGED, taken(cache), Source(model, EARLIER))
    reference.crop(-1)
    expected = answer(model, CHANGED, reference, 6)
    assert torch.equal(first.sequences, expected.sequences)
    turn = joined(first.sequences, C[:, ::2])
    close(logits_of(model, turn, cache, 5), logits_of(model, turn, reference, 5))
    # The last turn gives the new tokens alone.
    mask = torch.ones(1, cache.seen + 17, dtype=torch.long)
    close(logits_of(model, D, cache, 4, attention_mask=mask), logits_of(model, D, reference, 4, attention_mask=mask))
    assert cache.report().strategies == ("align",)


def test_a_talk_in_another_cache_begins_with_what_the_library_has_of_it() -> None:
    model = tiny.llama()
    library = library_of(model, joined(A, B))
    said = answer(model, joined(A, B), WarmStartCache(model, library), 6).sequences
    library.add(said[0])
    turn, cache = joined(said, C), WarmStartCache(model, library)
    with tokens_run(model) as seen:
        got = logits_of(model, turn, cache, 3)
    assert seen == [31, 1, 1]
    close(got, logits_of(model, turn, new=3))


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 20}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_the_same_prompt_in_chunks_and_with_beams_is_as_without_a_library(options: dict[str, Any]) -> None:
    model = tiny.llama()
    cache = WarmStartCache(model, library_of(model, EARLIER))
    assert torch.equal(answer(model, EARLIER, cache, 7, **options).sequences, answer(model, EARLIER, None, 7, **options).sequences)
    assert cache.report().reused_tokens >= 19


def test_prefill_by_hand_fills_the_cache_up_to_the_last_token() -> None:
    model = tiny.llama()
    cache = WarmStartCache(model, library_of(model, EARLIER))
    assert cache.prefill(EARLIER) == 106
    close(forced(model, EARLIER[:, -1:], cache), logits_of(model, EARLIER))
    assert cache.report().reused_tokens == 106


def test_a_cache_that_was_emptied_is_served_again() -> None:
    model = tiny.llama()
    cache = WarmStartCache(model, library_of(model, EARLIER, slots=8), gate=OPEN, swap="sync")
    for number, (prompt, strategy) in enumerate(((EARLIER, "exact"), (CHANGED, "align"), (joined(D, E[:, -1:]), "slots")) * 2):
        fresh = WarmStartCache(model, cache.library, gate=OPEN, swap="sync")
        prompt = joined(prompt[:, :-1], EARLIER[:, -1:])
        close(logits_of(model, prompt, cache, 3), logits_of(model, prompt, fresh, 3))
        assert cache.report().strategies == (strategy,)
        # Of what a summary stands for nothing can be taken back by itself.
        if strategy == "slots" or number < 3:
            cache.reset()
        else:
            cache.crop(-cache.seen)
        assert cache.seen == 0


def test_training_and_embeddings_do_not_take_from_the_library() -> None:
    model = tiny.llama()
    library = library_of(model, EARLIER)
    cache = WarmStartCache(model, library)
    assert model(input_ids=EARLIER, past_key_values=cache, logits_to_keep=1).logits.requires_grad
    assert cache.report().strategies == ()
    other = WarmStartCache(model, library)
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(A), past_key_values=other)
    close(logits_of(model, joined(A, B), other), logits_of(model, joined(A, B)))
    assert other.report().strategies == ()


def test_copies_go_on_alike_and_share_the_library() -> None:
    model = tiny.llama()
    cache = WarmStartCache(model, library_of(model, EARLIER))
    text = answer(model, CHANGED, cache, 3).sequences
    other, sent = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    assert other.library is cache.library
    assert sent.library is None
    expected = forced(model, joined(text[:, -1:], D), cache)
    for each in (other, sent):
        close(forced(model, joined(text[:, -1:], D), each), expected, atol=1e-5)
        assert each.report().strategies == ("align",)
    other.reset()
    assert logits_of(model, EARLIER, other).shape[1] == 1
    assert other.report().strategies == ("exact",)


# Reports


def test_a_report_says_what_was_done_by_which_entry_and_why_not_more() -> None:
    model = tiny.llama()
    library = library_of(model, EARLIER, slots=8)
    (key,) = library.ids()
    cache = WarmStartCache(model, library)
    logits_of(model, CHANGED, cache)
    report = cache.report()
    assert (report.strategies, report.neighbours, report.swapped) == (("align",), (key,), False)
    assert (report.strategy, report.neighbour, report.similarity) == ("align", key, report.similarities[0])
    assert report.similarities[0] == pytest.approx(library.near(CHANGED[0].numpy())[0].similarity)
    assert 0 < report.similarities[0] < 1
    # 29 of the beginning, 39 and 7 behind guards, of 115; the last 16 are run.
    assert (report.reused_tokens, report.computed_tokens) == (29 + 39 + 7, 115 - 75)
    assert library.report().saved_tokens == 75
    assert report.as_dict()["neighbours"] == (key,)
    assert "align" in str(report)
    cache.reset()
    assert (cache.report().strategies, cache.report().reused_tokens, cache.report().computed_tokens) == ((), 0, 0)
    shut = WarmStartCache(model, library, gate=SHUT)
    close(logits_of(model, MOVED, shut), logits_of(model, MOVED))
    assert shut.report().strategies == ("cold",)
    assert shut.report().similarities == (None,)
    assert "below 101%" in shut.report().refusals[0]


def test_the_tokens_of_the_default_gate_are_those_reused() -> None:
    model = tiny.llama()
    library = library_of(model, EARLIER)
    logits_of(model, CHANGED, served := WarmStartCache(model, library, gate=WarmStartGate(reusable=75 / 115)))
    logits_of(model, CHANGED, refused := WarmStartCache(model, library, gate=WarmStartGate(reusable=76 / 115)))
    assert (served.report().strategies, refused.report().strategies) == (("align",), ("prefix",))


# Models and arguments


def test_without_rotary_positions_only_common_beginnings_are_reused() -> None:
    model = tiny.gpt2()
    library = library_of(model, EARLIER)
    for prompt, strategy, computed in ((EARLIER, "exact", 1), (joined(A, B, D), "prefix", 17), (MOVED, "cold", MOVED.shape[1])):
        cache = WarmStartCache(model, library, gate=OPEN)
        close(logits_of(model, prompt, cache, 4), logits_of(model, prompt, new=4))
        assert (cache.report().strategies, cache.report().computed_tokens) == ((strategy,), computed)
    for strategy in ("slots", "align"):
        with pytest.raises(UnsupportedError, match=f"strategy='{strategy}': its keys can't be moved"):
            WarmStartCache(model, library, strategy=strategy)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="Use slots=0"):
        WarmStartLibrary(model, words())


def test_models_whose_keys_change_with_the_length_or_that_have_a_learned_prompt_are_refused() -> None:
    model = tiny.llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(UnsupportedError):
        WarmStartLibrary(model, words())
    with pytest.raises(UnsupportedError, match="model"):
        WarmStartLibrary(model, words(), slots=0).add(A[0])
    with pytest.raises(UnsupportedError, match="model"):
        WarmStartCache(model, WarmStartLibrary(model, words(), slots=0))
    peft = pytest.importorskip("peft")
    plain = tiny.llama()
    wrapped = peft.get_peft_model(plain, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedError, match="learned prompt"):
        WarmStartCache(wrapped, WarmStartLibrary(plain, words(), slots=0))


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


def test_another_adapter_is_another_model() -> None:
    peft = pytest.importorskip("peft")
    model, tokenizer = testbed.load("lora")
    ids = torch.randint(3, 200, (1, 40), generator=torch.Generator().manual_seed(0))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model.add_adapter("other", config)
    model.set_adapter("default")
    library = WarmStartLibrary(model, tokenizer, slots=0, quantization=None)
    library.add(ids[0])
    cache = WarmStartCache(model, library)
    for change, strategy in ((lambda: None, "exact"), (lambda: model.set_adapter("other"), "cold")):
        change()
        cache.reset()
        close(logits_of(model, ids, cache, 3), logits_of(model, ids, new=3))
        assert cache.report().strategies == (strategy,)
    assert "other adapters are active" in cache.report().refusals[0]
    with model.disable_adapter():
        cache.reset()
        close(logits_of(model, ids, cache), logits_of(model, ids))
        assert cache.report().strategies == ("cold",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"library": "memory"}, "library: expected a WarmStartLibrary"),
        ({"strategy": "fast"}, "strategy: expected one of 'auto'"),
        ({"swap": "later"}, "swap: expected one of 'off'"),
        ({"swap": True}, "swap"),
        ({"guard": -1}, "guard"),
        ({"guard": True}, "guard"),
        ({"tail": 1.5}, "tail"),
        ({"gate": 0.9}, "gate: expected a WarmStartGate"),
        ({"projector": 5}, "projector: expected a SlotProjector"),
        ({"strategy": "slots"}, "the library has no summaries"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    model = tiny.llama()
    with pytest.raises(ConfigError, match=message):
        WarmStartCache(model, **{"library": library_of(model), **arguments})


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


# Summaries

SLOTTED = {
    "llama": lambda: tiny.llama(num_hidden_layers=2),
    "mqa": lambda: tiny.llama(num_hidden_layers=2, num_key_value_heads=1),
    "yarn": lambda: tiny.llama(
        num_hidden_layers=1,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64},
    ),
    "eager": lambda: _eager(tiny.llama(num_hidden_layers=2)),
    "sliding": lambda: tiny.build(MistralConfig(**{**tiny._SHAPE, "num_hidden_layers": 2}, sliding_window=50)),
}
SUMMED = joined(A, B, E)
LIKE = joined(D, A, B[:, ::3], E[:, -9:])


def _eager(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("eager")
    return model


def summary(model: PreTrainedModel, layout: str = "salient", tail: int = 1, **options: Any) -> WarmStartCache:
    library = library_of(model, SUMMED, slots=16, full=False, layout=layout, tail=tail)
    return WarmStartCache(model, library, strategy="slots", gate=OPEN, **options)


def moved_slots(cache: WarmStartCache, length: int) -> Slots:
    slots = cache.library.slots_of(cache.library.ids()[0])
    assert slots is not None
    return slots.shifted(length - slots.length, rotation_of(cache.model.config).layers)


@pytest.mark.parametrize("tail", [1, 5])
@pytest.mark.parametrize("layout", ["salient", "paper"])
@pytest.mark.parametrize("name", list(SLOTTED))
def test_behind_a_summary_attention_is_what_it_is_by_hand(name: str, layout: str, tail: int) -> None:
    model = SLOTTED[name]()
    cache = summary(model, layout, tail)
    length = LIKE.shape[1]
    found = answer(model, LIKE, cache, 9)
    assert cache.report().strategies == ("slots",)
    assert (cache.report().reused_tokens, cache.report().computed_tokens) == (length - tail, tail)
    assert cache.seen == length + 8
    assert cache.report().kept == (16 + tail + 8,) * len(cache.layers)
    expected = behind_slots(model, moved_slots(cache, length), found.sequences[0, length - tail : -1], length - tail, _window(name))
    close(torch.stack(found.logits, 1)[0], expected[tail - 1 :])
    assert not torch.allclose(found.logits[0], logits_of(model, LIKE)[:, 0], atol=1e-4)


def _window(name: str) -> int | None:
    return 50 if name == "sliding" else None


def test_layers_with_a_window_do_not_look_at_slots_outside_of_it() -> None:
    """Changing what lies outside changes nothing, and what lies inside does."""
    model = tiny.build(MistralConfig(**{**tiny._SHAPE, "num_hidden_layers": 2}, sliding_window=50))
    logits = []
    for moved in (None, "outside", "inside"):
        cache = summary(model)
        cache.prefill(LIKE)
        for layer in cache.layers:
            inside = layer.places.round() > LIKE.shape[1] - 1 - 50
            assert 0 < int(inside.sum()) < inside.numel()
            if moved is not None:
                chosen = inside if moved == "inside" else ~inside
                layer.value_buffer[:, :, :16] += chosen[..., None].float()
        logits.append(forced(model, LIKE[:, -1:], cache))
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2], atol=1e-3)


def test_windowed_and_full_layers_side_by_side() -> None:
    shape = {**tiny._SHAPE, "num_hidden_layers": 2}
    model = tiny.build(Qwen2Config(**shape, use_sliding_window=True, sliding_window=50, max_window_layers=1))
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    cache = summary(model)
    cache.prefill(LIKE)
    for number, layer in enumerate(cache.layers):
        outside = layer.places.round() <= LIKE.shape[1] - 1 - 50
        before = forced(model, LIKE[:, -1:], copy.deepcopy(cache))
        other = copy.deepcopy(cache)
        other.layers[number].value_buffer[:, :, :16] += outside[..., None].float()
        assert torch.equal(forced(model, LIKE[:, -1:], other), before) == (number == 1)


def test_the_last_token_is_forwarded_where_it_stands_and_the_length_before_it_is_that_of_the_prompt() -> None:
    model = tiny.llama()
    for tail in (1, 4):
        cache, seen = summary(model, tail=tail), []
        look = tiny.observing(
            lambda module, args, kwargs, cache=cache, seen=seen: seen.append(
                (cache.get_seq_length(), kwargs["input_ids"].shape[1], kwargs["position_ids"].tolist())
            )
        )
        handle = model.model.register_forward_pre_hook(look, with_kwargs=True)
        logits_of(model, LIKE, cache, 2)
        handle.remove()
        length = LIKE.shape[1]
        assert seen == [(length - tail, tail, [list(range(length - tail, length))]), (length, 1, [[length]])]


def test_a_summary_serves_the_same_prompt_where_nothing_else_is_stored() -> None:
    model = tiny.llama()
    cache = WarmStartCache(model, library_of(model, SUMMED, slots=200, full=False), strategy="slots")
    # With as many slots as tokens the summary is all of them.
    close(logits_of(model, SUMMED, cache, 4), logits_of(model, SUMMED, new=4))
    assert cache.report().strategies == ("slots",)


def test_summaries_of_half_precision() -> None:
    model = tiny.llama(initializer_range=0.1)
    expected = logits_of(model, LIKE, summary(model), 3)
    model = model.bfloat16()
    close(logits_of(model, LIKE, summary(model), 1), expected[:, :1], atol=0.1)


def test_what_was_generated_behind_a_summary_can_be_taken_back_and_the_summary_can_not() -> None:
    model = tiny.llama(num_hidden_layers=2)
    cache, length = summary(model), LIKE.shape[1]
    text = answer(model, LIKE, cache, 8).sequences
    cache.crop(-3)
    assert cache.seen == length + 7 - 3
    got = forced(model, D, cache)[0]
    ids = torch.cat([text[0, length - 1 : length + 4], D[0]])
    close(got, behind_slots(model, moved_slots(cache, length), ids, length - 1)[-17:])
    before = {name: tensor.clone() for name, tensor in cache.owned_tensors().items()}
    behind = cache.seen - (length - 1)
    with pytest.raises(UnsupportedError, match="reach into a prompt of which only a summary is kept"):
        cache.crop(-behind - 1)
    assert cache.seen == length - 1 + behind
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.owned_tensors().items())
    cache.crop(-behind)
    close(forced(model, ids[None], cache)[0], behind_slots(model, moved_slots(cache, length), ids, length - 1))


def test_summaries_are_reset_copied_sent_and_reordered_with_all_they_have() -> None:
    model = tiny.llama(num_hidden_layers=2)
    cache, length = summary(model), LIKE.shape[1]
    first = answer(model, LIKE, cache, 3)
    more = joined(first.sequences[:, -1:], D[:, :6])
    copied, sent = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    copied.batch_repeat_interleave(3)
    copied.reorder_cache(torch.tensor([2, 0, 1]))
    copied.batch_select_indices(torch.tensor([1, 2]))
    expected = behind_slots(model, moved_slots(cache, length), torch.cat([first.sequences[0, length - 1 : -1], more[0]]), length - 1)[-7:]
    close(forced(model, more.repeat(2, 1), copied), expected.expand(2, -1, -1))
    close(forced(model, more, sent)[0], expected)
    close(forced(model, more, cache)[0], expected)
    cache.reset()
    assert cache.report().strategies == ()
    assert all(layer.counts is None and layer.left_out == 0 for layer in cache.layers)
    again = answer(model, LIKE, cache, 3)
    assert torch.equal(again.sequences, first.sequences)
    cache.reset()
    exact = WarmStartCache(model, cache.library, strategy="slots")
    close(logits_of(model, D, exact, 3), logits_of(model, D, new=3))
    assert exact.report().strategies == ("cold",)


def test_beams_behind_a_summary_have_the_scores_of_their_texts_alone() -> None:
    model = tiny.llama(num_hidden_layers=2)
    cache, length = summary(model), LIKE.shape[1]
    cache.prefill(LIKE)
    slots = moved_slots(cache, length)
    cache.batch_repeat_interleave(3)
    found = answer(model, LIKE, cache, 5, num_beams=3, num_return_sequences=3, length_penalty=0.0, output_scores=True)
    assert len({tuple(row) for row in found.sequences.tolist()}) == 3
    for text, score in zip(found.sequences, found.sequences_scores, strict=True):
        logits = behind_slots(model, slots, text[length - 1 : -1], length - 1)
        close(score, logits.log_softmax(-1).gather(1, text[length:, None]).sum())


def test_a_chat_goes_on_behind_a_summary() -> None:
    model = tiny.llama(num_hidden_layers=2)
    cache, length = summary(model), LIKE.shape[1]
    turn = joined(answer(model, LIKE, cache, 4).sequences, D)
    found = answer(model, turn, cache, 3)
    expected = behind_slots(model, moved_slots(cache, length), found.sequences[0, length - 1 : -1], length - 1)[-3:]
    close(torch.stack(found.logits, 1)[0], expected)


def test_one_padded_row_behind_a_summary_is_the_row_without_padding() -> None:
    for name in ("llama", "sliding"):
        model = SLOTTED[name]()
        ids, mask = left_padded(LIKE, torch.zeros(1, LIKE.shape[1] + 11, dtype=torch.long))
        cache = summary(model)
        got = logits_of(model, ids[:1], cache, 4, attention_mask=mask[:1])
        assert cache.report().strategies == ("slots",)
        assert cache.report().computed_tokens == 1
        close(got, logits_of(model, LIKE, summary(model), 4))


def test_padding_between_turns_behind_a_summary_is_not_looked_at() -> None:
    model = tiny.llama()
    cache = summary(model)
    cache.prefill(LIKE)
    other, length = copy.deepcopy(cache), LIKE.shape[1]
    mask = torch.cat([torch.ones(1, length), torch.zeros(1, 3), torch.ones(1, 17)], 1).long()
    got = forced(model, joined(LIKE[:, -1:], E[:, :3], D), cache, mask)
    close(got[:, -17:], forced(model, joined(LIKE[:, -1:], D), other)[:, -17:])


def test_prompts_that_do_not_end_alike_and_those_the_gate_refuses_are_not_summed_up() -> None:
    model = tiny.llama()
    library = library_of(model, SUMMED, slots=16, full=False)
    cache = WarmStartCache(model, library, strategy="slots", gate=WarmStartGate(tau=-1.0, content=None), tail=1)
    close(logits_of(model, joined(LIKE, D), cache), logits_of(model, joined(LIKE, D)))
    assert cache.report().refusals == ("The two don't end alike.",)
    for gate, reason in (
        (WarmStartGate(tau=0.99), "The similarity is"),
        (WarmStartGate(tau=-1.0, lengths=(2.0, 3.0)), "times as long"),
        (WarmStartGate(tau=-1.0), "Words of content differ"),
    ):
        cold = WarmStartCache(model, library, strategy="slots", gate=gate, tail=1)
        close(logits_of(model, LIKE, cold), logits_of(model, LIKE))
        assert cold.report().strategies == ("cold",)
        assert reason in cold.report().refusals[0]


def test_a_projector_changes_slots_where_it_fits_and_does_no_harm_where_it_does_not() -> None:
    model = tiny.llama(num_hidden_layers=2)
    library = library_of(model, SUMMED, slots=16, full=False)
    geometries = rotation_of(model.config).layers
    mixing = tuple(torch.eye(16).roll(1, 0) for _ in range(2))
    projector = SlotProjector(mixing)
    cache = WarmStartCache(model, library, strategy="slots", gate=OPEN, projector=projector)
    found, length = answer(model, LIKE, cache, 3), LIKE.shape[1]
    assert cache.report().strategies == ("slots",)
    slots = projector.apply(library.slots_of(library.ids()[0]), length, geometries)
    expected = behind_slots(model, slots, found.sequences[0, length - 1 : -1], length - 1)
    close(torch.stack(found.logits, 1)[0], expected)
    # A prompt with fewer tokens than slots.
    short = library_of(model, D[:, :9], slots=16, full=False)
    prompt = joined(E[:, :3], D[:, :9])
    with_it = WarmStartCache(model, short, strategy="slots", gate=OPEN, projector=projector)
    without = WarmStartCache(model, short, strategy="slots", gate=OPEN)
    close(logits_of(model, prompt, with_it, 2), logits_of(model, prompt, without, 2))


def test_rows_of_a_batch_begin_with_a_summary_each() -> None:
    model = tiny.llama()
    cache = summary(model)
    ids, mask = left_padded(LIKE, SUMMED)
    got = logits_of(model, ids, cache, 3, attention_mask=mask)
    assert cache.report().strategies == ("slots", "slots")
    for row, prompt in enumerate((LIKE, SUMMED)):
        alone = WarmStartCache(model, cache.library, strategy="slots", gate=OPEN)
        close(got[row : row + 1], logits_of(model, prompt, alone, 3))


def test_a_batch_of_which_not_all_rows_have_a_summary_is_cold() -> None:
    model = tiny.llama()
    cache = summary(model)
    short = C[:, :1]
    ids, mask = left_padded(LIKE, short)
    close(logits_of(model, ids, cache, 3, attention_mask=mask), logits_of(model, ids, new=3, attention_mask=mask))
    assert cache.report().strategies == ("cold", "cold")
    assert cache.report().refusals[0] == "The rows of a batch take summaries only where all of them can."


# Prompts that enter the library


def test_a_prompt_that_was_computed_is_in_the_library_for_the_next_request() -> None:
    model = tiny.llama()
    library = library_of(model, slots=8)
    ids, mask = left_padded(EARLIER, joined(D, E))
    logits_of(model, ids, WarmStartCache(model, library, remember=True), 2, attention_mask=mask)
    library.refresh()
    for prompt in (EARLIER, joined(D, E)):
        cache = WarmStartCache(model, library)
        with tokens_run(model) as seen:
            got = logits_of(model, prompt, cache, 3)
        assert (cache.report().strategy, seen) == ("exact", [1, 1, 1])
        close(got, logits_of(model, prompt, new=3))
    assert len(library.ids()) == 2
    assert library.slots_of(library.ids()[0]) is not None


def test_a_prompt_behind_a_beginning_in_the_library_enters_it_too() -> None:
    model = tiny.llama()
    library = library_of(model, joined(A, B))
    for strategy in ("prefix", "exact"):
        cache = WarmStartCache(model, library, remember=True)
        close(logits_of(model, EARLIER, cache, 3), logits_of(model, EARLIER, new=3))
        assert cache.report().strategy == strategy


@pytest.mark.parametrize("swap", ["off", "sync"])
def test_what_was_reused_inexactly_enters_the_library_only_once_it_is_exact(swap: str) -> None:
    model = tiny.llama()
    library = library_of(model, EARLIER)
    cache = WarmStartCache(model, library, strategy="align", gate=OPEN, swap=swap, remember=True)  # type: ignore[arg-type]
    logits_of(model, CHANGED, cache, 3)
    assert cache.report().strategy == "align"
    library.refresh()
    assert len(library.ids()) == (2 if swap == "sync" else 1)
    if swap == "sync":
        cache = WarmStartCache(model, library)
        close(logits_of(model, CHANGED, cache, 3), logits_of(model, CHANGED, new=3))
        assert cache.report().strategy == "exact"


def test_a_library_stays_as_it_is_unless_the_cache_is_told_to_remember() -> None:
    model = tiny.llama()
    library = library_of(model, EARLIER)
    logits_of(model, joined(D, E), WarmStartCache(model, library), 3)
    library.refresh()
    assert len(library.ids()) == 1


@pytest.mark.parametrize(
    ("prompt", "served"),
    [
        (SUMMED, "exact"),
        (joined(SUMMED[:, :60], D[:, :4], SUMMED[:, 60:]), "align"),
        (LIKE, "slots"),
        (joined(A, B[:, :12], D), "prefix"),
        (joined(D, C), "cold"),
    ],
)
def test_auto_takes_the_best_there_is(prompt: torch.Tensor, served: str) -> None:
    model = tiny.llama()
    library = library_of(model, SUMMED, slots=16)
    cache = WarmStartCache(model, library, swap="sync", gate=WarmStartGate(tau=-1.0, content=None, lexical=False))
    logits_of(model, prompt, cache)
    assert cache.report().strategies == (served,)


@torch.no_grad()
def test_a_ready_mask_behind_a_summary_is_one_of_all_tokens() -> None:
    model, found = tiny.llama(), []
    for mask in (None, torch.ones(1, 1, 1, LIKE.shape[1], dtype=torch.bool)):
        cache = summary(model)
        cache.prefill(LIKE)
        found.append(model(D[:, :1], attention_mask=mask, past_key_values=cache).logits)
    close(*found)
    with pytest.raises(ConfigError, match="mask"):
        model(D[:, :1], attention_mask=torch.ones(1, 1, 1, LIKE.shape[1], dtype=torch.bool), past_key_values=cache)


@pytest.mark.parametrize("name", ["llama", "gemma2", "partial"])
def test_a_loop_without_positions_gets_what_a_full_cache_gives(name: str) -> None:
    model, prompts = MODELS[name](), (joined(A, B, C), joined(A, B))
    library = library_of(model, *prompts)
    ids, mask = left_padded(*prompts)
    for inputs in ((ids, mask), (ids, None), (prompts[0], torch.ones_like(prompts[0])), (prompts[0], None)):
        cache = WarmStartCache(model, library, strategy="exact")
        close(loop(model, cache, *inputs), loop(model, DynamicCache(config=model.config), *inputs))
        assert (cache.report().reused_tokens == 0) == (inputs[1] is mask)


@pytest.mark.parametrize("swap", ["off", "sync", "background"])
def test_by_itself_a_summary_only_stands_in_until_an_exact_prefill_takes_over(swap: Any) -> None:
    model = tiny.llama()
    library = library_of(model, SUMMED, slots=16, full=False)
    cache = WarmStartCache(model, library, swap=swap, gate=OPEN)
    text = answer(model, LIKE, cache, 6)
    if swap == "off":
        assert cache.report().strategies == ("cold",)
        assert "swap='sync'" in cache.report().refused
        close(torch.stack(text.logits, 1), logits_of(model, LIKE, new=6))
    else:
        assert cache.report().strategies == ("slots",)
        cache.wait()
        answer(model, text.sequences, cache, 2)
        assert cache.report().swapped
    assert WarmStartCache(model, library, strategy="slots", gate=OPEN).prefill(LIKE) == LIKE.shape[1] - 1

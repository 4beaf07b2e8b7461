"""`TranslatedCache` inside `generate`: what the maps say, row by row, and nothing lost where nothing is left out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError
from hf_kvcaches.translate import cache as cache_file
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.codes import ArrivingCodes
from hf_kvcaches.translate.translator import CacheTranslator
from tests import tiny
from tests.translate import pairs
from tests.translate.pairs import FAMILIES, close, last_layer, lossless, models, reference
from tests.warmstart.warm import answer, forced, left_padded, logits_of

PROMPT = tiny.ids(1, 45, seed=1)
OTHER = tiny.ids(1, 31, seed=2)
MORE = tiny.ids(1, 11, seed=3)
# The consumer runs so many first tokens of a prompt itself, before it runs the last one.
FIRST = 4
# Coefficients in float32 and in integers. A pass over more tokens or other rows sums in another order: by 1e-6, but where a coefficient
# lies between two integers by a whole step.
PAYLOADS = (2.0, 0.25)


def fitted(**options: Any) -> CacheTranslator:
    """Between the two `models`, with coefficients in float32 where nothing else is said."""
    return pairs.fitted(**{"payload": PAYLOADS[0], **options})


def same_but_for_steps(actual: torch.Tensor, expected: torch.Tensor, payload: float) -> None:
    """Keys or values are the same, but for the few of which a coefficient may have been rounded the other way."""
    if payload in (0.0, 2.0):
        close(actual, expected)
    else:
        assert float(((actual - expected).abs() > 1e-4).float().mean()) < 0.03


def same_caches(found: Any, expected: Any, payload: float) -> None:
    for layer, other in zip(found.layers, expected.layers, strict=True):
        same_but_for_steps(layer.keys, other.keys, payload)
        same_but_for_steps(layer.values, other.values, payload)


def tolerance(payload: float) -> float:
    """Of logits."""
    return 1e-4 if payload in (0.0, 2.0) else 2e-2


def joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, dim=1)


def cache_of(*prompts: torch.Tensor, **options: Any) -> TranslatedCache:
    """Of the consumer, with codes of these prompts."""
    (producer, consumer), translator = models(), fitted(**options)
    return TranslatedCache(consumer, translator, translator.encode(producer, *left_padded(*prompts)))


def expected_logits(ids: torch.Tensor, coded: torch.Tensor | None = None, new: int = 4, **options: Any) -> torch.Tensor:
    """What the consumer says behind what the maps make of a prompt that was coded."""
    return logits_of(models()[1], ids, reference(fitted(**options), ids if coded is None else coded), new)


def beginning(tokens: int) -> DynamicCache:
    """The first tokens of what the maps make of the prompt."""
    held = reference(fitted(), PROMPT)
    held.crop(tokens - 44)
    return held


# What is filled in


def test_generate_runs_the_last_token_and_the_report_says_what_the_others_cost() -> None:
    cache, consumer = cache_of(PROMPT), models()[1]
    codes = cache.codes
    assert cache.report().translated == 0
    with last_layer(consumer) as seen:
        logits_of(consumer, PROMPT, cache, 4)
    assert seen == [FIRST, 1, 1, 1, 1]
    report = cache.report()
    assert (report.translated, report.payload_bytes, report.run_layers) == (44, len(codes.to_bytes()), 0)
    # 4 layers of 2 heads of 8 numbers, keys and values, 2 bytes each.
    assert report.payload_share == pytest.approx(len(codes.to_bytes()) / (44 * 4 * 2 * 2 * 8 * 2))
    assert (report.seen, report.kept) == (48, (48,) * 4)
    assert "payload share" in str(report)


ROUNDED: list[dict[str, Any]] = [
    *({"payload": 0.25} | options for options in ({}, {"metric": "plain"}, {"layers_per_code": 2}, {"exact_tokens": 0})),
    *({"payload": 0.1} | options for options in ({}, {"layers_per_code": 4}, {"recompute_layers": 1}, {"recompute_layers": 2})),
]


@pytest.mark.parametrize("options", [*ROUNDED, {"payload": 0.0}, {"payload": 2.0}], ids=str)
def test_keys_and_values_are_those_of_the_maps(options: dict[str, Any]) -> None:
    cache, expected = cache_of(PROMPT, **options), reference(fitted(**options), PROMPT)
    assert cache.prefill(PROMPT) == 44
    same_caches(cache, expected, options["payload"])
    got = logits_of(models()[1], PROMPT, cache, 4)
    close(got, expected_logits(PROMPT, **options), tolerance(options["payload"]))
    # Or nothing would be measured here.
    assert float((got - logits_of(models()[1], PROMPT, new=4)).abs().max()) > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma2", "partial"])
def test_in_half_precision_what_is_lost_is_rounding(family: str) -> None:
    model = FAMILIES[family]().bfloat16()
    exact, translator = FAMILIES[family](), lossless(model)
    cache = TranslatedCache(model, translator, translator.encode(model, PROMPT))
    got, own, true = logits_of(model, PROMPT, cache), logits_of(model, PROMPT), logits_of(exact, PROMPT)
    assert cache.report().translated == 44
    assert all(layer.keys.dtype == torch.bfloat16 for layer in cache.layers)
    # Rounding weights and all between is what the model does to itself.
    assert float((got - own).abs().max()) < 2 * float((own - true).abs().max())


# Batches, beams, chats


@pytest.mark.parametrize("payload", PAYLOADS)
def test_rows_with_padding_are_those_of_the_prompts_alone(payload: float) -> None:
    rows = [PROMPT, OTHER, MORE[:, :2], OTHER[:, 3:]]
    ids, mask = left_padded(*rows)
    cache = cache_of(*rows, payload=payload)
    got = logits_of(models()[1], ids, cache, 4, attention_mask=mask)
    for number, row in enumerate(rows):
        expected = reference(fitted(payload=payload), row)
        tokens = expected.get_seq_length()
        for layer, other in zip(cache.layers, expected.layers, strict=True):
            same_but_for_steps(layer.keys[number : number + 1, :, 44 - tokens : 44], other.keys, payload)
        close(got[number : number + 1], expected_logits(row, payload=payload), tolerance(payload))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_rows_come_in_any_order_some_of_them_and_some_twice(payload: float) -> None:
    rows = [PROMPT, OTHER, joined(MORE, OTHER), OTHER[:, 3:]]
    (producer, consumer), translator = models(), fitted(payload=payload)
    codes = translator.encode(producer, *left_padded(*rows))
    ids, mask = left_padded(*rows)
    whole = logits_of(consumer, ids, TranslatedCache(consumer, translator, codes), 3, attention_mask=mask)
    for order in ([3, 0, 2, 1], [2], [1, 3], [0, 0, 1, 0], [3, 1, 3, 2, 2]):
        ids, mask = left_padded(*(rows[number] for number in order))
        cache = TranslatedCache(consumer, translator, codes)
        with last_layer(consumer) as seen:
            got = logits_of(consumer, ids, cache, 3, attention_mask=mask)
        assert seen == [FIRST, 1, 1, 1]
        close(got, whole[order])
        assert cache.report().translated == sum(rows[number].shape[1] - 1 for number in order)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_that_come_again_are_filled_as_all_others(family: str) -> None:
    model, consumer = FAMILIES[family](), pairs.changed(FAMILIES[family]())
    translator = pairs.fit(model, consumer, payload=2.0, layers_per_code=1)
    # Rows of several lengths, one of them twice, few different tokens.
    rows = [tiny.ids(1, length, seed=length) % 7 for length in (20, 31)]
    codes = translator.encode(model, *left_padded(*rows))
    ids, mask = left_padded(rows[1], rows[0], rows[1])
    cache = TranslatedCache(consumer, translator, codes)
    assert cache.prefill(ids, mask) == 30
    for number, row in enumerate((rows[1], rows[0], rows[1])):
        alone = TranslatedCache(consumer, translator, translator.encode(model, row))
        alone.prefill(row)
        for layer, other in zip(cache.layers, alone.layers, strict=True):
            for made, expected in ((layer.keys, other.keys), (layer.values, other.values)):
                torch.testing.assert_close(made[number, :, -expected.shape[2] :], expected[0], rtol=1e-4, atol=1e-4)
            assert layer.keys.isfinite().all()


def test_several_questions_behind_one_document() -> None:
    rows = [joined(PROMPT, MORE), joined(PROMPT, OTHER), joined(PROMPT, MORE[:, ::3])]
    ids, mask = left_padded(*rows)
    cache = cache_of(PROMPT)
    got = logits_of(models()[1], ids, cache, 4, attention_mask=mask)
    # All rows are filled up to one slot: where the document ends in the row with the least padding.
    assert cache.report().translated == 44 + (44 - 20) + (44 - 20 - 7)
    # A row with more padding has fewer slots; what is run instead is exact for what stands before it.
    for number, (row, count) in enumerate(zip(rows, (24, 44, 17), strict=True)):
        close(got[number : number + 1], logits_of(models()[1], row, beginning(count), 4))


def chat(cache: TranslatedCache, *turns: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """What the consumer says behind each turn, of which all but the last token come as codes, and what it has read by then."""
    (producer, consumer), translator, text, said = models(), fitted(**options), PROMPT, list[torch.Tensor]()
    for turn in (None, *turns):
        if turn is not None:
            text = joined(text, turn)
            cache.add(translator.encode(producer, text, first=cache.seen))
        with last_layer(consumer) as seen:
            said.append(answer(consumer, text, cache, 3).sequences)
        assert seen == ([1, 1, 1] if turn is not None or not translator.settings.exact_tokens else [FIRST, 1, 1, 1])
        text = said[-1]
    return said


@pytest.mark.parametrize("options", [{}, {"recompute_layers": 2}, {"layers_per_code": 4}, {"exact_tokens": 0}], ids=str)
def test_the_turns_of_a_chat_come_as_codes_too(options: dict[str, Any]) -> None:
    producer, translator = models()[0], fitted(**options)
    cache = cache_of(PROMPT, **options)
    said = chat(cache, MORE, OTHER, **options)
    assert cache.report().translated == 44 + 2 * (1 + 1) + 10 + 30 - 2
    # As if all of it had come at once, where no layer looks at what the consumer itself has said.
    whole = TranslatedCache(models()[1], translator, translator.encode(producer, said[-1][:, :-2]))
    whole.prefill(said[-1][:, :-2])
    for layer, other in list(zip(cache.layers, whole.layers, strict=True))[: 1 + translator.settings.recompute_layers]:
        close(layer.keys[:, :, :-2], other.keys)
    assert cache.seen == said[-1].shape[1] - 1


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_turn_that_is_translated_has_the_keys_and_values_of_the_whole_text(payload: float) -> None:
    (producer, consumer), translator = models(), fitted(payload=payload)
    cache, text = cache_of(PROMPT, payload=payload), joined(PROMPT, MORE)
    cache.prefill(PROMPT)
    cache.add(translator.encode(producer, text, first=cache.seen))
    # Codes that were not used are replaced.
    cache.add(translator.encode(producer, OTHER))
    cache.add(translator.encode(producer, text, first=cache.seen))
    assert cache.prefill(text[:, 44:]) == 55
    same_caches(cache, reference(translator, text), payload)
    assert cache.report().translated == 55
    cache.reset()
    close(logits_of(consumer, PROMPT, cache, 3), expected_logits(PROMPT, new=3, payload=payload), tolerance(payload))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_turn_of_a_padded_batch_comes_as_codes(payload: float) -> None:
    (producer, consumer), translator = models(), fitted(payload=payload)
    rows, turn = [PROMPT, OTHER], tiny.ids(2, 9, seed=8)
    ids, mask = left_padded(*rows)
    cache = cache_of(*rows, payload=payload)
    cache.prefill(ids, mask)
    ids, mask = joined(ids, turn), joined(mask, torch.ones_like(turn))
    # Codes of a few tokens that are there already do no harm.
    cache.add(translator.encode(producer, ids, mask, first=cache.seen - 3))
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        consumer(ids[:, 44:], attention_mask=mask, position_ids=positions[:, 44:], past_key_values=cache, logits_to_keep=1)
    for number, row in enumerate(rows):
        expected = reference(translator, joined(row, turn[number : number + 1]))
        for layer, other in zip(cache.layers, expected.layers, strict=True):
            same_but_for_steps(layer.keys[number : number + 1, :, -other.get_seq_length() - 1 : -1], other.keys, payload)


def test_a_turn_whose_codes_leave_a_gap_or_are_of_another_text_is_refused() -> None:
    (producer, consumer), translator = models(), fitted()
    text = joined(PROMPT, MORE)
    for other, first in ((text, 46), (joined(PROMPT.flip(1), MORE), 44), (joined(PROMPT, MORE.flip(1)), 44)):
        cache = cache_of(PROMPT)
        cache.prefill(PROMPT)
        cache.add(translator.encode(producer, other, first=first))
        with pytest.raises(ConfigError, match=r"another prompt.*first=cache.seen \(44\)"):
            answer(consumer, text, cache)
        with pytest.raises(UnsupportedError, match="still to be filled"), torch.no_grad():
            consumer(MORE[:, :1], past_key_values=cache)
        assert cache.seen == 44
    with pytest.raises(ConfigError, match="first: expected"):
        translator.encode(producer, PROMPT, first=44)


# Prompts that are longer or shorter than the one that was coded


def test_what_goes_on_behind_the_codes_is_run_and_always_the_last_token() -> None:
    consumer, ids = models()[1], joined(PROMPT, MORE)
    for length, filled in ((56, 44), (45, 44), (44, 43)):
        cache = cache_of(PROMPT)
        with last_layer(consumer) as seen:
            got = logits_of(consumer, ids[:, :length], cache, 3)
        assert (seen, cache.report().translated) == ([FIRST, length - filled, 1, 1], filled)
        close(got, logits_of(consumer, ids[:, :length], beginning(filled), 3))
    other = torch.cat([PROMPT[:, :-1], (PROMPT[:, -1:] + 1) % 90 + 3], 1)
    close(logits_of(consumer, other, cache_of(PROMPT), 4), expected_logits(other, PROMPT))


def test_in_chunks_the_first_comes_of_codes_and_the_others_are_run() -> None:
    consumer, cache = models()[1], cache_of(PROMPT, MORE)
    ids = torch.cat([PROMPT, MORE], 1)
    got = answer(consumer, ids, cache, 4, prefill_chunk_size=50)
    expected = answer(consumer, ids, beginning(44), 4)
    close(torch.stack(got.logits, 1), torch.stack(expected.logits, 1))
    assert cache.report().translated == 44
    with pytest.raises(ConfigError, match="nor its first chunk may be shorter"):
        answer(consumer, PROMPT, cache_of(PROMPT), 4, prefill_chunk_size=20)


def test_by_hand_it_is_filled_up_to_the_last_token() -> None:
    consumer, cache = models()[1], cache_of(PROMPT)
    assert cache.prefill(PROMPT) == cache.seen == 44
    close(logits_of(consumer, PROMPT, copy.deepcopy(cache), 4), expected_logits(PROMPT))  # generate goes on with the same prompt
    close(forced(consumer, PROMPT[:, -1:], cache), expected_logits(PROMPT, new=1))
    with pytest.raises(UnsupportedError, match="has used its codes"):
        cache.prefill(PROMPT)
    assert cache.seen == 45


# What can be done with a cache that is filled


def test_what_was_saved_or_pickled_goes_on_without_a_translator(tmp_path: Any) -> None:
    consumer, cache = models()[1], cache_of(PROMPT)
    with pytest.raises(UnsupportedError, match="still to be filled"):
        pickle.dumps(cache)
    answer(consumer, PROMPT, cache, 3)
    cache.save(tmp_path / "cache")
    loaded, sent = TranslatedCache.load(tmp_path / "cache", consumer), pickle.loads(pickle.dumps(cache))
    expected = forced(consumer, MORE, cache)
    for other in (loaded, sent):
        assert (other.translator, other.codes) == (None, None)
        assert (other.report().translated, other.report().payload_bytes) == (44, 0)
        close(forced(consumer, MORE, other), expected, 1e-5)
    loaded.reset()
    close(logits_of(consumer, OTHER, loaded, 3), logits_of(consumer, OTHER, new=3))


@pytest.mark.parametrize("arriving", [False, True])
def test_what_was_emptied_is_filled_again(arriving: bool) -> None:
    consumer, cache = models()[1], cache_of(PROMPT)
    if arriving:
        cache.reset(ArrivingCodes(cache.codes.chunks()))
    for _ in range(3):
        with last_layer(consumer) as seen:
            close(logits_of(consumer, PROMPT, cache, 3), expected_logits(PROMPT, new=3))
        assert seen[:4] == [FIRST, 1, 1, 1]
        assert cache.report().translated == 44
        cache.reset()
        assert (cache.seen, cache.report().translated) == (0, 0)
    for payload in PAYLOADS[0], 0.0:  # codes of no parts take the place of others, too
        cache = cache_of(PROMPT, payload=payload)
        cache.reset(fitted(payload=payload).encode(models()[0], OTHER))
        close(logits_of(consumer, OTHER, cache, 3), expected_logits(OTHER, new=3, payload=payload))
        assert cache.report().translated == 30


def test_copies_of_a_cache_whose_codes_are_arriving_all_get_them() -> None:
    consumer, codes = models()[1], cache_of(PROMPT).codes
    first = TranslatedCache(consumer, fitted(), ArrivingCodes(codes.chunks()))
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    for cache in (second, first, third):
        close(logits_of(consumer, PROMPT, cache, 2), expected_logits(PROMPT, new=2))
        assert cache.report().translated == 44


def test_a_layer_is_rebuilt_while_the_next_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, rebuilt, held, rebuild = cache_of(PROMPT).codes, list[int](), list[int](), cache_file.rebuild
    monkeypatch.setattr(cache_file, "rebuild", lambda *args, **options: (rebuilt.append(1), rebuild(*args, **options)))

    def arrive() -> Any:
        for piece in codes.chunks():
            held.append(len(rebuilt))
            yield piece

    TranslatedCache(models()[1], fitted(), ArrivingCodes(arrive())).prefill(PROMPT)
    # The head comes first; before the part of layer 2 the consumer has layer 1, and so on.
    assert held == [0, 0, 1, 2]


def test_without_codes_the_model_runs_the_prompt_and_the_next_turn_may_come_as_codes() -> None:
    (producer, consumer), text, cache = models(), joined(PROMPT, MORE), TranslatedCache(models()[1], fitted())
    close(logits_of(consumer, PROMPT, cache, 1), logits_of(consumer, PROMPT, new=1))
    assert cache.report().translated == 0
    cache.add(fitted().encode(producer, text, first=cache.seen))
    with last_layer(consumer) as seen:
        answer(consumer, text, cache, 1)
    assert (seen, cache.seen, cache.report().translated) == ([1], 56, 10)


# What codes can't serve


def _ready(ids: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones(1, 1, *[ids.shape[1]] * 2, dtype=torch.bool).tril(), "logits_to_keep": 1}


# How the model is called, and what the error says of it.
UNSERVED: dict[str, tuple[Callable[[torch.Tensor, Any], dict[str, Any]], str]] = {
    "all logits": (lambda ids, model: {"input_ids": ids}, "Pass logits_to_keep=1"),
    "insides": (lambda ids, model: {"input_ids": ids, "logits_to_keep": 1, "output_hidden_states": True}, "output_hidden_states asks"),
    "embeddings": (lambda ids, model: {"inputs_embeds": model.get_input_embeddings()(ids), "logits_to_keep": 1}, "brings inputs_embeds"),
    "a mask made ready": (lambda ids, model: _ready(ids), "not one number for each token"),
    "gradients": (lambda ids, model: {"input_ids": ids, "logits_to_keep": 1}, "under torch.no_grad"),
    "one token": (lambda ids, model: {"input_ids": ids[:, :1], "logits_to_keep": 1}, "input_ids of the whole prompt"),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_a_call_that_codes_cannot_serve_is_refused_and_one_that_they_can_taken_then(name: str) -> None:
    consumer, cache = models()[1], cache_of(PROMPT)
    make, match = UNSERVED[name]
    with torch.set_grad_enabled(name == "gradients"), pytest.raises(UnsupportedError, match=f"filled from its codes.*{match}"):
        consumer(**make(PROMPT, consumer), past_key_values=cache)
    assert cache.seen == 0
    close(logits_of(consumer, PROMPT, cache, 4), expected_logits(PROMPT))


def test_logits_of_the_last_few_tokens_leave_the_others_to_the_codes() -> None:
    consumer, cache = models()[1], cache_of(PROMPT)
    with torch.no_grad():
        got = consumer(input_ids=PROMPT, past_key_values=cache, logits_to_keep=5).logits
        close(got, consumer(input_ids=PROMPT[:, -5:], past_key_values=beginning(40)).logits)
    assert cache.report().translated == 40


def test_padding_that_is_not_on_the_left_or_that_the_model_would_number_itself_is_refused() -> None:
    for place in (-1, 20):
        cache, mask = cache_of(PROMPT), torch.ones_like(PROMPT)
        mask[0, place] = 0
        with pytest.raises(UnsupportedError, match="more than padding on the left"):
            cache.prefill(PROMPT, mask)
        assert cache.seen == 0
    consumer, cache = models()[1], cache_of(PROMPT, OTHER)
    ids, mask = left_padded(PROMPT, OTHER)
    inputs = {"input_ids": ids, "attention_mask": mask, "logits_to_keep": 1, "past_key_values": cache}
    with torch.no_grad():
        with pytest.raises(UnsupportedError, match="position_ids"):
            consumer(**inputs)
        assert cache.seen == 0
        consumer(**inputs, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    assert cache.report().translated == 74


# What is refused


@pytest.mark.parametrize(
    "wrong",
    [
        torch.cat([PROMPT[:, :7], (PROMPT[:, 7:8] + 1) % 90 + 3, PROMPT[:, 8:]], 1),
        torch.cat([PROMPT[:, :43], (PROMPT[:, 43:44] + 1) % 90 + 3, PROMPT[:, 44:]], 1),
        PROMPT[:, 1:],
        OTHER,
        OTHER[:, :9],
        PROMPT[:, :43],
        PROMPT[:, :5],
        torch.cat([PROMPT, PROMPT.flip(1)]),
    ],
    ids=range(8),
)
def test_another_prompt_is_refused_and_the_right_one_taken_then(wrong: torch.Tensor) -> None:
    consumer, cache = models()[1], cache_of(PROMPT)
    for ask in (lambda: answer(consumer, wrong, cache), lambda: cache.prefill(wrong)):
        with pytest.raises(ConfigError, match=r"another prompt \(rows of 44 tokens\).*Encode this prompt"):
            ask()
        assert (cache.seen, cache.report().translated) == (0, 0)
        assert not any(layer.is_initialized for layer in cache.layers)
    close(logits_of(consumer, PROMPT, cache, 4), expected_logits(PROMPT))


def test_a_batch_with_a_row_that_was_not_coded_or_begins_behind_all_codes_is_refused() -> None:
    cache = cache_of(PROMPT, OTHER)
    refusals = {"rows of 44, 30 tokens": (OTHER, joined(MORE, MORE), PROMPT), "start at or after": (joined(PROMPT, OTHER, MORE), OTHER)}
    for match, rows in refusals.items():
        ids, mask = left_padded(*rows)
        with pytest.raises(ConfigError, match=match):
            answer(models()[1], ids, cache, attention_mask=mask)
        assert (cache.seen, cache.report().translated) == (0, 0)
    ids, mask = left_padded(OTHER, PROMPT)
    logits_of(models()[1], ids, cache, attention_mask=mask)
    assert cache.report().translated == 74


@pytest.mark.parametrize("cut", [0.4, 0.99])
def test_codes_that_break_off_leave_an_empty_cache(cut: float) -> None:
    consumer, content = models()[1], cache_of(PROMPT).codes.to_bytes()
    cache = TranslatedCache(consumer, fitted(), ArrivingCodes([content[: int(cut * len(content))]]))
    for _ in range(2):
        with pytest.raises(ArtifactError, match="too early"):
            answer(consumer, PROMPT, cache)
        assert cache.seen == 0
        assert not any(layer.is_initialized for layer in cache.layers)


def test_a_filling_that_was_broken_off_is_made_up_for_with_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer, codes = models()[1], cache_of(PROMPT).codes
    cache = TranslatedCache(consumer, fitted(), ArrivingCodes(codes.chunks()))
    rebuild, calls = cache_file.rebuild, list[None]()

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise MemoryError
        rebuild(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(cache_file, "rebuild", failing)
        with pytest.raises(MemoryError):
            answer(consumer, PROMPT, cache)
    assert cache.seen == 0
    close(logits_of(consumer, PROMPT, cache, 4), expected_logits(PROMPT))
    assert cache.report().translated == 44


def test_what_is_no_translator_and_no_codes_is_refused_with_a_hint() -> None:
    (_, consumer), translator, codes = models(), fitted(), cache_of(PROMPT).codes
    for given, hint in (
        (("pair", codes), r"translator: expected a CacheTranslator, got 'pair'.*from_pretrained"),
        ((translator, codes.to_bytes()), r"codes: expected SemanticCodes.*got 'bytes'.*from_bytes"),
        ((translator, PROMPT), r"codes: expected SemanticCodes.*got 'Tensor'.*encode"),
        ((None, codes), r"translator: expected a CacheTranslator.*from_pretrained"),
        ((), r"translator: expected a CacheTranslator, got None.*from_pretrained"),
    ):
        with pytest.raises(ConfigError, match=hint):
            TranslatedCache(consumer, *given)  # type: ignore[arg-type]

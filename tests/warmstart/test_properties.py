"""The properties that the paper lists, on real caches and the testbed's model."""

from __future__ import annotations

from functools import cache as remembered
from typing import Any

import pytest
import torch

from hf_kvcaches import WarmStartCache, WarmStartGate, WarmStartLibrary
from hf_kvcaches.core.rope import RotaryGeometry, rotation_of
from hf_kvcaches.warmstart.reading import read_prompt
from hf_kvcaches.warmstart.summaries.compressor import SlotCompressor
from hf_kvcaches.warmstart.summaries.positions import PositionCorrection
from hf_kvcaches.warmstart.summaries.slots import LayerSlots, Slots
from tests import testbed, tiny
from tests.segments.test_cache import MODELS, A, B, C, D, joined
from tests.testbed.pairs import make_pairs
from tests.warmstart.test_positions import correction, keys_at, model  # noqa: F401 - fixtures
from tests.warmstart.warm import OPEN, forced, left_padded, library_of, logits_of, said

EARLIER = joined(A, B, C)


@remembered
def trained() -> tuple[Any, Any]:
    return testbed.load()


def divergence(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Of the next token's distribution from the one that it should be."""
    p, q = expected.double().log_softmax(-1), actual.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


# Shifts


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("gemma2",)])
@pytest.mark.parametrize("padding", [0, 13])
def test_a_summary_moved_to_any_place_gives_the_same_logits(name: str, padding: int) -> None:
    """All positions of a prompt shifted alike change nothing, whether padding or positions shift them."""
    tested = MODELS[name]()
    library = library_of(tested, EARLIER, slots=200, full=False)
    cache = WarmStartCache(tested, library, strategy="slots")
    ids, mask = left_padded(EARLIER, torch.zeros(1, 107 + padding, dtype=torch.long))
    got = logits_of(tested, ids[:1], cache, 4, attention_mask=mask[:1])
    assert cache.report().strategies == ("slots",)
    torch.testing.assert_close(got, logits_of(tested, EARLIER, new=4), atol=1e-4, rtol=0)


@pytest.mark.parametrize("delta", [-40, 1, 77])
def test_slots_turned_on_and_their_last_token_with_them_give_the_logits_of_where_they_came_from(delta: int) -> None:
    tested = tiny.llama()
    library = library_of(tested, EARLIER, slots=16, full=False)
    slots = library.slots_of(library.ids()[0])
    assert slots is not None
    logits = []
    for by in (0, delta):
        cache = WarmStartCache(tested, library)
        cache.start_from(slots.shifted(by, library.rotation.layers), 106 + by)
        logits.append(forced(tested, joined(EARLIER[:, -1:], D), cache))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)
    # Left where they were they would be at another distance.
    cache = WarmStartCache(tested, library)
    cache.start_from(slots, 106 + delta)
    assert not torch.allclose(forced(tested, joined(EARLIER[:, -1:], D), cache), logits[0], atol=1e-3)


def test_stretches_that_moved_are_turned_by_as_much() -> None:
    """With nothing but a moved stretch before them, tokens see what they would have seen where it stood."""
    tested = tiny.llama()
    geometry = RotaryGeometry.from_config(tested.config, layer_idx=0)
    source = read_prompt(tested, EARLIER)
    cache = WarmStartCache(tested, library_of(tested, EARLIER), strategy="align", gate=OPEN)
    logits_of(tested, joined(D, EARLIER), cache)
    for block in cache.plans[0].choice.blocks:
        for layer, (keys, values) in zip(cache.layers, source.layers, strict=True):
            moved = geometry.shift(keys[None], block.target - block.source)[:, :, block.source : block.source + block.length]
            span = slice(block.target, block.target + block.length)
            torch.testing.assert_close(layer.keys[:, :, span], moved, atol=1e-5, rtol=0)
            assert torch.equal(layer.values[0, :, span], values[:, block.source : block.source + block.length])
    assert cache.plans[0].choice.reused > 70


# Errors that fall with the number of slots


@remembered
def _passages() -> list[tuple[list[int], list[int], torch.Tensor]]:
    """Two prompts that end alike, and what the model says behind the second."""
    tested, tokenizer = trained()
    text = tokenizer(testbed.held_out()[:12000], add_special_tokens=False)["input_ids"]
    found = []
    for start in range(0, 1600, 400):
        source = text[start : start + 300]
        target = [*text[start + 310 : start + 317], *source]
        found.append((source, target, logits_of(tested, torch.tensor([target]))[:, 0]))
    return found


def _mean_divergence(layout: Any, slots: int) -> float:
    tested, tokenizer = trained()
    found = []
    for source, target, expected in _passages():
        library = WarmStartLibrary(tested, tokenizer, slots=slots, full=False, layout=layout)
        library.add([source])
        cache = WarmStartCache(tested, library, strategy="slots", gate=OPEN)
        found.append(divergence(expected, logits_of(tested, torch.tensor([target]), cache)[:, 0]))
        assert cache.report().strategies == ("slots",)
        assert cache.report().kept[0] == slots + 1
    return sum(found) / len(found)


def test_with_more_slots_a_summary_says_more_nearly_the_same() -> None:
    salient = [_mean_divergence("salient", slots) for slots in (8, 16, 32, 64)]
    assert salient[3] < 0.05
    assert salient[3] < salient[2] < salient[1] < salient[0], salient


def test_with_as_many_slots_as_tokens_the_papers_layout_is_exact_and_with_few_it_is_far_off() -> None:
    """Its error does not fall steadily between: a mean of many turned keys is near none of them."""
    paper = [_mean_divergence("paper", slots) for slots in (8, 16, 32, 64)]
    assert max(paper) > 10 * _mean_divergence("salient", 64)
    assert min(paper[2:]) < max(paper[:2]), paper
    tested, tokenizer = trained()
    source, _, _ = _passages()[0]
    library = WarmStartLibrary(tested, tokenizer, slots=300, full=False, layout="paper")
    library.add([source])
    ids = torch.tensor([source])
    assert divergence(logits_of(tested, ids)[:, 0], logits_of(tested, ids, WarmStartCache(tested, library))[:, 0]) < 1e-6


# Causality


@pytest.mark.parametrize("delta", [-15, 3, 60, 140])
def test_repaired_positions_stay_in_order_before_the_last_token(correction: PositionCorrection, delta: int, model: Any) -> None:  # noqa: F811
    """Of a model with learned positions: no slot stands at or behind the token that looks at it, and two never at one place."""
    keys = keys_at(model, tiny.ids(81, seed=3), 0)
    query = [torch.randn(4, 8, generator=torch.Generator().manual_seed(1)) for _ in keys]
    slots = SlotCompressor(24).compress([own[:, :-1] for own in keys], [own[:, :-1] for own in keys], query, 81)
    moved = correction.shifted(slots, delta)
    for positions in (layer.positions for layer in moved.layers):
        assert bool((positions == positions.round()).all())
        assert bool((positions.diff(dim=-1) >= 1).all())
        assert float(positions.max()) < moved.length - 1
        assert float(positions.min()) >= 0


@pytest.mark.parametrize("strategy", ["align", "slots"])
def test_what_comes_later_changes_nothing_before_it(strategy: Any) -> None:
    """The last tokens of a prompt leave the logits of those before them as they are."""
    tested = tiny.llama()
    prompt = joined(A, D[:, :5], B, C)
    library = library_of(tested, EARLIER, slots=16, tail=6)
    logits = []
    for last in (0, 5):
        changed = prompt.clone()
        cache = WarmStartCache(tested, library, strategy=strategy, gate=OPEN)
        cache.prefill(changed)
        cache.crop(-4)
        changed[:, -1] = last + 3
        logits.append(forced(tested, changed[:, -5:], cache))
        assert cache.report().strategies == (strategy,)
    assert torch.equal(logits[0][:, :-1], logits[1][:, :-1])
    assert not torch.equal(logits[0][:, -1], logits[1][:, -1])


def test_a_prompts_slots_are_made_of_its_own_tokens_and_those_before_the_tail() -> None:
    tested = tiny.llama()
    changed = EARLIER.clone()
    changed[:, -3:] += 1
    slots = []
    for ids in (EARLIER, changed):
        states = read_prompt(tested, ids)
        before: list[Any] = [(keys[:, :-3], values[:, :-3]) for keys, values in states.layers]
        query = [torch.ones_like(each) for each in states.queries]
        slots.append(SlotCompressor(16).compress([k for k, _ in before], [v for _, v in before], query, 107, states.scaling))
    for one, other in zip(slots[0].layers, slots[1].layers, strict=True):
        assert isinstance(one, LayerSlots)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, other, strict=True))


# The same prompt


@pytest.mark.parametrize("strategy", ["auto", "align", "exact"])
def test_the_same_prompt_is_exact(strategy: Any) -> None:
    tested, tokenizer = trained()
    library = WarmStartLibrary(tested, tokenizer, quantization=None)
    source = make_pairs(tokenizer, "identical", 1, length=300)[0].source.prompt
    library.add([source])
    cache = WarmStartCache(tested, library, strategy=strategy)
    ids = torch.tensor([source])
    torch.testing.assert_close(logits_of(tested, ids, cache, 8), logits_of(tested, ids, new=8), atol=1e-4, rtol=0)
    assert cache.report().strategies == ("exact",)
    assert cache.report().computed_tokens == 1


# Controls that must fail


def _with(kind: Any, gate: WarmStartGate | None, strategy: Any, count: int = 3) -> tuple[list[float], list[str], list[str]]:
    tested, tokenizer = trained()
    divergences, served, reasons = [], [], []
    for pair in make_pairs(tokenizer, kind, count, seed=4, length=300):
        library = WarmStartLibrary(tested, tokenizer, slots=64)
        library.add([pair.source.prompt])
        cache = WarmStartCache(tested, library, strategy=strategy, gate=gate)
        start, stop = pair.target.answers[0]
        ids, said_next = torch.tensor([pair.target.prompt]), torch.tensor([pair.target.continuation[start:stop]])
        got = torch.cat([logits_of(tested, ids, cache), forced(tested, said_next, cache)], 1)
        with torch.no_grad():
            expected = tested(torch.cat([ids, said_next], 1)).logits[:, ids.shape[1] - 1 :]
        # A value may begin like the other.
        divergences.append(max(divergence(expected[:, place], got[:, place]) for place in range(got.shape[1])))
        served += cache.report().strategies
        reasons += cache.report().refusals
    return divergences, served, reasons


@pytest.mark.parametrize("kind", ["changed_fact", "changed_digit"])
def test_a_mismatched_source_behind_an_open_gate_says_something_else_and_the_gate_refuses_it(kind: Any) -> None:
    wrong, served, _ = _with(kind, OPEN, "slots")
    assert served == ["slots"] * 3
    assert sum(wrong) / 3 > 0.5, wrong
    right, served, reasons = _with(kind, None, "slots")
    assert served == ["cold"] * 3
    assert max(right) < 1e-5
    refusals = ("What differs touches numbers", "Words of content differ", "The two don't end alike")
    assert all(reason.startswith(refusals) for reason in reasons)
    # What is aligned computes the change and what follows it.
    aligned, served, _ = _with(kind, None, "align")
    assert set(served) <= {"align", "prefix"}
    assert max(aligned) < 0.05, aligned


def test_an_unrelated_source_behind_an_open_gate_says_something_else_and_the_gate_refuses_it() -> None:
    tested, tokenizer = trained()
    pairs = make_pairs(tokenizer, "unrelated", 4, seed=2, length=300)
    wrong, cold = [], []
    for pair in pairs:
        # They end with the same token, which alone is run.
        target = [*pair.target.prompt, pair.source.prompt[-1]] if pair.target.prompt[-1] != pair.source.prompt[-1] else pair.target.prompt
        ids = torch.tensor([target])
        library = WarmStartLibrary(tested, tokenizer, slots=64, full=False)
        library.add([pair.source.prompt])
        expected = logits_of(tested, ids)[:, 0]
        for gate, found, strategy in ((OPEN, wrong, "slots"), (None, cold, "cold")):
            cache = WarmStartCache(tested, library, strategy="slots", gate=gate)
            found.append(divergence(expected, logits_of(tested, ids, cache)[:, 0]))
            assert cache.report().strategies == (strategy,)
    assert sum(wrong) / 4 > 0.5, wrong
    assert max(cold) < 1e-6


def test_the_source_without_the_turn_is_far_off() -> None:
    tested, tokenizer = trained()
    _, target, expected = _passages()[0]
    library = WarmStartLibrary(tested, tokenizer, slots=64, full=False)
    library.add([_passages()[0][0]])
    slots = library.slots_of(library.ids()[0])
    assert isinstance(slots, Slots)
    found = []
    with said():
        for moved in (slots.shifted(7, rotation_of(tested.config).layers), slots):
            cache = WarmStartCache(tested, library)
            cache.start_from(moved, len(target) - 1)
            found.append(divergence(expected, forced(tested, torch.tensor([target[-1:]]), cache)[:, 0]))
    assert found[1] > 5 * found[0], found

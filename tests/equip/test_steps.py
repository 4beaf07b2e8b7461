"""What a decode step gives the model: the slots themselves where its own attention can read them; and what a pass leaves behind."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from hf_kvcaches import compat
from hf_kvcaches.equip.layer import EquipLayer
from hf_kvcaches.equip.slots import SlotTable
from tests.conformance import models
from tests.conformance.driving import feed, left_padded
from tests.equip.cases import BUDGET, both_positions, build, build_reference, same, state, steps, text


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What layers have handed out as keys."""
    monkeypatch.setattr(compat, "compiles", lambda device: False)  # as where nobody has compiled anything
    keys, update = list[Any](), EquipLayer.update

    def spy(layer: EquipLayer, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        states = update(layer, *args, **kwargs)
        keys.append(states[0])
        return states

    monkeypatch.setattr(EquipLayer, "update", spy)
    return keys


@pytest.mark.parametrize(("policy", "positions"), [("streaming", "compact"), ("streaming", "original"), ("keydiff", "original")])
@pytest.mark.parametrize("masked", [False, True])
def test_a_plain_step_is_the_models_own_attention_over_the_slots(handed: list[Any], policy: str, positions: str, masked: bool) -> None:
    model, ids = models.tiny("llama"), text(50)
    cache = build(model, policy, positions=positions)
    logits = feed(model, cache, ids, steps(30, 50), torch.ones_like(ids) if masked else None)
    assert all(type(keys) is torch.Tensor for keys in handed[2:]), "a mask that hides nothing is none"
    assert {tuple(keys.shape) for keys in handed[2:]} == {(1, 2, BUDGET, 16)}
    expected = feed(model, build_reference(model, policy, positions=positions), ids, steps(30, 50))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@both_positions
@pytest.mark.parametrize("lengths", [(30, 22), (30, 10, 22)], ids=["full", "filling up"])
def test_padding_is_read_when_its_tokens_come_and_not_attended_later(positions: str, lengths: tuple[int, ...]) -> None:
    model, (ids, mask) = models.tiny("llama"), left_padded([text(length, 5 * length) for length in lengths])
    more = text(20, 60).expand(len(lengths), -1)
    mask = torch.cat([mask, torch.ones_like(more)], 1)
    found = feed(model, build(model, "streaming", positions=positions), torch.cat([ids, more], 1), steps(30, 50), mask)
    for row, length in enumerate(lengths):
        alone = torch.cat([ids[row : row + 1, 30 - length :], more[:1]], 1)
        expected = feed(model, build(model, "streaming", positions=positions), alone, steps(length, length + 20))
        torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=1e-4)


@both_positions
def test_what_a_step_hands_out_outlives_the_layer_being_offloaded(
    handed: list[Any], monkeypatch: pytest.MonkeyPatch, positions: str
) -> None:
    model, ids = models.tiny("llama"), text(40)
    expected = feed(model, build(model, "streaming", positions=positions), ids, steps(30, 40))
    offload, away = EquipLayer.offload, list[EquipLayer]()

    def spy(layer: EquipLayer) -> None:
        read = [handed[-1].clone()] if type(handed[-1]) is torch.Tensor else []
        offload(layer)
        away.append(layer)
        assert all(torch.equal(handed[-1], before) for before in read)

    monkeypatch.setattr(EquipLayer, "offload", spy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", MagicMock())
    monkeypatch.setattr(torch, "Stream", MagicMock())
    cache = build(model, "streaming", positions=positions, offloading=True)
    torch.testing.assert_close(feed(model, cache, ids, steps(30, 40)), expected)
    assert away == cache.layers * 11, "each layer once a pass"


def test_copies_that_are_made_after_an_interrupt_are_without_the_models_weights() -> None:
    model, copied = models.build("llama"), dict[int, Any]()
    cache = build(model, "keydiff")
    feed(model, cache, text(30), [30])
    attention = model.model.layers[1].self_attn
    interrupt = attention.q_proj.register_forward_pre_hook(MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        feed(model, cache, text(1))
    interrupt.remove()
    copy.deepcopy(cache, copied)
    assert id(attention) not in copied
    assert b"q_proj" not in pickle.dumps(cache)


@both_positions
@pytest.mark.parametrize("call", ["append", "advance"])
def test_an_interrupt_while_the_first_layer_takes_a_block_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, call: str, positions: str
) -> None:
    model = models.tiny("llama")
    cache, other = (build(model, "h2o", positions=positions) for _ in range(2))
    for each in (cache, other):
        feed(model, each, text(30), [30])
    before, function = state(cache), getattr(SlotTable, call)

    def interrupted(*args: Any) -> None:
        function(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(SlotTable, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        feed(model, cache, text(5, 40), [5])
    monkeypatch.undo()
    assert same(state(cache), before)
    assert torch.equal(feed(model, cache, text(8, 40), [5, 1, 1, 1]), feed(model, other, text(8, 40), [5, 1, 1, 1]))

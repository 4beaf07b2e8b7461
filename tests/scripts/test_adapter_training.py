"""Adapters for summaries: samples of prompts, the closed form, and a training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.warmstart.paper.adapters import Adapters
from hf_kvcaches.warmstart.paper.compressor import SlotCompressor
from hf_kvcaches.warmstart.paper.slots import LayerSlots
from tests import tiny
from tests.scripts.running import import_script
from tests.warmstart.paper.prompts import Prompt, attend, geometries, read, whole

training = import_script("_adapter_training")
Sample = tuple[Any, ...]


def samples(count: int, slots: int = 8, length: int = 60) -> tuple[list[Sample], list[Prompt], list]:
    model = tiny.llama()
    where = geometries(model)
    prompts = [read(model, tiny.ids(length + seed % 7, seed=seed)) for seed in range(count)]
    compressor = SlotCompressor(slots)
    return [training.sample_of(compressor, each.keys, each.values, each.query, where, tail=2) for each in prompts], prompts, where


def fit_adapters(made: list[Sample], steps: int, **options) -> Adapters:
    return training.train_adapters(made, steps=steps, **options)


def test_a_sample_s_output_is_that_of_the_whole_prompt_and_its_attention_that_over_slots_and_tail() -> None:
    (sample,), (prompt,), where = samples(1)
    plain = training.identity_adapters(sample)
    slots = SlotCompressor(8).compress(*prompt.before(2))
    for layer, own in enumerate(sample):
        query = prompt.query[layer]
        everything = whole(prompt._replace(length=prompt.length + 1), layer)
        torch.testing.assert_close(own.output.flatten(0, 1).double(), attend(everything, query), atol=1e-5, rtol=1e-4)
        short = slots.layers[layer]
        tail = LayerSlots(*(part[:, -2:] for part in everything))
        both = LayerSlots(*(torch.cat([a, b], 1) for a, b in zip(short, tail, strict=True)))
        from_slots, live = own.attend(plain.keys[layer], plain.values[layer])
        torch.testing.assert_close((from_slots + live).flatten(0, 1).double(), attend(both, query), atol=1e-5, rtol=1e-4)
    assert where[0].kind == "rope"


def test_adapters_of_values_in_closed_form_are_where_the_error_has_its_least() -> None:
    made, _, _ = samples(20)
    gamma = 1e-2
    fitted = training.fit_values(made, gamma)
    for layer in range(4):
        own = [each[layer] for each in made]
        plain = training.identity_adapters(made[0])
        value_map = fitted.values[layer].double().requires_grad_()
        given = [each.attend(plain.keys[layer], plain.values[layer])[0] for each in own]
        scale = sum(each.double().square().sum((1, 2)) for each in given) / value_map.shape[-1]
        loss = sum(
            (part.double() @ value_map + each.attend(plain.keys[layer], plain.values[layer])[1] - each.output).square().sum()
            for each, part in zip(own, given, strict=True)
        )
        pull = (value_map - torch.eye(value_map.shape[-1])).square().sum((1, 2))
        (gradient,) = torch.autograd.grad(loss + gamma * (scale * pull).sum(), value_map)
        assert float(gradient.abs().max()) < 1e-3 * float(scale.max())
    assert training.loss_of(fitted, made) < training.loss_of(training.identity_adapters(made[0]), made)


def test_trained_adapters_bring_outputs_closer_also_of_prompts_that_were_not_seen() -> None:
    made, _, _ = samples(40)
    trained = fit_adapters(made[:32], 60, lr=3e-3)
    plain = training.identity_adapters(made[0])
    assert training.loss_of(trained, made[:32]) < 0.9 * training.loss_of(plain, made[:32])
    assert training.loss_of(trained, made[32:]) < training.loss_of(plain, made[32:])


def test_a_strong_weight_holds_trained_adapters_at_the_identity() -> None:
    made, _, _ = samples(8)
    plain = training.identity_adapters(made[0]).tensors()
    moved = []
    for weight in (0.0, 1e3):
        trained = fit_adapters(made, 40, lr=1e-2, weight=weight).tensors()
        moved.append(max(float((each - plain[name]).abs().max()) for name, each in trained.items()))
    assert moved[1] < 0.05 < moved[0]


def test_a_training_depends_on_its_seed_alone() -> None:
    made, _, _ = samples(12)
    one, same, other = (fit_adapters(made, 8, seed=seed, batch=4).tensors() for seed in (2, 2, 3))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_adapters_before_a_shift_and_behind_it_give_the_same() -> None:
    made, prompts, where = samples(6)
    adapters = fit_adapters(made, 10, lr=1e-2)
    slots = SlotCompressor(8).compress(*prompts[0].before(2))
    one, other = adapters.apply(slots, where).shifted(23, where), adapters.apply(slots.shifted(23, where), where)
    for mine, theirs, plain in zip(one.layers, other.layers, slots.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(mine.values, plain.values)


def test_a_compressor_s_adapters_do_what_they_learned_to() -> None:
    made, prompts, where = samples(6)
    adapters = fit_adapters(made, 10, lr=1e-2)
    slots = adapters.apply(SlotCompressor(8).compress(*prompts[0].before(2)), where)
    sample = made[0][1]
    from_slots, live = sample.attend(adapters.keys[1], adapters.values[1])
    own = slots.layers[1]
    tail = LayerSlots(*(part[:, -2:] for part in whole(prompts[0]._replace(length=prompts[0].length + 1), 1)))
    both = LayerSlots(*(torch.cat([a, b], 1) for a, b in zip(own, tail, strict=True)))
    torch.testing.assert_close((from_slots + live).flatten(0, 1).double(), attend(both, prompts[0].query[1]), atol=1e-5, rtol=1e-4)


def test_a_training_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="samples"):
        training.train_adapters([], steps=1)

"""Decode steps under `torch.compile(fullgraph=True)`: the same as uncompiled ones, and compiled once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Cache, CompileConfig, PreTrainedModel

from hf_kvcaches import AdaptiveSubspace, SubspaceCache
from hf_kvcaches.core.view import disable, enable
from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.equip.calibrated import KeepProbe, LayerProbe
from tests.conformance import models
from tests.conformance.driving import feed, generate, left_padded, tokens
from tests.equip.cases import POSITIONS

# The conformance matrix compiles a cache in the fast tier, and the others in the full one.
pytestmark = pytest.mark.full

BUDGET, SINKS = 12, 2
MORE = 3 * BUDGET + 5
POLICIES = {
    "streaming": "streaming",
    "h2o": "h2o",
    "tova": "tova",
    "probe": KeepProbe({index: LayerProbe(torch.randn(2, 32), torch.zeros(2)) for index in range(2)}, 0),
}
WAYS: list[dict[str, Any]] = [
    *({"policy": policy, "positions": positions} for policy in POLICIES for positions in POSITIONS),
    {"recent": 3},
    {"policy": "h2o", "head_budgets": "global"},
    *({"policy": "probe", "head_budgets": shared} for shared in ("layer", None, {"0": [0.5, 1.2], "1": [1.5, 0.8]})),
]


def build(**changes: Any) -> PreTrainedModel:
    return models.build("llama", **changes)


def make(model: PreTrainedModel, **options: Any) -> EquipCache:
    policy = POLICIES[options.pop("policy", "streaming")]
    return EquipCache(model, policy, **{"budget": BUDGET, "sinks": SINKS, **options})


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build()


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    """The same model, never compiled."""
    return build()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch.compile(torch.neg, backend="eager")(torch.zeros(1))  # on a CPU caches prepare for graphs once something was compiled
    counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    """How many graphs were compiled so far."""
    return int(counters["stats"]["unique_graphs"])


@contextmanager
def compiled(model: PreTrainedModel, backend: str = "eager") -> Iterator[None]:
    own = model.__dict__.get("forward")
    assert own is None
    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    try:
        yield
    finally:
        del model.forward


@contextmanager
def enabled(model: PreTrainedModel) -> Iterator[None]:
    enable(model)
    try:
        yield
    finally:
        disable(model)


@pytest.mark.parametrize("prompt", [5, 20])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_compiled_steps_equal_uncompiled_ones_and_are_compiled_once(model: Any, plain: Any, options: Any, prompt: int) -> None:
    text, spans = tokens(prompt + MORE, seed=1), [prompt] + [1] * MORE
    one, other = make(model, **options), make(plain, **options)
    expected = feed(plain, other, text, spans)
    actual = [feed(model, one, text[:, :prompt], [prompt])]
    with compiled(model):
        actual.append(feed(model, one, text[:, prompt : prompt + 1]))
        with torch._dynamo.config.patch(error_on_recompile=True):
            actual.append(feed(model, one, text[:, prompt + 1 :]))
    torch.testing.assert_close(torch.cat(actual, 1), expected, atol=1e-4, rtol=0)
    assert graphs() == 1
    for layer in range(2):
        assert torch.equal(one.kept_positions(layer), other.kept_positions(layer))


def test_inductor_gives_the_same(model: Any, plain: Any) -> None:
    text, spans = tokens(8 + MORE, seed=2), [8] + [1] * MORE
    expected = feed(plain, make(plain), text, spans)
    cache = make(model)
    actual = [feed(model, cache, text[:, :8], [8])]
    with compiled(model, "inductor"):
        actual.append(feed(model, cache, text[:, 8:]))
    torch.testing.assert_close(torch.cat(actual, 1), expected, atol=1e-4, rtol=0)
    assert graphs() == 1


def test_a_budget_that_is_far_from_filled_needs_one_graph(model: Any, plain: Any) -> None:
    text, spans = tokens(260, seed=3), [5] + [1] * 255
    one, other = make(model, budget=80), make(plain, budget=80)
    expected = feed(plain, other, text, spans)
    actual = [feed(model, one, text[:, :5], [5])]
    with compiled(model):
        actual.append(feed(model, one, text[:, 5:]))
    torch.testing.assert_close(torch.cat(actual, 1), expected, atol=1e-4, rtol=0)
    assert graphs() == 1


def test_switching_between_compiled_and_uncompiled_steps_changes_nothing(model: Any, plain: Any) -> None:
    one, other = make(model), make(plain)
    text = tokens(100, seed=4)
    spans = [4, 6, 3, 1, 1, 20, 1, 15, 7, 5, 22, 1, 6]
    start = 0
    for index, span in enumerate([*spans, 100 - sum(spans)]):
        part = text[:, start : start + span]
        # Every third span is a block.
        how = [span] if index % 3 == 0 else [1] * span
        expected = feed(plain, other, part, how)
        if index % 3 == 1:
            with compiled(model):
                actual = feed(model, one, part, how)
        else:
            actual = feed(model, one, part, how)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
        assert torch.equal(one.kept_positions(0), other.kept_positions(0))
        start += span


@pytest.mark.parametrize("lengths", [(20, 30), (5, 9), (3, 30)], ids=["full", "filling", "one_full"])
def test_left_padded_rows_go_on_compiled(model: Any, plain: Any, lengths: tuple[int, int]) -> None:
    ids, mask = left_padded([tokens(length, seed=length) for length in lengths])
    text = torch.cat([ids, tokens(MORE, seed=5, rows=2)], 1)
    # A mask of full length from the beginning, whose shape says nothing about the tokens seen.
    seen = torch.cat([mask, torch.ones(2, MORE, dtype=mask.dtype)], 1)
    places, width = (seen.cumsum(-1) - 1).clamp(min=0), ids.shape[1]
    one, other = make(model), make(plain)
    expected = feed(plain, other, text, [width] + [1] * MORE, mask=seen)
    feed(model, one, ids, [width], mask=mask)
    actual = []
    with enabled(model), compiled(model), torch.no_grad():
        for index in range(width, width + MORE):
            arguments = {"attention_mask": seen, "position_ids": places[:, index : index + 1].contiguous()}
            actual.append(model(input_ids=text[:, index : index + 1].contiguous(), past_key_values=one, use_cache=True, **arguments).logits)
    torch.testing.assert_close(torch.cat(actual, 1), expected[:, 1:], atol=1e-4, rtol=0)
    assert graphs() == 1
    assert torch.equal(one.kept_positions(0), other.kept_positions(0))


@pytest.mark.parametrize("lengths", [(20, 30), (5, 12)], ids=["full", "filling"])
@pytest.mark.parametrize("policy", ["streaming", "h2o", "probe"])
def test_generate_compiles_steps_by_itself_once(model: Any, plain: Any, policy: str, lengths: tuple[int, int]) -> None:
    ids, mask = left_padded([tokens(length, seed=length) for length in lengths])
    expected = generate(plain, ids, make(plain, policy=policy), new=30, mask=mask)
    settings = CompileConfig(fullgraph=True, backend="eager", mode=None)  # type: ignore[arg-type]
    settings._compile_all_devices = True
    for _ in range(2):
        output = generate(model, ids, make(model, policy=policy), new=30, mask=mask, compile_config=settings)
        assert torch.equal(output.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(output.logits), torch.stack(expected.logits), atol=1e-4, rtol=0)
        assert graphs() == 1


def test_inference_mode_may_end_between_prompt_and_steps(model: Any, plain: Any) -> None:
    text = tokens(40, seed=6)
    one, other = make(model), make(plain)
    expected = feed(plain, other, text, [15] + [1] * 25)
    with torch.inference_mode():
        feed(model, one, text[:, :15], [15])
    with compiled(model):
        actual = feed(model, one, text[:, 15:])
    torch.testing.assert_close(actual, expected[:, 1:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("lengths", [(20, 20), (4, 20)], ids=["ring", "rows_differ"])
def test_what_happens_to_rows_between_compiled_steps_is_followed(model: Any, plain: Any, tmp_path: Path, lengths: tuple[int, int]) -> None:
    changes: list[Callable[[EquipCache], EquipCache | None]] = [
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),  # type: ignore[arg-type]
        copy.deepcopy,
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.batch_repeat_interleave(3),
        lambda cache: _stored(cache, tmp_path / "cache.safetensors"),
    ]
    ids, mask = left_padded([tokens(length, seed=length) for length in lengths])
    one, other = make(model), make(plain)
    feed(model, one, ids, [20], mask=mask)
    feed(plain, other, ids, [20], mask=mask)
    rows, places = torch.tensor([0, 1]), mask.sum(-1, keepdim=True)
    for index, change in enumerate(changes):
        text = tokens(5, seed=index, rows=len(rows))
        arguments = [{"position_ids": places[rows] + step} for step in range(5)]
        expected = [_step(plain, other, text[:, step], **arguments[step]) for step in range(5)]
        with compiled(model):
            actual = [_step(model, one, text[:, step], **arguments[step]) for step in range(5)]
        torch.testing.assert_close(torch.cat(actual, 1), torch.cat(expected, 1), atol=1e-4, rtol=0)
        places = places + 5
        rows = {0: rows.flip(0), 2: rows[1:], 3: rows.repeat(3)}.get(index, rows)
        one, other = change(one) or one, change(other) or other
        assert torch.equal(one.kept_positions(0), other.kept_positions(0))


def _step(model: Any, cache: Any, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids[:, None].contiguous(), past_key_values=cache, use_cache=True, **arguments).logits
    return logits


def _stored(cache: EquipCache, path: Path) -> EquipCache:
    cache.save(path)
    return EquipCache.load(path, cache.model)


def test_a_compiled_call_refuses_padding_and_blocks(model: Any) -> None:
    cache = make(model)
    ids, mask = left_padded([tokens(5, seed=8), tokens(9, seed=9)])
    with compiled(model):
        with pytest.raises(Exception, match="single tokens behind an uncompiled prompt"):
            feed(model, cache, ids, [9], mask=mask)
        cache.reset()
        with pytest.raises(Exception, match="single tokens behind an uncompiled prompt"):
            feed(model, cache, tokens(1), [1])
    cache.reset()
    feed(model, cache, ids, [9], mask=mask)
    with compiled(model), pytest.raises(RuntimeError, match="padding among the new tokens"):
        feed(model, cache, tokens(1, rows=2), mask=torch.cat([mask, torch.tensor([[0], [1]])], 1))


def test_the_flag_says_no_where_steps_cannot_be_compiled(model: Any) -> None:
    for options in WAYS:
        assert make(model, **options).is_compileable
    assert EquipCache(model, "streaming", 0.5).is_compileable
    for policy in ("keydiff", "kvzip", "snapkv", "future"):  # they score anew now and then, or wait
        assert not EquipCache(model, policy, 100).is_compileable
    for options in ({"page_size": 4}, {"storage": "int8"}, {"decode_budget": 20}, {"question_start": -2}):
        assert not make(model, **options).is_compileable
    assert not make(models.tiny("gemma2")).is_compileable  # sliding layers of transformers
    recording = make(model)
    recording.activate_past_recording()
    assert not recording.is_compileable


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_compiled_steps_go_on_behind_evicted_tokens(model: Any, plain: Any, options: Any) -> None:
    one, other = make(model, **options), make(plain, **options)
    for own, cache in ((model, one), (plain, other)):
        feed(own, cache, tokens(20, seed=1), [20])
        kept = cache.kept_positions(0)[0, 0].tolist()
        cache.evict([kept[5], kept[6], kept[7]])
    more = tokens(30, seed=2)
    expected = feed(plain, other, more)
    with compiled(model):
        torch.testing.assert_close(feed(model, one, more), expected, atol=1e-4, rtol=0)
    assert torch.equal(one.kept_positions(0), other.kept_positions(0))


def test_where_the_flag_says_no_a_graph_is_refused_with_the_reason(model: Any) -> None:
    cache = EquipCache(model, "keydiff", BUDGET)
    feed(model, cache, tokens(9, seed=9), [9])
    with compiled(model), pytest.raises(Exception, match="is_compileable"):
        feed(model, cache, tokens(1, seed=9))


@pytest.mark.parametrize("kind", ["streaming", "keydiff", "adaptive"])
@torch.no_grad()
def test_prompts_and_caches_that_are_not_compileable_run_uncompiled_within_a_compiled_model(kind: str, plain: PreTrainedModel) -> None:
    def make(model: PreTrainedModel) -> Cache:
        if kind != "adaptive":
            return EquipCache(model, kind, BUDGET, sinks=SINKS)
        return SubspaceCache(model, adaptive=AdaptiveSubspace(rank=(3, 4), warmup=16, chunk=16), sinks=1, recent=4)

    compiled_model, text = build(), tokens(40, seed=1)
    compiled_model.forward = torch.compile(compiled_model.forward, backend="eager")
    held, expected = make(compiled_model), make(plain)
    after_two_steps = 0
    for index, chunk in enumerate([text[:, :20], *text[:, 20:].split(1, 1)]):
        logits = compiled_model(chunk, past_key_values=held).logits
        torch.testing.assert_close(logits, plain(chunk, past_key_values=expected).logits, rtol=0, atol=1e-4)
        after_two_steps = graphs() if index == 2 else after_two_steps
    assert 0 < graphs() <= after_two_steps + 2


def test_a_text_outgrows_the_window_between_compiled_steps() -> None:
    window, (one, other) = 40, (build(max_position_embeddings=40) for _ in range(2))
    text = tokens(60, seed=1)
    plain = make(one, policy="h2o")
    expected = feed(one, plain, text, [20] + [1] * 40)
    cache = make(other, policy="h2o")
    actual = [feed(other, cache, text[:, :20], [20])]
    with compiled(other):
        for step in range(20, 60):
            assert cache.get_seq_length() == step  # as `generate` asks before each step
            actual.append(feed(other, cache, text[:, step : step + 1]))
    torch.testing.assert_close(torch.cat(actual, 1), expected, atol=1e-4, rtol=0)
    assert cache.seen > window
    assert all(layer.rotation.unrotated for layer in cache.layers)
    assert graphs() == 2, "with original positions, and with compact ones"


def test_compiled_steps_that_nobody_asks_between_end_at_the_window() -> None:
    model = build(max_position_embeddings=40)
    cache, text = make(model, policy="h2o"), tokens(60, seed=1)
    feed(model, cache, text[:, :20], [20])
    with compiled(model):
        for step in range(20, 40):
            model(input_ids=text[:, step : step + 1], past_key_values=cache)
        with pytest.raises(RuntimeError, match="outgrows the model's window"):
            model(input_ids=text[:, 40:41], past_key_values=cache)


def test_a_short_prompt_has_its_whole_budget_in_compiled_steps(model: Any) -> None:
    cache = make(model, policy="h2o", budget=150)
    feed(model, cache, tokens(30, seed=1), [30])
    with compiled(model):
        feed(model, cache, tokens(90, seed=2))
        feed(model, cache, tokens(70, seed=3))
    assert cache.report().kept == (150, 150)

"""What `SubspaceCache.diagnostics` says equals plain computations head by head, and no error is above its bound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_kvcaches import AdaptiveSubspace, KVCodec, SubspaceCache
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.subspace.coded import CodedLayer
from hf_kvcaches.subspace.diagnostics import LayerDiagnostics, SubspaceDiagnostics
from tests import testbed, tiny
from tests.subspace.test_cache import pair, run

MODES = ("codec", "both", "rank")
FOLLOW: dict[str, Any] = {"chunk": 32, "agreement": 0.0}


def made(mode: str, rotation: str = "aware", **options: Any) -> tuple[Any, SubspaceCache]:
    """A grouped model and a cache, with bases that stay, or that follow the text."""
    model, codec = pair(rotation)
    window = {"sinks": 2, "recent": 5} | options
    if mode == "rank":
        adaptive = AdaptiveSubspace(rank=(3, 4), warmup=16, widths=4, rotation=rotation, **FOLLOW)
        return model, SubspaceCache(model, adaptive=adaptive, **window)
    return model, SubspaceCache(model, codec, adaptive=AdaptiveSubspace(**FOLLOW) if mode == "both" else None, **window)


def last_queries(model: Any, text: torch.Tensor) -> list[torch.Tensor]:
    """The last query of each layer, (batch, heads, d), as the model rotates it."""
    found: list[torch.Tensor] = []
    hooks = []
    for layer in model.model.layers:
        attention = layer.self_attn

        def keep(module: Any, args: Any, kwargs: Any, size: int = attention.head_dim) -> None:
            hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
            query = module.q_proj(hidden).unflatten(-1, (-1, size))[:, -1]
            first, second = query.chunk(2, -1)
            found.append(query * cos[:, -1, None] + torch.cat([-second, first], -1) * sin[:, -1, None])

        hooks.append(attention.register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad():
        model(text)
    for hook in hooks:
        hook.remove()
    return found


def same(found: LayerDiagnostics, name: str, row: int, head: int, expected: float) -> None:
    assert float(getattr(found, name)[row, head]) == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def compare(
    layer: Any, held: Any, found: LayerDiagnostics, query: torch.Tensor | None = None, scaling: float = 1.0, softcap: float | None = None
) -> None:
    """Asserts that the numbers of a layer are those of plain loops over rows and heads.

    Args:
        layer: Of a cache that was fed in like that of the diagnostics.
        held: What a `DynamicCache` has.
        query: (batch, heads, d), or None to leave out what hangs on it.
    """
    coded = slice(2, 2 + layer.coded)
    assert found.tokens == layer.coded
    near = [each.double() for each in layer.decoded()]
    exact = [each[:, :, coded].double() for each in (held.keys, held.values)]
    rows, heads = exact[0].shape[:2]
    for row in range(rows):
        for head in range(heads):
            for side, true, guess in zip(("key", "value"), exact, near, strict=True):
                left = (true - guess)[row, head]
                lengths = float(left.square().sum()), float(true[row, head].square().sum())
                same(found, f"{side}_residual", row, head, math.sqrt(lengths[0] / lengths[1]))
                same(found, f"{side}_operator_norm", row, head, float(torch.linalg.svdvals(left)[0]))
                bases = getattr(found, f"{side}_bases")
                if hasattr(layer, f"{side}_basis_of"):
                    same(found, f"{side}_bases", row, head, 1 + int(getattr(layer, f"{side}_basis_of")[row, head].max()))
                else:
                    assert bases is None
        for head in range(0 if query is None else query.shape[1]):
            place = head * heads // query.shape[1]
            true, guess = (scaling * each[row, place] @ query[row, head].double() for each in (exact[0], near[0]))
            if softcap is not None:
                true, guess = (softcap * (each / softcap).tanh() for each in (true, guess))
            lost = true.softmax(0) @ exact[1][row, place] - guess.softmax(0) @ near[1][row, place]
            same(found, "logit_error", row, head, float((true - guess).abs().max()))
            same(found, "output_error", row, head, float(lost.norm()))
            largest = float((exact[0] - near[0])[row, place].norm(dim=-1).max() * query[row, head].norm())
            same(found, "logit_bound", row, head, scaling * largest)


@pytest.mark.parametrize("rotation", ["aware", "post"])
@pytest.mark.parametrize("mode", MODES)
def test_each_number_is_that_of_plain_loops(mode: str, rotation: str) -> None:
    (model, cache), text = made(mode, rotation), tiny.ids(2, 110)
    full = DynamicCache(config=model.config)
    run(tiny.llama(), full, text, [110])
    found = cache.diagnostics(text)
    run(model, cache, text, [110])
    queries = last_queries(tiny.llama(), text)
    for layer, held, numbers, query in zip(cache.layers, full.layers, found.layers, queries, strict=True):
        assert isinstance(numbers, LayerDiagnostics)
        # Errors in the layers before are not those of this one: its keys and values are those of a prompt, which are exact.
        compare(layer, held, numbers, query, model.config.head_dim**-0.5)
    assert mode == "codec" or max(int(layer.key_bases.max()) for layer in found.layers) > 1


def test_soft_caps_are_applied_and_layers_with_windows_are_left_out() -> None:
    model, text = tiny.gemma2(), tiny.ids(2, 90)
    codec = KVCodec.calibrate(tiny.gemma2(), None, [tiny.ids(1, 96)[0].tolist()], 0.2, progress=False)
    cache, full = SubspaceCache(model, codec, sinks=2, recent=5), DynamicCache()
    run(tiny.gemma2(), full, text, [90])
    found = cache.diagnostics(text).layers
    run(model, cache, text, [90])
    assert [numbers is not None for numbers in found] == [isinstance(layer, CodedLayer) for layer in cache.layers]
    assert None in found
    for layer, held, numbers in zip(cache.layers, full.layers, found, strict=True):
        if numbers is not None:
            compare(layer, held, numbers)
            assert float(numbers.logit_error.max()) < 10  # between the cap and its negative
            bounded(numbers)


def bounded(numbers: LayerDiagnostics) -> None:
    """No error is above its bound."""
    for name in ("logit", "output"):
        error, bound = getattr(numbers, f"{name}_error"), getattr(numbers, f"{name}_bound")
        assert bool((error <= bound * (1 + 1e-9) + 1e-9).all())


@given(
    mode=st.sampled_from(MODES),
    rotation=st.sampled_from(["aware", "post"]),
    rows=st.integers(1, 3),
    tokens=st.integers(1, 150),
    seed=st.integers(0, 1000),
    sinks=st.integers(0, 5),
    recent=st.integers(0, 20),
)
def test_no_error_is_above_its_bound(mode: str, rotation: str, rows: int, tokens: int, seed: int, sinks: int, recent: int) -> None:
    _, cache = made(mode, rotation, sinks=sinks, recent=recent)
    for layer in cache.diagnostics(tiny.ids(rows, tokens, seed=seed)).layers:
        assert layer is not None
        bounded(layer)
        numbers = [each for each in vars(layer).values() if isinstance(each, torch.Tensor)]
        assert all(bool(each.isfinite().all()) for each in numbers)
        assert {each.shape for each in numbers} <= {(rows, 2), (rows, 4)}


@pytest.mark.parametrize("mode", MODES)
def test_the_cache_and_the_model_are_as_before(mode: str) -> None:
    (model, cache), text = made(mode), tiny.ids(2, 90)
    model.train()
    run(model, cache, text, [60])
    before = {name: tensor.clone() for name, tensor in cache.owned_tensors().items()}
    found = [cache.diagnostics(text), cache.diagnostics(text)]
    assert str(found[0]) == str(found[1])
    assert model.training
    assert all(each.grad is None for each in model.parameters())
    assert cache.get_seq_length() == 60
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.owned_tensors().items())


@pytest.mark.parametrize("mode", MODES)
def test_of_a_text_that_stays_exact_nothing_is_lost(mode: str) -> None:
    _, cache = made(mode)
    for layer in cache.diagnostics(tiny.ids(2, 6)).layers:
        assert layer is not None
        assert layer.tokens == 0
        for name, number in vars(layer).items():
            assert name == "tokens" or number is None or not number.any()


@pytest.mark.parametrize("wrong", ["text", [[1, 2]], torch.ones(5, dtype=torch.long), torch.ones(1, 0, dtype=torch.long)])
def test_what_is_no_batch_of_token_ids_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="input_ids: expected token ids"):
        made("codec")[1].diagnostics(wrong)


def test_the_table_has_a_line_for_each_layer_with_codes() -> None:
    for mode, bases in (("codec", False), ("rank", True)):
        _, cache = made(mode)
        found = cache.diagnostics(tiny.ids(2, 60))
        lines = str(found).splitlines()
        assert len(lines) == 2 + 4
        assert len({len(line) for line in lines[1:]}) == 1
        assert ("key bases" in lines[1]) == bases
        assert "output bound" in lines[1]
    assert str(SubspaceDiagnostics((None,))).count("\n") == 1


@pytest.mark.full
def test_no_error_on_prose_is_above_its_bound() -> None:
    model, tokenizer = testbed.load()
    ids = torch.tensor([tokenizer(testbed.held_out()[:8000]).input_ids[:420]])
    cache = SubspaceCache(model, adaptive=AdaptiveSubspace(rank=(16, 24), widths=4, warmup=128, chunk=64), sinks=2, recent=8)
    for layer in cache.diagnostics(ids).layers:
        assert layer is not None
        bounded(layer)
        assert float(layer.key_residual.max()) < 1
        assert float(layer.value_residual.max()) < 1

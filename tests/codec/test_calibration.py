"""Calibration against references that hold all keys, values and gradients."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BloomConfig, DynamicCache, GraniteConfig, LlamaForCausalLM, MistralConfig, T5Config, T5ForConditionalGeneration

from hf_kvcaches import ConfigError, KVCodec, RotaryGeometry, UnsupportedError, enable
from hf_kvcaches.codec import calibrate as calibration
from hf_kvcaches.codec.calibrate import ending_of, gradient_of_drawn, read_batch
from hf_kvcaches.codec.meter import MeterCache, Reading, before_rotation
from hf_kvcaches.codec.moments import LayerStatistics, LayerSums, Moments
from hf_kvcaches.evaluate.texts import batches_of, blocks_of
from hf_kvcaches.kernels.code_format import TILE, WIDTHS
from tests import testbed, tiny
from tests.codec.measured import IDS, TEXTS, by_head, calibrate, coded, gathered, held, measured, moment, rotated, same_energies
from tests.conformance import models
from tests.reference.codec import integers_of, joined, vectors_of

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64, "partial_rotary_factor": 1.0}


def test_moments_sum_over_batches_and_blocks() -> None:
    rows, moments = torch.randn(2, 3, 3000, 5, dtype=torch.float64), Moments((3,), 5)
    assert (moments.mean == 0).all()
    for block in rows.split(1400, -2):
        moments.add(block)
    assert int(moments.count) == 6000
    assert torch.allclose(moments.mean, moment(rows))


def test_moments_of_half_types_without_leading_dimensions_are_float64() -> None:
    rows, moments = torch.randn(70, 4).to(torch.bfloat16), Moments((), 4)
    moments.add(rows)
    torch.testing.assert_close(moments.mean, moment(rows.double()[None, None])[0])


@pytest.mark.parametrize("rotation", ["aware", "post"])
def test_means_and_covariances_are_those_of_all_tokens_that_are_not_kept_exactly(rotation: str) -> None:
    model = tiny.llama()
    for layer, sums in measured(model, rotation=rotation).sums.items():
        _, key, after, values = held(model, layer)
        rows = [coded(states) for states in (key if rotation == "aware" else after, values)]
        joined = torch.cat([states.transpose(1, 2).flatten(2) for states in rows], -1).flatten(0, 1)
        assert torch.allclose(sums.mean[0], joined.mean(0), rtol=1e-4, atol=1e-5)
        apart = joined - joined.mean(0)
        assert torch.allclose(LayerStatistics.of(sums, "loss").covariance[0], apart.T @ apart / len(apart), rtol=1e-4, atol=1e-4)
        assert int(sums.states.count) == 3 * 36
        for found, states in zip(by_head(sums, sums.states.mean), rows, strict=True):
            assert torch.allclose(found, moment(states), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", [lambda: models.build("gpt_neox"), lambda: tiny.llama(rope_parameters=YARN)])
def test_partial_and_scaled_rotations_are_undone_before_the_moments(build: Any) -> None:
    model = build()
    sums = measured(model).sums[1]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=IDS, past_key_values=cache)
    keys = coded(RotaryGeometry.from_config(model.config).unrotate(cache.layers[1].keys, torch.arange(40))).double()
    found, _ = by_head(sums, sums.states.mean)
    assert torch.allclose(found, moment(keys), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, moment(coded(cache.layers[1].keys).double()), rtol=1e-2)


def test_short_sequences_count_their_last_token() -> None:
    assert calibrate(texts=[[5, 6], [7, 8, 9]], metric="plain").settings.tokens == 5
    assert int(measured(tiny.llama(), tiny.ids(1, 3)).sums[0].states.count) == 1


def costs(sums: LayerSums, metric: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The metrics of errors of keys and of values."""
    statistics = LayerStatistics.of(sums, metric)
    return statistics.key_cost, statistics.value_cost


@pytest.mark.parametrize("metric", ["loss", "plain"])
def test_directions_diagonalise_the_covariance_in_the_metric(metric: str) -> None:
    model = tiny.llama()
    codec, cache = calibrate(model, metric=metric), gathered(model, metric)
    for index, basis in codec.packed.bases.items():
        sums, encode = cache.sums[index], basis.transform
        covariance = encode @ LayerStatistics.of(sums, metric).covariance @ encode.mT
        diagonal = covariance.diagonal(dim1=-2, dim2=-1)
        assert float(((covariance - torch.diag_embed(diagonal)) / diagonal.amax(-1)[:, None, None]).abs().max()) < 1e-3
        # An error costs as much as the sum of squares of its coefficients.
        for found, cost in zip(by_head(sums, encode.mT @ encode), costs(sums, metric), strict=True):
            size = cost.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
            assert torch.allclose(found, cost + 0.02 * size * torch.eye(8), atol=1e-3 * float(found.abs().max()))
        assert torch.allclose(basis.deviations.square(), diagonal[0].float(), rtol=1e-2)


@pytest.mark.parametrize("metric", ["loss", "plain"])
def test_codes_that_attention_reads_are_fitted_to_keys_that_are_rotated_within_their_tiles(metric: str) -> None:
    """As if the statistics had been taken of such keys, at each place of a tile alike."""
    model = tiny.llama()
    geometry = RotaryGeometry.from_config(model.config)
    for index, sums in gathered(model, metric).sums.items():
        statistics = LayerStatistics.of(sums, metric)
        found, shape = statistics.within_tiles(geometry, TILE), statistics.shape
        _, keys, _, values = held(model, index)
        turned = torch.cat([geometry.rotate(coded(keys), torch.full((36,), place)) for place in range(TILE)], 2)
        vectors = shape.join(turned, coded(values).repeat(1, 1, TILE, 1), turned.dtype).flatten(0, 2)
        torch.testing.assert_close(found.mean[0], vectors.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.moment[0], vectors.T @ vectors / len(vectors), rtol=1e-4, atol=1e-4)
        keys, turned = (shape.split(own.sample.transpose(0, 1))[0] for own in (statistics, found))
        for place in (0, 5, 17):
            expected = geometry.rotate(keys[None, :, place : place + 1], place % TILE)[0]
            torch.testing.assert_close(turned[:, place : place + 1], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(found.value_cost, statistics.value_cost)
        whole = sum(geometry.rotate(geometry.rotate(statistics.key_cost[None], place).mT, place)[0] for place in range(TILE)) / TILE
        torch.testing.assert_close(found.key_cost, whole)


@pytest.mark.parametrize("width", WIDTHS)
def test_distortions_are_the_squared_errors_of_the_sampled_tokens(width: int) -> None:
    model = tiny.llama()
    codec = calibrate(model, metric="plain")
    for index, layer in codec.slots.layers.items():
        layer = replace(layer, widths=torch.full((layer.shape.size,), width, dtype=torch.uint8))
        _, keys, _, values = held(model, index)
        vectors = joined(layer.shape, coded(keys), coded(values))
        error = vectors - vectors_of(layer, integers_of(layer, vectors))
        found = torch.einsum("gij,bgtj->bgti", layer.transform, error).square().mean((0, 2))
        torch.testing.assert_close(found, layer.distortions[..., 1 + WIDTHS.index(width)].double(), rtol=2e-2, atol=1e-6)


def test_no_other_step_loses_much_less() -> None:
    # In the first layer each token of the vocabulary has one vector.
    model, ids = tiny.llama(num_hidden_layers=2), tiny.ids(24, 132)
    layer = calibrate(model, ids.tolist(), metric="plain").slots.layers[1]
    _, keys, _, values = held(model, 1, ids)
    vectors = joined(layer.shape, coded(keys), coded(values)) - layer.mean.double()[:, None]
    coefficients = torch.einsum("gij,bgtj->gbti", layer.transform, vectors).flatten(1, 2)
    # From 6 bits on steps reach all of the sample, whatever loses least.
    for place, width in enumerate(WIDTHS[:5]):
        top, errors = 2 ** (width - 1) - 0.5, []
        for factor in torch.logspace(-1, 1, 41, base=3.0).tolist():
            step = factor * layer.steps[..., place].double()[:, None]
            levels = ((coefficients / step).floor() + 0.5).clamp(-top, top)
            errors.append((levels * step - coefficients).square().mean(1))
        assert float((errors[20] / torch.stack(errors).amin(0)).max()) < 1.15


def pulls(model: Any, numbers: list[int], ids: torch.Tensor = IDS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each layer the gradients of the loss at keys before rotation and at values, (batch, kv_heads, tokens, d)."""
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        getattr(layer.self_attn, f"{kind}_proj").register_forward_hook(lambda *a, name=f"{kind}{index}": seen.update({name: a[2]}))
        for index, layer in enumerate(model.model.layers)
        for kind in "kv"
    ]
    logits = model(input_ids=ids).logits
    for hook in hooks:
        hook.remove()
    gradients = torch.autograd.grad(logits, list(seen.values()), gradient_of_drawn(logits, lambda part: part, numbers))
    found = {name: each.unflatten(-1, (-1, 8)).transpose(1, 2).double() for name, each in zip(seen, gradients, strict=True)}
    return [(found[f"k{index}"], found[f"v{index}"]) for index in range(len(model.model.layers))]


@pytest.mark.parametrize(("rotation", "rope"), [("aware", None), ("post", None), ("aware", YARN)])
def test_gradients_are_those_at_keys_and_values_of_tokens_that_are_not_kept_exactly(rotation: str, rope: dict | None) -> None:
    model = tiny.llama() if rope is None else tiny.llama(rope_parameters=rope)
    cache = MeterCache(model, Reading(metric="loss", rotation=rotation, recent=0))
    read_batch(model, cache, [3, 4, 5], IDS, ending_of(model))
    for layer, (keys, values) in enumerate(pulls(model, [3, 4, 5])):
        keys = rotated(model, keys) if rotation == "post" else keys
        for found, gradients in zip(costs(cache.sums[layer], "loss"), (keys, values), strict=True):
            expected = moment(coded(gradients))
            assert torch.allclose(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


def test_gradients_of_far_and_of_near_queries_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny.llama(), list[Any]()
    monkeypatch.setattr(LayerSums, "observe_gradients", lambda sums, *sides: seen.append(sides))
    read_batch(model, MeterCache(model, Reading(recent=5)), [3, 4, 5], IDS, ending_of(model))
    for sides, whole in zip(seen, pulls(model, [3, 4, 5]), strict=True):
        for (far, near), expected in zip(sides, whole, strict=True):
            assert torch.allclose((far + near).double(), expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
            assert not far[:, :, -5:].any()
            assert bool(far[:, :, -6].any() and near[:, :, 0].any())


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_gradients_before_a_rotation_are_those_through_it_also_where_it_scales_and_leaves_dimensions_alone(
    layout: Any, rotary_dim: int
) -> None:
    frequencies = 10.0 ** -torch.arange(rotary_dim // 2, dtype=torch.float64)
    geometry = RotaryGeometry(frequencies, 8, layout=layout, attention_scaling=1.5)
    keys, weights = (torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    keys.requires_grad_()
    (geometry.rotate(keys, torch.arange(5)) * weights).sum().backward()
    torch.testing.assert_close(before_rotation(geometry, weights), keys.grad)


def test_drawn_tokens_are_those_the_model_would_go_on_with_and_a_block_draws_the_same_in_any_batch() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -torch.inf]).expand(2, 20_000, 5).clone()
    gradient = gradient_of_drawn(logits, lambda part: part, [7, 8])
    shares = logits[0, 0].softmax(-1)
    # At a drawn token the gradient is its share minus 1, elsewhere the share.
    drawn = (shares - gradient).round()
    assert (drawn.sum(-1) == 1).all()
    assert torch.allclose(drawn.mean((0, 1)), shares, atol=0.01)
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(gradient_of_drawn(logits[1:], lambda part: part, [8]), gradient[1:])


@pytest.mark.parametrize(
    "build",
    [tiny.llama, lambda: tiny.gemma2(final_logit_softcapping=2.0), lambda: tiny.build(GraniteConfig(**tiny._SHAPE, logits_scaling=3.0))],
    ids=["plain", "capped", "scaled"],
)
def test_gradients_from_logits_of_a_few_positions_are_those_from_all_logits(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_LOGITS", 5 * tiny.VOCABULARY * len(IDS))
    model = build()
    ending = ending_of(model)
    with torch.enable_grad():
        states = ending.run(IDS, None)
        logits = ending.head(states)
        (whole,) = torch.autograd.grad(logits, states, gradient_of_drawn(logits, lambda part: part, [0, 1, 2]))
    assert (states.shape[-1] == model.config.hidden_size) == (type(model) is LlamaForCausalLM)
    assert torch.allclose(logits, model(input_ids=IDS).logits, atol=1e-4)
    assert torch.allclose(gradient_of_drawn(states, ending.head, [0, 1, 2]), whole, atol=1e-5 * float(whole.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_caps_and_scales_of_a_few_percent_are_seen_in_half_precision(dtype: torch.dtype) -> None:
    capped, scaled = tiny.gemma2(final_logit_softcapping=30.0), tiny.build(GraniteConfig(**tiny._SHAPE, logits_scaling=1.1))
    for model in (plain := tiny.llama(), capped, scaled):
        torch.nn.init.normal_(model.get_output_embeddings().weight)
        states = ending_of(model.to(dtype)).run(IDS, None)
        assert states.shape[-1] == (model.config.hidden_size if model is plain else tiny.VOCABULARY)


def test_a_head_that_is_no_projection_alone_is_run_over_all_positions() -> None:
    model = tiny.llama()
    model.register_forward_hook(lambda module, inputs, output: SimpleNamespace(logits=output.logits.sin()))
    assert torch.equal(ending_of(model).run(IDS, None), model(input_ids=IDS).logits)
    assert calibrate(model).settings.metric == "loss"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_on_a_cpu_and_the_model_keeps_its_weights(dtype: torch.dtype) -> None:
    model = tiny.llama(tie_word_embeddings=True).to(dtype)
    seen = []
    hook = model.model.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].dtype))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    codec = calibrate(model)
    with torch.inference_mode():
        again = calibrate(model)
    hook.remove()
    assert set(seen) == {torch.float32}
    same_energies(again, codec)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    codec.fingerprint.require_model(model, "The codec")
    same_energies(codec, calibrate(tiny.llama(tie_word_embeddings=True).to(dtype).float()))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["k", "v"])
def test_the_squared_gradient_along_an_error_is_twice_the_divergence_that_it_makes(kind: str) -> None:
    model, layer = tiny.llama(), 1
    error = 1e-3 * torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(input_ids=IDS).logits.double().log_softmax(-1)
        projection = getattr(model.model.layers[layer].self_attn, f"{kind}_proj")
        hook = projection.register_forward_hook(lambda *a: a[2] + error)
        moved = model(input_ids=IDS).logits.double().log_softmax(-1)
        hook.remove()
    divergence = float((exact.exp() * (exact - moved)).sum())
    along = error.unflatten(-1, (2, 8)).transpose(1, 2)
    squares = []
    for seed in range(0, 900, 3):
        gradients = pulls(model, [seed, seed + 1, seed + 2])[layer]["kv".index(kind)]
        squares.append((gradients * along).sum((1, 2, 3)).square().sum())
    assert sum(squares) / len(squares) == pytest.approx(2 * divergence, rel=0.15)


@pytest.mark.parametrize("how", ["frozen", "inference mode", "no grad"])
def test_gradients_are_found_in_frozen_models_and_modes_without_and_parameters_get_none(how: str) -> None:
    expected, model = calibrate(metric="loss"), tiny.llama()
    if how == "frozen":
        model.requires_grad_(False)
    with torch.inference_mode(how == "inference mode"), torch.set_grad_enabled(how == "frozen"):
        codec = calibrate(model, metric="loss")
    assert codec.settings.metric == "loss"
    assert all(each.grad is None and each.requires_grad == (how != "frozen") for each in model.parameters())
    assert not any(tensor.is_inference() for tensor in codec.tensors().values()) or how == "inference mode"
    same_energies(codec, expected)


@pytest.mark.parametrize("broken", ["detached", "endless", "headless"])
def test_where_no_gradients_come_back_the_metric_is_plain_and_a_warning_says_why(broken: str) -> None:
    model = tiny.llama()
    if broken == "detached":
        model.model.layers[1].register_forward_hook(lambda *a: a[2].detach())
    elif broken == "endless":
        model.model.layers[1].mlp.register_forward_hook(lambda *a: a[2] + (a[2] * 0).sqrt())
    model = model.model if broken == "headless" else model
    with pytest.warns(UserWarning, match="metric='loss' needs gradients"):
        codec = calibrate(model, metric="loss")
    assert codec.settings.metric == "plain"
    same_energies(codec, calibrate(metric="plain"))


@given(lengths=st.lists(st.integers(1, 20), max_size=6), block=st.integers(2, 8), limit=st.one_of(st.none(), st.integers(2, 60)))
def test_blocks_hold_the_texts_in_order_and_only_single_tokens_are_left_out(lengths: list[int], block: int, limit: int | None) -> None:
    texts = [torch.arange(100 * index, 100 * index + length) for index, length in enumerate(lengths)]
    found = list(blocks_of(iter(texts), block, limit))
    expected, read = [piece for text in texts for piece in text.split(block) if len(piece) >= 2], sum(map(len, found))
    if limit is None:
        assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    else:
        assert torch.cat([*found, torch.empty(0)]).tolist() == torch.cat([*expected, torch.empty(0)])[:read].tolist()
        assert min(sum(map(len, expected)), limit) - 1 <= read <= limit
        assert all(len(each) >= 2 for each in found)


@given(lengths=st.lists(st.integers(2, 5), max_size=12), size=st.integers(1, 4))
def test_batches_hold_every_block_once_and_nothing_is_padded(lengths: list[int], size: int) -> None:
    blocks = [(index, torch.full((length,), index)) for index, length in enumerate(lengths)]
    seen = {}
    for numbers, ids in batches_of(iter(blocks), 5, size):
        assert len(numbers) == len(ids) <= size
        seen |= dict(zip(numbers, ids.tolist(), strict=True))
    assert seen == {index: ids.tolist() for index, ids in blocks}


@pytest.mark.parametrize("metric", ["loss", "plain"])
def test_batches_do_not_change_the_codec_beyond_rounding(metric: str) -> None:
    alone, batched = (calibrate(block=16, batch_size=size, metric=metric) for size in (1, 3))
    assert (alone.settings.tokens, alone.settings.blocks) == (120, 9)
    same_energies(alone, batched)


def test_reading_stops_at_max_tokens_and_blocks_fit_the_model() -> None:
    codec = calibrate(texts=iter(TEXTS), max_tokens=50, block=1000, metric="plain")
    assert (codec.settings.tokens, codec.settings.block) == (50, 256)


def test_strings_are_read_with_the_tokenizer_which_is_then_part_of_the_fingerprint() -> None:
    model, tokenizer = testbed.load()
    text = testbed.held_out()[:1500]
    options: dict[str, Any] = {"metric": "plain", "progress": False}
    from_text = KVCodec.calibrate(model, tokenizer, [text], **options)
    from_ids = KVCodec.calibrate(model, tokenizer, [tokenizer(text)["input_ids"]], **options)
    assert from_text.settings == from_ids.settings
    assert all(torch.equal(tensor, from_ids.tensors()[name]) for name, tensor in from_text.tensors().items())
    assert from_text.fingerprint.tokenizer is not None
    assert from_ids.fingerprint.tokenizer is None


@pytest.mark.parametrize("enabled", [False, True])
def test_the_model_is_left_as_it_was_also_after_an_error(enabled: bool) -> None:
    model = tiny.llama()
    if enabled:
        enable(model)
    model.train()
    model.model.layers[1].eval()
    before = (model.config._attn_implementation, [module.training for module in model.modules()])
    calibrate(model)
    with pytest.raises(ConfigError):
        calibrate(model, [*TEXTS, [1000]])
    assert (model.config._attn_implementation, [module.training for module in model.modules()]) == before
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_a_bar_shows_unless_it_is_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    calibrate(progress=True, metric="plain")
    assert "120/120" in capsys.readouterr().err
    calibrate(metric="plain")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_without_rotation_both_ways_are_the_same(family: str) -> None:
    aware, post = (calibrate(models.build(family), rotation=rotation).tensors() for rotation in ("aware", "post"))
    assert all(torch.equal(tensor, post[name]) for name, tensor in aware.items())


@pytest.mark.parametrize("family", [name for name in models.FAMILIES if name != "mistral_sliding"])
@pytest.mark.parametrize("metric", ["plain", "loss"])
def test_families_have_codes_where_attention_is_full(family: str, metric: str) -> None:
    model = models.build(family)
    codec = calibrate(model, bytes_ratio=0.25, metric=metric)
    assert codec.settings.metric == metric
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * codec.layer_count
    assert [codec.has_codes(layer) for layer in range(codec.layer_count)] == [kind == "full_attention" for kind in kinds]
    assert all(bool(tensor.isfinite().all()) for tensor in codec.tensors().values())
    assert 0.15 < codec.bytes_ratio <= 0.25


def test_angles_that_follow_the_length_of_the_text_are_refused_and_post_works() -> None:
    model = tiny.llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(UnsupportedError, match="rotation='post' works"):
        calibrate(model)
    assert 0.1 < calibrate(model, rotation="post").bytes_ratio <= 0.125


def test_cross_attention_foreign_attention_and_windows_alone_are_refused() -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=96, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedError, match="cross-attention"):
        calibrate(t5)
    bloom = tiny.build(BloomConfig(vocab_size=96, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedError, match="computes attention itself"):
        calibrate(bloom)
    windows = MistralConfig(
        vocab_size=96, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, sliding_window=8
    )
    with pytest.raises(UnsupportedError, match="no layers with full attention"):
        calibrate(tiny.build(windows))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        *(({name: value}, name) for name, value in {"bytes_ratio": -0.1, "rotation": "before", "metric": "cosine", "recent": -1}.items()),
        *(({name: value}, name) for name, value in {"shards": 0, "block": 1, "batch_size": 0, "max_tokens": 1}.items()),
        ({"bytes_ratio": 1e-4}, "bytes_ratio: expected enough for at least one direction"),
    ],
)
def test_bad_options_are_named(options: dict, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        calibrate(**options)


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        ("a text", r"texts: .* Pass \[text\]"),
        (["a text"], "tokenizer"),
        ([5, 6], r"texts\[0\]"),
        ([[0.5, 1.0]], r"texts\[0\]"),
        ([[5, 6], [[5, 6]]], r"texts\[1\].*Pass \[ids\]"),
        ([[5, 96]], r"texts\[0\]: expected token ids of 0 to 95"),
        ([object()], r"texts\[0\]"),
        ([], "at least 2 tokens"),
        ([[], [5]], "at least 2 tokens"),
    ],
)
def test_bad_texts_are_named(texts: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        calibrate(texts=texts)

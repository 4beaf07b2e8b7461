"""What is measured once for a model: queries, the probe of hidden states, and the budgets of heads."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.equip.calibrated import HeadBudgets, KeepProbe, ProbePolicy, QueryStatistics
from hf_kvcaches.equip.corpus import reconstruction_scores
from hf_kvcaches.equip.policies import ExpectedAttentionPolicy, FuturePolicy, policy_from_settings, resolve_policy
from hf_kvcaches.equip.policies.tokens import Tokens
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch, UnsupportedError
from tests import testbed, tiny
from tests.testbed.documents import Filler, fit_document

pytestmark = pytest.mark.usefixtures("no_grad")

TEXTS = [tiny.ids(1, length, seed=length)[0].tolist() for length in (140, 3, 170)]


@pytest.fixture(scope="module")
def artifacts(model: PreTrainedModel) -> dict[str, Any]:
    kinds = {"statistics": QueryStatistics, "probe": KeepProbe, "budgets": HeadBudgets}
    return {name: kind.calibrate(model, None, TEXTS, progress=False) for name, kind in kinds.items()}


each_artifact = pytest.mark.parametrize("name", ["statistics", "probe", "budgets"])


def feed(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, past_key_values=cache).logits


# All of them.


@each_artifact
def test_saved_artifacts_are_loaded_for_their_model_alone(
    artifacts: dict[str, Any], model: PreTrainedModel, tmp_path: Path, name: str
) -> None:
    artifact = artifacts[name]
    artifact.save_pretrained(tmp_path)
    loaded = type(artifact).from_pretrained(tmp_path, model=model)
    assert (loaded.tokens, loaded.fingerprint) == (artifact.tokens, artifact.fingerprint)
    assert loaded.metadata() == artifact.metadata()
    assert all(torch.equal(tensor, loaded.tensors()[key]) for key, tensor in artifact.tensors().items())
    assert type(artifact).from_pretrained(tmp_path, model=tiny.llama().bfloat16()).tokens == 310
    with pytest.raises(FingerprintMismatch, match=artifact.artifact_type):
        type(artifact).from_pretrained(tmp_path, model=tiny.llama(seed=1))
    assert "310 tokens" in (tmp_path / "README.md").read_text()


@each_artifact
def test_files_that_miss_a_tensor_are_refused(artifacts: dict[str, Any], tmp_path: Path, monkeypatch: Any, name: str) -> None:
    artifact = artifacts[name]
    short = dict(list(artifact.tensors().items())[1:])
    monkeypatch.setattr(type(artifact), "tensors", lambda self: short)
    artifact.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="content"):
        type(artifact).from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", [QueryStatistics, KeepProbe, HeadBudgets, partial(HeadBudgets.calibrate, by="ablation")])
def test_the_model_is_left_as_it_was(kind: Any) -> None:
    model = tiny.llama(num_hidden_layers=2).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    getattr(kind, "calibrate", kind)(model, None, TEXTS[:1], progress=False)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", [QueryStatistics, KeepProbe, HeadBudgets])
@pytest.mark.parametrize("texts", [[[5, 6, 7]], "a text", ["a text"]])
def test_texts_that_can_not_be_measured_are_refused(model: PreTrainedModel, kind: Any, texts: Any) -> None:
    with pytest.raises(ConfigError, match=r"^(texts|tokenizer):"):
        kind.calibrate(model, None, texts, progress=False)


def test_an_unknown_way_to_measure_heads_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"^by:"):
        HeadBudgets.calibrate(model, None, TEXTS, by="size", progress=False)


def test_layers_without_full_attention_have_no_entry() -> None:
    model = tiny.gemma2()
    full = [index for index, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    assert list(QueryStatistics.calibrate(model, None, TEXTS[:1], progress=False).layers) == full
    assert list(KeepProbe.calibrate(model, None, TEXTS[:1], progress=False).layers) == full
    for by in ("kvzip", "ablation"):
        assert list(HeadBudgets.calibrate(model, None, TEXTS[:1], by=by, progress=False).shares) == full


# The second reading.


@pytest.mark.parametrize("family", [tiny.llama, partial(tiny.gemma2, layer_types=["full_attention"] * 4)])
def test_a_token_scores_the_most_that_its_chunks_repetition_gives_it(family: Any) -> None:
    model, ids, chunk = family(), tiny.ids(1, 50)[0], 20
    scores = reconstruction_scores(model, ids, chunk)
    model.set_attn_implementation("eager")
    for part in torch.arange(50).split([16, 17, 17]):  # chunks of about one length
        attentions = model(torch.cat([ids, ids[part]])[None], output_attentions=True).attentions
        for layer, weights in enumerate(attentions):
            given, own = weights[0, :, 50:, part], weights[0, :, 50:, 50:]
            shares = given / (given.sum(-1, keepdim=True) + own.sum(-1, keepdim=True))
            expected = shares.unflatten(0, (2, 2)).amax((1, 2))
            torch.testing.assert_close(scores[layer][:, part], expected, atol=1e-5, rtol=1e-3)


# QueryStatistics.


def queries_of(model: PreTrainedModel, texts: list[list[int]]) -> list[torch.Tensor]:
    """Of each layer, from the projections of the plain model: (heads, tokens, head_dim) without rotation and the first 4 tokens."""
    outputs: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    handles = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output, kept=kept: kept.append(output[0, 4:]))
        for layer, kept in zip(model.model.layers, outputs, strict=True)
    ]
    for text in texts:
        model(torch.tensor([text]), use_cache=False)
    for handle in handles:
        handle.remove()
    return [torch.cat(kept).unflatten(-1, (4, -1)).transpose(0, 1).double() for kept in outputs]


def test_mean_and_covariance_are_those_of_the_projected_queries(model: PreTrainedModel) -> None:
    texts = [TEXTS[0][:40], tiny.ids(1, 530, seed=6)[0].tolist()]
    statistics = QueryStatistics.calibrate(model, None, texts, progress=False)
    assert (list(statistics.layers), statistics.tokens) == ([0, 1, 2, 3], 570)
    for index, queries in enumerate(queries_of(model, [texts[0], texts[1][:512], texts[1][512:]])):
        layer = statistics.layers[index]
        centered = queries - queries.mean(1, keepdim=True)
        torch.testing.assert_close(layer.mean.double(), queries.mean(1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer.covariance.double(), centered.mT @ centered / queries.shape[1], atol=1e-4, rtol=1e-4)
        assert layer.scaling.item() == pytest.approx(8**-0.5)


def test_keys_are_scored_by_the_expectation_over_calibrated_queries(model: PreTrainedModel, artifacts: dict[str, Any]) -> None:
    ids, future, statistics = tiny.ids(1, 30, seed=4), 16, artifacts["statistics"]
    past = DynamicCache(config=model.config)
    feed(model, past, ids)
    geometry = RotaryGeometry.from_config(model.config, layer_idx=2)
    keys, values = past.layers[2].keys, past.layers[2].values
    tokens = Tokens(keys, values, torch.arange(30)[None, None], 30, 4, geometry=geometry, module=model.model.layers[2].self_attn)
    policy = ExpectedAttentionPolicy(future=future, epsilon=0.01, statistics=statistics)
    # The mean rotation to the positions to come as a matrix, from rotating unit vectors.
    ahead = geometry.rotate(torch.eye(8).expand(future, 1, 8, 8), torch.arange(30, 30 + future)[:, None]).mean(0)[0].mT.double()
    expected = torch.zeros(2, 30, dtype=torch.float64)
    mean, covariance, scaling = (part.double() for part in statistics.layers[2])
    for head in range(4):
        key = keys[0, head // 2].double()
        spread = ahead @ covariance[head] @ ahead.mT
        logits = key @ (ahead @ mean[head]) * scaling + ((key @ spread) * key).sum(-1) * scaling**2 / 2
        expected[head // 2, 4:] += logits[4:].softmax(-1) / 2
    expected = (expected + 0.01) * values[0].double().norm(dim=-1)
    torch.testing.assert_close(policy.score(tokens)[0].double(), expected, atol=1e-5, rtol=1e-4)
    assert (policy.reads_queries, copy.deepcopy(policy).statistics) == (False, statistics)
    with pytest.raises(UnsupportedError, match="statistics"):
        policy.score(replace(tokens, module=None))
    for wrong in ({"module": tiny.llama(num_hidden_layers=5).model.layers[4].self_attn}, {"keys": keys.repeat(1, 3, 1, 1)}):
        with pytest.raises(ConfigError, match="statistics"):
            policy.score(replace(tokens, **wrong))


def test_a_policy_with_statistics_is_no_plain_values(artifacts: dict[str, Any]) -> None:
    settings = json.loads(json.dumps(ExpectedAttentionPolicy(statistics=artifacts["statistics"]).settings()))
    with pytest.raises(UnsupportedError, match="with statistics"):
        policy_from_settings(settings)
    with pytest.raises(ConfigError, match="statistics"):
        ExpectedAttentionPolicy(statistics=artifacts["probe"])


def test_the_scale_that_a_model_gives_its_rotation_counts() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
    geometry = RotaryGeometry.from_config(tiny.llama(rope_parameters=yarn).config, layer_idx=0)
    assert geometry.attention_scaling > 1
    queries, keys, values = (torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    place = torch.arange(12)
    shown = Tokens(keys, values, place[None, None], 12, 0, queries=queries, query_index=place[None], geometry=geometry)
    plain = replace(shown, geometry=replace(geometry, attention_scaling=1.0))
    for policy in (ExpectedAttentionPolicy(), FuturePolicy()):
        torch.testing.assert_close(policy.score(shown), policy.score(plain))


# KeepProbe.


def test_the_probe_is_ridge_regression_from_the_inputs_of_attention_to_log_scores(model: PreTrainedModel) -> None:
    probe = KeepProbe.calibrate(model, None, TEXTS, progress=False)
    assert probe.tokens == 310
    for index, layer in enumerate(model.model.layers):
        inputs, outputs = [], []
        for text in (TEXTS[0], TEXTS[2]):
            hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states[index]
            inputs.append(layer.input_layernorm(hidden)[0, 4:].double())
            outputs.append(reconstruction_scores(model, torch.tensor(text))[index][:, 4:].log().T.double())
        x, y = torch.cat(inputs), torch.cat(outputs)
        rows, damping = x - x.mean(0), 0.3 * len(x) * x.var(0, correction=0).mean()
        weights = torch.linalg.solve(rows.T @ rows + damping * torch.eye(32), rows.T @ (y - y.mean(0)))
        expected = (rows @ weights + y.mean(0)).exp().T
        torch.testing.assert_close(probe.predict(index, x[None].float())[0].double(), expected, atol=1e-4, rtol=1e-3)


def block_of(model: PreTrainedModel, layer: int = 1, **changes: Any) -> Tokens:
    """Twelve tokens that a layer keeps, and eight new ones."""
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))  # noqa: E731
    positions = torch.arange(20)
    tokens = Tokens(
        keys=draw(2, 2, 20, 8),
        values=draw(2, 2, 20, 8),
        positions=positions[None, None],
        count=20,
        sinks=4,
        queries=draw(2, 4, 8, 8),
        query_index=positions[None, 12:],
        scaling=0.3,
        geometry=RotaryGeometry.from_config(model.config, layer_idx=layer),
        module=model.model.layers[layer].self_attn,
        inputs={"hidden_states": draw(2, 8, 32)},
        scores=torch.cat([draw(2, 2, 12).abs() / 9, torch.full((2, 2, 8), -torch.inf)], -1),
    )
    return replace(tokens, **changes)


def test_a_token_is_worth_the_most_that_probe_future_attention_and_earlier_scores_say(
    model: PreTrainedModel, artifacts: dict[str, Any]
) -> None:
    probe, tokens = artifacts["probe"], block_of(model)
    new = probe.predict(1, tokens.inputs["hidden_states"])
    policy, future = resolve_policy(probe), FuturePolicy().score(tokens)
    scores = policy.checked_score(tokens)
    assert torch.equal(scores[..., :12], future[..., :12])  # with the earlier ones
    torch.testing.assert_close(scores[..., 12:], torch.maximum(new, future[..., 12:]))
    torch.testing.assert_close(policy.score(replace(tokens, queries=None)), torch.cat([tokens.scores[..., :12], new], -1))


def test_a_step_scores_its_token_by_the_probe_alone(model: PreTrainedModel, artifacts: dict[str, Any]) -> None:
    tokens, policy = block_of(model), artifacts["probe"].as_policy()
    hidden = tokens.inputs["hidden_states"][:, -1:]
    score = policy.score_new({"hidden_states": hidden}, tokens.module)
    assert score.shape == (2, 2, 1)
    torch.testing.assert_close(score, policy.score(replace(tokens, queries=None))[..., -1:])
    assert policy.in_graphs


def test_another_models_probe_is_refused(model: PreTrainedModel, artifacts: dict[str, Any]) -> None:
    tokens, probe = block_of(model), artifacts["probe"]
    shape = {"keys": tokens.keys.repeat(1, 2, 1, 1), "values": tokens.values.repeat(1, 2, 1, 1), "scores": None}
    for wrong in (
        {"module": tiny.llama(num_hidden_layers=5).model.layers[4].self_attn},
        {"inputs": {"hidden_states": torch.zeros(2, 8, 16)}},
        shape,
    ):
        with pytest.raises(ConfigError, match="Calibrate it with this model"):
            replace(probe).as_policy().score(replace(tokens, **wrong))
    with pytest.raises(UnsupportedError, match="no model runs"):
        probe.as_policy().score(replace(tokens, inputs=None, scores=None))
    with pytest.raises(ConfigError, match="probe"):
        ProbePolicy(artifacts["budgets"])
    with pytest.raises(UnsupportedError, match="keep-probe"):
        policy_from_settings(probe.as_policy().settings())


# HeadBudgets.


def test_shares_are_those_that_one_budget_for_all_heads_gives(model: PreTrainedModel) -> None:
    ids = torch.tensor(TEXTS[0])
    budgets = HeadBudgets.calibrate(model, None, TEXTS[:1], progress=False)
    scores = torch.stack(list(reconstruction_scores(model, ids).values())).flatten(0, 1)  # 8 heads
    budget = int(140 * 0.25)
    recent = (budget - 4) // 4
    worth = scores[:, 4 : 140 - recent]
    free = budget - 4 - recent
    floor = worth.topk(-(-free // 20)).indices
    worth = worth.scatter(1, floor, torch.inf)
    kept = torch.zeros(worth.numel()).index_fill(0, worth.flatten().topk(8 * free).indices, 1.0).view_as(worth).sum(1)
    torch.testing.assert_close(torch.cat(list(budgets.shares.values())), kept / free)
    assert torch.cat(list(budgets.shares.values())).mean().item() == pytest.approx(1.0)
    settings = json.loads(json.dumps(budgets.as_settings()))
    assert settings == {str(index): shares.tolist() for index, shares in budgets.shares.items()}


def test_by_ablation_the_quarter_that_costs_most_gets_most() -> None:
    model = tiny.llama()
    budgets = HeadBudgets.calibrate(model, None, TEXTS, by="ablation", progress=False)
    ids, costs = [torch.tensor([text]) for text in (TEXTS[0], TEXTS[2])], torch.zeros(4, 2)
    model.set_attn_implementation("eager")
    for row in ids:
        tokens, expected = row.shape[1], model(row).logits[:, -32:].log_softmax(-1)
        causal = torch.full((tokens, tokens), -torch.inf).triu(1)
        for layer, head in torch.cartesian_prod(torch.arange(4), torch.arange(2)).tolist():
            mask = causal.repeat(1, 4, 1, 1)
            mask.unflatten(1, (2, -1))[:, head, :, -32:, 4 : tokens - 32 - 64] = -torch.inf
            handle = model.model.layers[layer].self_attn.register_forward_pre_hook(
                lambda module, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
            )
            other = model(row).logits[:, -32:].log_softmax(-1)
            handle.remove()
            costs[layer, head] += (expected.exp() * (expected - other)).sum(-1).mean() * tokens
    shares = torch.stack([budgets.shares[layer] for layer in range(4)])
    best = costs.flatten().topk(2).indices
    assert torch.equal(shares.flatten(), torch.full((8,), 0.5).index_fill(0, best, 2.5))


# In a cache.


def documents() -> tuple[Any, Any, list[int], list[tuple[list[int], list[int]]], list[list[int]]]:
    """The testbed's model and tokenizer, a context, its questions with answers, and other texts with questions to calibrate on."""
    model, tokenizer = testbed.load("base")
    encode = partial(tokenizer.encode, add_special_tokens=False)
    count = lambda text: len(encode(text))  # noqa: E731
    prose, read = Filler(testbed.held_out("prose")), []
    for seed in range(5, 9):
        document = fit_document(random.Random(seed), prose, count, 400, facts=4)
        facts = [document.facts[index] for index in document.asked]
        read.append((encode(document.context()), [(encode(fact.question), encode(fact.answer)) for fact in facts]))
    texts = [context + question + answer for context, questions in read[1:] for question, answer in questions[:1]]
    return model, tokenizer, *read[0], texts


def recalled(model: Any, cache: EquipCache, context: list[int], questions: list[tuple[list[int], list[int]]]) -> int:
    feed(model, cache, torch.tensor([context]))
    right = 0
    for question, answer in questions:
        follow = copy.deepcopy(cache)
        logits = feed(model, follow, torch.tensor([question + answer[:-1]]))
        right += int(logits[0, -1].argmax()) == answer[-1]
    return right


def test_a_probe_and_budgets_by_head_bring_facts_back_that_a_window_has_lost() -> None:
    model, _, context, questions, texts = documents()
    probe = KeepProbe.calibrate(model, None, texts, progress=False)
    budgets = {by: HeadBudgets.calibrate(model, None, texts, by=by, progress=False) for by in ("kvzip", "ablation")}
    assert recalled(model, EquipCache(model, "streaming", 0.25), context, questions) < len(questions)
    for policy, heads in ((probe, "auto"), ("compactor", budgets["kvzip"]), ("keydiff", budgets["ablation"])):
        assert recalled(model, EquipCache(model, policy, 0.25, head_budgets=heads), context, questions) == len(questions)


def test_a_cache_prunes_padded_rows_by_statistics_and_decodes_alike_in_a_copy(artifacts: dict[str, Any]) -> None:
    model = tiny.llama()
    cache = EquipCache(model, ExpectedAttentionPolicy(statistics=artifacts["statistics"]), 16)
    ids, mask = tiny.ids(2, 46, seed=3), torch.ones(2, 46, dtype=torch.long)
    mask[0, :7] = 0
    model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
    other = copy.deepcopy(cache)
    for step in range(40, 46):
        call = {"input_ids": ids[:, step : step + 1], "attention_mask": mask[:, : step + 1]}
        assert torch.equal(model(**call, past_key_values=cache).logits, model(**call, past_key_values=other).logits)
    assert other.policy.statistics is artifacts["statistics"]


def test_a_cache_with_a_probe_scores_each_token_when_it_comes(artifacts: dict[str, Any]) -> None:
    model = tiny.llama()
    cache = EquipCache(model, artifacts["probe"], 24, recent=2, positions="compact")
    feed(model, cache, tiny.ids(1, 60))
    for step in range(40):
        feed(model, cache, tiny.ids(1, 1, seed=step))
    kept = [head for layer in range(4) for head in cache.kept_positions(layer)[0].tolist()]
    assert any(2 < sum(position >= 60 for position in head) < 20 for head in kept)

"""`QueryStatistics` measures a model's queries, is saved and checked like other artifacts, and `ExpectedAttentionPolicy` scores by it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import EquipCache, ExpectedAttentionPolicy, FingerprintMismatch, QueryStatistics, RotaryGeometry
from hf_kvcaches.equip.policies import ChunkPolicy, policy_from_settings
from hf_kvcaches.equip.tokens import Tokens
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError
from tests import tiny
from tests.equip.cases import feed_all, padded, positions_of

TEXTS = [tiny.ids(1, length, seed=length)[0].tolist() for length in (40, 3, 70)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama()


@pytest.fixture(scope="module")
def statistics(model: PreTrainedModel) -> QueryStatistics:
    return QueryStatistics.calibrate(model, None, TEXTS, block=48, progress=False)


def queries_of(model: PreTrainedModel, texts: list[list[int]]) -> list[torch.Tensor]:
    """Of each layer, from the projections of the plain model: (heads, tokens, head_dim) without rotation and the first 4 tokens."""
    outputs: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    handles = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output, kept=kept: kept.append(output[0, 4:]))
        for layer, kept in zip(model.model.layers, outputs, strict=True)
    ]
    with torch.no_grad():
        for text in texts:
            model(torch.tensor([text]), use_cache=False)
    for handle in handles:
        handle.remove()
    return [torch.cat(kept).unflatten(-1, (4, -1)).transpose(0, 1).double() for kept in outputs]


def test_mean_and_covariance_are_those_of_the_projected_queries(model: PreTrainedModel, statistics: QueryStatistics) -> None:
    assert (list(statistics.layers), statistics.tokens) == ([0, 1, 2, 3], 40 + 48 + 22)
    for index, queries in enumerate(queries_of(model, [TEXTS[0], TEXTS[2][:48], TEXTS[2][48:]])):
        layer = statistics.layers[index]
        centered = queries - queries.mean(1, keepdim=True)
        torch.testing.assert_close(layer.mean.double(), queries.mean(1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer.covariance.double(), centered.mT @ centered / queries.shape[1], atol=1e-4, rtol=1e-4)
        assert layer.scaling.item() == pytest.approx(8**-0.5)


def test_the_model_is_left_as_it_was(model: PreTrainedModel) -> None:
    model.train()
    ids = tiny.ids(1, 9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    QueryStatistics.calibrate(model, None, TEXTS[:1], progress=False)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.eval()(ids).logits.isfinite().all()


def test_saved_statistics_are_loaded_for_their_model_alone(statistics: QueryStatistics, model: PreTrainedModel, tmp_path: Path) -> None:
    statistics.save_pretrained(tmp_path)
    loaded = QueryStatistics.from_pretrained(tmp_path, model=model)
    assert (loaded.tokens, loaded.fingerprint, list(loaded.layers)) == (statistics.tokens, statistics.fingerprint, list(statistics.layers))
    for index, layer in loaded.layers.items():
        assert all(torch.equal(one, other) for one, other in zip(layer, statistics.layers[index], strict=True))
    assert QueryStatistics.from_pretrained(tmp_path, model=tiny.llama().bfloat16()).tokens == statistics.tokens
    with pytest.raises(FingerprintMismatch, match="query-statistics"):
        QueryStatistics.from_pretrained(tmp_path, model=tiny.llama(seed=1))
    assert "110 tokens" in (tmp_path / "README.md").read_text()


def test_files_that_miss_a_tensor_are_refused(statistics: QueryStatistics, tmp_path: Path) -> None:
    class Short(QueryStatistics):
        def tensors(self) -> dict[str, torch.Tensor]:
            return dict(list(super().tensors().items())[1:])

    Short(statistics.layers, statistics.tokens, statistics.fingerprint).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="content"):
        QueryStatistics.from_pretrained(tmp_path)


@pytest.mark.parametrize(("texts", "block", "argument"), [([[5, 6, 7]], 512, "texts"), ("a text", 512, "texts"), ([[5] * 9], 4, "block")])
def test_texts_that_can_not_be_measured_are_refused(model: PreTrainedModel, texts: Any, block: int, argument: str) -> None:
    with pytest.raises(ConfigError, match=f"^{argument}:"):
        QueryStatistics.calibrate(model, None, texts, block=block, progress=False)


def test_keys_are_scored_by_the_expectation_over_calibrated_queries(model: PreTrainedModel, statistics: QueryStatistics) -> None:
    ids, future = tiny.ids(1, 30, seed=4), 16
    past = DynamicCache(config=model.config)
    feed_all(model, past, ids)
    geometry = RotaryGeometry.from_config(model.config, layer_idx=2)
    keys, values = past.layers[2].keys, past.layers[2].values
    tokens = Tokens(keys, values, torch.arange(30)[None, None], None, 30, 4, geometry=geometry, module=model.model.layers[2].self_attn)
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


@pytest.mark.parametrize("wrap", [lambda policy: policy, lambda policy: ChunkPolicy(policy, size=16)], ids=["alone", "in chunks"])
def test_a_cache_prunes_padded_rows_by_statistics_and_decodes_alike_in_a_copy(statistics: QueryStatistics, wrap: Any) -> None:
    model = tiny.llama()
    cache = EquipCache(model, wrap(ExpectedAttentionPolicy(interval=2, statistics=statistics)), 16)
    ids, mask = padded(2, 46, 7, 0)
    feed_all(model, cache, ids[:, :40], mask[:, :40])
    assert all(layer.state.queries is None for layer in cache.layers)
    other = copy.deepcopy(cache)
    assert len(positions_of(cache, 3, 0, 1)) == 16
    for step in range(40, 46):
        one, two = (feed_all(model, each, ids[:, step : step + 1], mask[:, : step + 1]) for each in (cache, other))
        assert torch.equal(one, two)
    assert getattr(other.policy, "inner", other.policy).statistics is statistics


def test_statistics_change_what_a_prompt_keeps(model: PreTrainedModel, statistics: QueryStatistics) -> None:
    ids = tiny.ids(1, 40, seed=8)
    kept = []
    for policy in (ExpectedAttentionPolicy(statistics=statistics), ExpectedAttentionPolicy()):
        cache = EquipCache(model, policy, 12, recent=1, positions="original")
        feed_all(model, cache, ids)
        kept.append([positions_of(cache, layer) for layer in range(4)])
    assert kept[0] != kept[1]


def test_where_the_layer_is_not_known_or_another_models_pruning_is_refused(model: PreTrainedModel, statistics: QueryStatistics) -> None:
    policy = ExpectedAttentionPolicy(statistics=statistics)
    cache = EquipCache(model, policy, 12)
    feed_all(model, cache, tiny.ids(1, 20))
    with pytest.raises(UnsupportedError, match="statistics"):
        cache.compress(model)
    past = DynamicCache(config=model.config)
    feed_all(model, past, tiny.ids(1, 20))
    with pytest.raises(UnsupportedError, match="statistics"):
        EquipCache.from_cache(past, model, policy, 12)
    for other in (tiny.llama(num_hidden_layers=5), tiny.llama(num_attention_heads=2, num_key_value_heads=1)):
        with pytest.raises(ConfigError, match="statistics"):
            feed_all(other, EquipCache(other, policy, 12), tiny.ids(1, 20))
    with pytest.raises(ConfigError, match="statistics"):
        ExpectedAttentionPolicy(statistics=statistics.layers)  # type: ignore[arg-type]


def test_a_policy_with_statistics_is_no_plain_values(statistics: QueryStatistics) -> None:
    settings = json.loads(json.dumps(ChunkPolicy(ExpectedAttentionPolicy(statistics=statistics)).settings()))
    with pytest.raises(UnsupportedError, match="with statistics"):
        policy_from_settings(settings)
    plain = ExpectedAttentionPolicy(future=8)
    assert policy_from_settings(json.loads(json.dumps(plain.settings()))) == plain


def test_the_scale_that_a_model_gives_its_rotation_counts() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
    model = tiny.llama(rope_parameters=yarn)
    geometry = RotaryGeometry.from_config(model.config, layer_idx=0)
    assert geometry.attention_scaling > 1
    queries, keys, values = (torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    shown = Tokens(keys, values, torch.arange(12)[None, None], None, 12, 0, queries=queries, geometry=geometry)
    plain = replace(geometry, attention_scaling=1.0)
    scaled = ExpectedAttentionPolicy().score(shown)
    torch.testing.assert_close(scaled, ExpectedAttentionPolicy().score(replace(shown, geometry=plain)))

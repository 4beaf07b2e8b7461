"""Latent attention: `EquipCache` prunes the latents of the model, and its logits are those of expanded keys and values."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_kvcaches import EquipCache, UnsupportedError
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip.layer import EquipLayer
from hf_kvcaches.equip.modules import LatentView, latent_modules
from tests import tiny
from tests.equip.cases import POLICIES, text
from tests.reference.oracles import ReferenceCache

RANK, ROTATED, SINKS, BUDGET = 16, 8, 2, 12
_SIZES = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": ROTATED,
    "v_head_dim": 10,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
FAMILIES = {
    "deepseek_v2": {"first_k_dense_replace": 2},
    "deepseek_v3": {"first_k_dense_replace": 2},
    "deepseek_v3 yarn": {"first_k_dense_replace": 2, "rope_parameters": _YARN},
    "glm4_moe_lite": {"mlp_layer_types": ["dense"] * 2},
    "minicpm3": {"q_lora_rank": 16},
}
TEXT = tiny.ids(1, 40, seed=3)
PARTS = [TEXT[:, :16], TEXT[:, 16:21], *TEXT[:, 21:].split(1, 1)]


def build(name: str = "deepseek_v3") -> PreTrainedModel:
    return tiny.build(AutoConfig.for_model(name.split()[0], **{**_SIZES, **FAMILIES[name]}))


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Any, parts: list[torch.Tensor] = PARTS) -> torch.Tensor:
    return torch.cat([model(input_ids=part, past_key_values=cache).logits for part in parts], 1)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def generated(model: PreTrainedModel, cache: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(ids, past_key_values=cache, **{"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **options})


def cut(cache: DynamicCache, geometry: RotaryGeometry | None) -> None:
    """Makes room for a token beside the sinks, as a streaming cache of that budget does; with a geometry ranks are the positions."""
    for layer in cache.layers:
        tokens = layer.keys.shape[2]
        kept = torch.tensor([*range(SINKS), *range(SINKS + tokens - BUDGET + 1, tokens)])
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        if geometry is not None:
            keys = torch.cat([layer.values, layer.keys], -1)
            layer.values = geometry.shift(keys, torch.arange(len(kept)) - kept)[..., :ROTATED]


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("name", FAMILIES)
def test_with_room_for_all_logits_are_those_of_a_dynamic_cache(name: str, positions: str) -> None:
    model = build(name)
    cache, own = EquipCache(model, "h2o", 64, positions=positions), DynamicCache(config=model.config)
    close(logits(model, cache), logits(model, own))


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_streaming_is_that_of_a_dynamic_cache_cut_by_hand(name: str, positions: str) -> None:
    model, compact = build(name), positions == "compact"
    cache, oracle = EquipCache(model, "streaming", BUDGET, sinks=SINKS, positions=positions), DynamicCache(config=model.config)
    geometry = RotaryGeometry.from_config(model.config, layer_idx=0, latents=True)
    for past in (cache, oracle):
        model(input_ids=TEXT[:, :BUDGET], past_key_values=past)
    for position in range(BUDGET, TEXT.shape[1]):
        cut(oracle, geometry if compact else None)
        token = TEXT[:, position : position + 1]
        expected = model(input_ids=token, past_key_values=oracle, position_ids=torch.tensor([[BUDGET - 1 if compact else position]])).logits
        close(model(input_ids=token, past_key_values=cache).logits, expected)
    assert cache.report().kept == (BUDGET, BUDGET)


class _OfLatents(ReferenceCache):
    """Of a reference: the latents are the values of one head."""

    takes_latents = True

    def make_layer(self, layer_idx: int) -> Any:
        return self.layer_class(self, RotaryGeometry.from_config(self.config, layer_idx=layer_idx, latents=True))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        view, _ = super().update(torch.cat([value_states, key_states], -1), key_states, layer_idx, *args, **kwargs)
        return (LatentView(latent_modules(self.model)[layer_idx], view),) * 2


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("policy", ["h2o", "tova", "keydiff"])
def test_a_policy_that_scores_keeps_what_its_reference_keeps(policy: str, positions: str) -> None:
    model = build()
    chosen, kind, options = POLICIES[policy]
    cache = EquipCache(model, chosen, BUDGET, sinks=SINKS, positions=positions)
    oracle = type("Reference", (_OfLatents, kind), {})(model, budget=BUDGET, sinks=SINKS, positions=positions, **options)
    parts = [text(16), *text(40)[:, 16:].split(1, 1)]
    close(logits(model, cache, parts), logits(model, oracle, parts))
    assert torch.equal(cache.kept_positions(1).sort(-1).values, oracle.kept_positions(1))


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "beams", "lookup"])
def test_generate_writes_what_it_writes_with_a_dynamic_cache(options: dict[str, int]) -> None:
    model = build()
    ids = torch.cat([TEXT[:, :12], TEXT[:, :12]], 1)
    expected = generated(model, DynamicCache(config=model.config), ids, **options)
    assert torch.equal(generated(model, EquipCache(model, "streaming", 64), ids, **options), expected)


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("policy", ["streaming", "snapkv", "keydiff"])
def test_padded_rows_are_as_if_each_had_come_alone(policy: str, positions: str) -> None:
    model, short = build(), TEXT[:, :17]
    rows = torch.cat([TEXT[:, :24], torch.nn.functional.pad(short, (7, 0))])
    mask = torch.ones_like(rows).index_put((torch.tensor(1), torch.arange(7)), torch.tensor(0))
    options = {"output_logits": True, "return_dict_in_generate": True}
    make = {"sinks": SINKS, "recent": 4, "positions": positions}
    batch = generated(model, EquipCache(model, policy, BUDGET, **make), rows, attention_mask=mask, **options)
    alone = generated(model, EquipCache(model, policy, BUDGET, **make), short, **options)
    close(torch.stack([step[1:] for step in batch.logits]), torch.stack(alone.logits))


def test_latents_take_the_memory_that_they_take_in_a_dynamic_cache() -> None:
    model, text = build(), tiny.ids(1, 64)
    cache, own = EquipCache(model, "streaming", 64), DynamicCache(config=model.config)
    logits(model, cache, [text])
    logits(model, own, [text])
    per_token = [sum(tensor.nbytes for tensor in tensors) // (2 * 64) for tensors in (_held(cache), _held(own))]
    assert per_token == [4 * (RANK + ROTATED)] * 2


def _held(cache: Any) -> list[torch.Tensor]:
    layers = [layer.storage if isinstance(cache, EquipCache) else layer for layer in cache.layers]
    return [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]


def test_edits_crops_and_compression_give_what_a_shorter_text_gives() -> None:
    model = build()
    plain = EquipCache(model, "streaming", 64)
    expected = logits(model, plain, [TEXT[:, :20], TEXT[:, 20:21]])[:, -1:]
    cropped, edited = EquipCache(model, "streaming", 64), EquipCache(model, "streaming", 64)
    logits(model, cropped, [TEXT[:, :24]])
    cropped.crop(-4)
    other = TEXT[:, :20].clone()
    other[:, 15:] = 5
    logits(model, edited, [other])
    edited.edit(model, 15, 20, TEXT[0, 15:20])
    for cache in (cropped, edited):
        close(logits(model, cache, [TEXT[:, 20:21]]), expected)
    cropped.evict([3, 4])
    cropped.compress(model)
    kvzip = EquipCache(model, "kvzip", BUDGET)
    logits(model, kvzip, [TEXT])
    kvzip.compress(model, input_ids=TEXT)
    assert kvzip.report().kept == (BUDGET, BUDGET)


def test_saved_copied_and_repeated_caches_go_on(tmp_path: Path) -> None:
    model = build()
    cache = EquipCache(model, "h2o", BUDGET, sinks=SINKS, recent=4)
    logits(model, cache, PARTS[:-1])
    cache.save(tmp_path / "cache")
    copies = [copy.deepcopy(cache), EquipCache.load(tmp_path / "cache", model)]
    expected = logits(model, cache, PARTS[-1:])
    for copied in copies:
        close(logits(model, copied, PARTS[-1:]), expected)
    copies[0].batch_repeat_interleave(3)
    assert logits(model, copies[0], [TEXT[:, :1].expand(3, 1)]).shape[0] == 3


def test_gradients_are_those_of_a_dynamic_cache() -> None:
    model = build()
    found = []
    for cache in (EquipCache(model, "streaming", 64), DynamicCache(config=model.config)):
        model.zero_grad()
        for part in (TEXT[:, :10], TEXT[:, 10:14], TEXT[:, 14:15]):
            output = model(input_ids=part, past_key_values=cache).logits
        output.square().sum().backward()
        found.append(latent_modules(model)[0].kv_b_proj.weight.grad.clone())
    close(*found)


@torch.no_grad()
def test_another_thread_uses_the_model_between_update_and_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    expected, results = logits(model, DynamicCache(config=model.config)), []
    plain = EquipCache.update

    def update(cache: EquipCache, *args: Any, **kwargs: Any) -> Any:
        states = plain(cache, *args, **kwargs)
        if not results:
            thread = threading.Thread(target=lambda: results.append(logits(model, DynamicCache(config=model.config))))
            thread.start()
            thread.join()
        return states

    monkeypatch.setattr(EquipCache, "update", update)
    close(logits(model, EquipCache(model, "streaming", 64)), expected)
    close(results[0], expected)


def test_two_threads_prune_with_one_model() -> None:
    model = build()
    expected = logits(model, EquipCache(model, "streaming", BUDGET, sinks=SINKS))
    results: list[torch.Tensor] = []

    def run() -> None:
        for _ in range(3):
            results.append(logits(model, EquipCache(model, "streaming", BUDGET, sinks=SINKS)))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 9
    for result in results:
        close(result, expected)
    assert all("expand_kv" not in vars(module) for module in model.modules())


def test_an_interrupt_between_update_and_attention_leaves_the_model_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    expected = logits(model, DynamicCache(config=model.config))
    plain = EquipCache.update

    def interrupted(cache: EquipCache, *args: Any, **kwargs: Any) -> Any:
        plain(cache, *args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EquipCache, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            logits(model, EquipCache(model, "streaming", 64))
    for each in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), model):
        close(logits(each, DynamicCache(config=each.config)), expected)
        close(logits(each, EquipCache(each, "streaming", 64)), expected)
    assert all("expand_kv" not in vars(module) for module in model.modules())


def test_a_cache_that_was_pickled_goes_on_when_the_first_one_is_gone() -> None:
    model = build()
    cache = EquipCache(model, "streaming", BUDGET, sinks=SINKS)
    logits(model, cache, [TEXT[:, :20]])
    restored = pickle.loads(pickle.dumps(cache))
    expected = logits(model, cache, [TEXT[:, 20:24]])
    del cache
    gc.collect()
    close(logits(model, restored, [TEXT[:, 20:24]]), expected)


def test_a_cache_of_another_model_is_refused() -> None:
    model, other = build(), build()
    with pytest.raises(UnsupportedError):
        logits(other, EquipCache(model, "streaming", 64))
    assert all("expand_kv" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"page_size": 16}, "not kept on pages"),
        ({"storage": "int8"}, "held in its dtype"),
        ({"head_budgets": "layer"}, "common to all heads"),
    ],
)
def test_what_needs_keys_of_heads_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        EquipCache(build(), **{"policy": "h2o", **options})


def test_caches_with_prompts_of_others_are_refused() -> None:
    model = build()
    own = DynamicCache(config=model.config)
    logits(model, own, PARTS[:1])
    with pytest.raises(UnsupportedError, match="takes none over"):
        EquipCache.from_cache(own, model, "streaming", 16)
    with pytest.raises(UnsupportedError, match="come from elsewhere"):
        EquipCache.from_cache(own, model, "streaming", 16, queries=[None, None])


class _Scaled(nn.Linear):
    """Stands for a quantized layer, or one with an adapter."""


@pytest.mark.parametrize("change", ["class", "bias", "hook"])
def test_a_projection_that_is_more_than_a_weight_is_refused(change: str) -> None:
    model = build()
    cache = EquipCache(model, "streaming", 64)
    projection = latent_modules(model)[1].kv_b_proj
    if change == "class":
        projection.__class__ = _Scaled
    elif change == "bias":
        projection.bias = nn.Parameter(torch.zeros(projection.out_features))
    else:
        projection.register_forward_hook(lambda *_: None)
    for use in (lambda: EquipCache(model, "streaming", 64), lambda: logits(model, cache)):
        with pytest.raises(UnsupportedError, match=r"kv_b_proj.*plain linear layer"):
            use()


def test_a_model_that_was_not_given_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(build().config).eval()
    with pytest.raises(UnsupportedError, match="latent attention"):
        EquipCache(model.config)


@pytest.mark.parametrize("policy", ["streaming", "keydiff", "tova"])
def test_latents_are_refused_where_a_process_has_some_of_the_heads(policy: str) -> None:
    model = build()
    model._tp_size = 2  # as `from_pretrained` leaves it in each of two processes
    with pytest.raises(UnsupportedError, match=r"all heads, needs all heads .* tensor parallelism .* Use DynamicCache"):
        EquipCache(model, policy, 16)


def test_a_layer_is_moved_away_when_its_queries_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    model, offload, seen = build(), EquipLayer.offload, list[tuple[int, int]]()
    expected = logits(model, EquipCache(model, "h2o", BUDGET, sinks=SINKS))

    def spy(layer: EquipLayer) -> None:
        seen.append((layer.layer_idx, layer.seen))
        offload(layer)

    monkeypatch.setattr(EquipLayer, "offload", spy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", MagicMock())
    monkeypatch.setattr(torch, "Stream", MagicMock())
    close(logits(model, EquipCache(model, "h2o", BUDGET, sinks=SINKS, offloading=True)), expected)
    assert seen == [(index, count) for count in (16, *range(21, 41)) for index in (0, 1)]

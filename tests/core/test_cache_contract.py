"""What transformers asks of a cache beside `update`: every cache answers as honestly as `DynamicCache` does."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import EquipCache, GrowingCache, SubspaceCache
from hf_kvcaches.core.layers import KVLayer
from tests import tiny
from tests.helpers.caches import SMALL

PROMPT = tiny.ids(1, 24)
MODELS = {"llama": tiny.llama, "hybrid": tiny.gemma2, "linear": tiny.lfm2}
CASES = [(family, name) for family in MODELS for name in SMALL if family != "linear" or name in ("growing", "equip", "equip, scores")]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def model_and_make(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Any]:
    family, name = request.param
    model = MODELS[family]()
    model.generation_config.eos_token_id = None
    return model, SMALL[name]


def answer(model: PreTrainedModel, cache: Any, prompt: torch.Tensor = PROMPT, new: int = 6) -> torch.Tensor:
    return model.generate(prompt, past_key_values=cache, max_new_tokens=new, do_sample=False, pad_token_id=0)


def test_an_empty_and_a_filled_cache_say_of_themselves_what_is_true(model_and_make: Any) -> None:
    model, make = model_and_make
    cache, plain = make(model), DynamicCache(config=model.config)
    assert len(cache) == len(plain) == model.config.num_hidden_layers
    for filled in (False, True):
        if filled:
            answer(model, cache)
            answer(model, plain)
        assert cache.is_initialized is filled
        assert cache.get_seq_length() == plain.get_seq_length()
        assert type(cache.get_seq_length()) is int
        assert all(layer.is_compileable in (True, False) for layer in cache.layers)
        assert f"seen={plain.get_seq_length()}" in repr(cache)
        for name in ("is_sliding", "is_dummy", "is_linear"):
            if hasattr(plain, name) and not (name == "is_sliding" and not isinstance(cache, GrowingCache | EquipCache | SubspaceCache)):
                assert getattr(cache, name) == getattr(plain, name), name
        if hasattr(plain, "get_max_length"):
            assert cache.get_max_length(len(cache)) == -1
            assert all(layer.get_max_length() == -1 for layer in cache.layers if isinstance(layer, KVLayer))
        if hasattr(plain, "get_query_offset"):
            assert cache.get_query_offset() == plain.get_query_offset()
        assert not any(getattr(cache, "is_recording_past", lambda layer: False)(layer) for layer in range(len(cache)))


@pytest.mark.skipif(not hasattr(DynamicCache, "early_initialization"), reason="newer than this transformers")
def test_what_was_initialized_early_answers_as_ever(model_and_make: Any) -> None:
    model, make = model_and_make
    early = make(model)
    dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    early.early_initialization(1, model.config.num_key_value_heads, dim, torch.float32, torch.device("cpu"))
    assert early.is_initialized
    assert (early.seen, max(early.report().kept)) == (0, 0)
    assert torch.equal(answer(model, early), answer(model, make(model)))
    early.reset()
    assert torch.equal(answer(model, early), answer(model, make(model)))


class DeferredStop:
    """What transformers' `DeferredStopCheck` does to a cache, which is returned one pass too far and put back."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        cache.activate_past_recording()

    def step(self) -> None:
        self.cache.crop(0)

    def finish(self, steps_to_undo: int) -> None:
        self.cache.crop(-steps_to_undo)
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


@torch.no_grad()
@pytest.mark.parametrize("undone", [0, 1])
def test_a_stop_that_is_noticed_one_pass_late_leaves_the_cache_as_if_it_had_been_in_time(model_and_make: Any, undone: int) -> None:
    model, make = model_and_make
    late, plain = make(model), make(model)
    if not getattr(late, "is_croppable", False):
        pytest.skip("it is left to wait at each step")
    text = answer(model, plain, new=7)
    answer(model, late, new=1)
    stop = DeferredStop(late)
    for index in range(PROMPT.shape[1], PROMPT.shape[1] + 6):
        model(input_ids=text[:, index : index + 1], past_key_values=late, logits_to_keep=1)
        stop.step()
    if undone:
        model(input_ids=tiny.ids(1, 1, seed=9), past_key_values=late, logits_to_keep=1)
    stop.finish(undone)
    assert late.seen == plain.seen
    assert not any(getattr(late, "is_recording_past", lambda layer: False)(layer) for layer in range(len(late)))
    longer = torch.cat([text, tiny.ids(1, 9, seed=3)], 1)
    assert answer(model, late, longer).tolist() == answer(model, plain, longer).tolist()
    assert late.report().kept == plain.report().kept
    assert late.report().bytes == plain.report().bytes

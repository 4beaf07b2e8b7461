"""Models with a position for each axis of an image: text is plain rotation, images are refused before they are computed."""

import gc

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache, LlamaConfig

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.errors import UnsupportedError
from tests import tiny

TOKENS = 24
TEXT = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"]  # one after the other, interleaved, and pairs of neighbours


def build(model_type: str):
    torch.manual_seed(0)
    text = dict(TEXT)
    if model_type == "glm4v":
        text["rope_parameters"] = {**TEXT["rope_parameters"], "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=VISION)
    return AutoModelForImageTextToText.from_config(config).eval()


def image_positions() -> torch.Tensor:
    """Of a text with an image of 3 by 4 tokens in it, (3, 1, tokens)."""
    grid = torch.stack([torch.zeros(12, dtype=torch.long), torch.arange(12) // 4, torch.arange(12) % 4]) + 6
    before, after = torch.arange(6).expand(3, 6), torch.arange(10, TOKENS - 8).expand(3, -1)
    return torch.cat([before, grid, after], 1)[:, None]


def run(model, cache, positions: torch.Tensor | None) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tiny.ids(1, TOKENS), position_ids=positions, past_key_values=cache).logits


@pytest.mark.parametrize("model_type", FAMILIES)
def test_keys_of_text_are_rotated_as_by_one_axis(model_type: str) -> None:
    model = build(model_type)
    near, far = (DynamicCache(config=model.config) for _ in range(2))
    positions = torch.arange(TOKENS).expand(3, 1, -1)
    run(model, near, positions)
    run(model, far, positions + 13)
    geometry = RotaryGeometry.from_config(model.config, layer_idx=0)
    assert geometry.axes
    for before, after in zip(near.layers, far.layers, strict=True):
        torch.testing.assert_close(geometry.shift(before.keys, 13), after.keys, rtol=0, atol=2e-5)


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_images_are_refused_before_anything_is_stored(model_type: str, with_index: bool) -> None:
    model = build(model_type)
    cache, other = EquipCache(model, "streaming", 100), DynamicCache(config=model.config)
    index = torch.arange(TOKENS)[None, None]
    image = image_positions()
    with pytest.raises(UnsupportedError, match=r"position for each axis.*positions='original'"):
        run(model, cache, torch.cat([index, image]) if with_index else image)
    assert cache.get_seq_length() == 0
    text = index.expand(3, -1, -1)
    run(model, other, image)
    for positions in (torch.cat([index, text]) if with_index else text, index[0] + TOKENS, None):
        run(model, cache, positions)
    assert cache.get_seq_length() == 3 * TOKENS


def test_generated_text_is_not_refused_and_nothing_is_left_on_the_model() -> None:
    model = build("qwen2_vl")
    cache, decoder = EquipCache(model, "streaming", 100), model.get_decoder()
    ids = tiny.ids(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=[])
    assert cache.get_seq_length() == 15
    assert len(decoder._forward_pre_hooks) == 1
    del cache
    gc.collect()
    assert not decoder._forward_pre_hooks


def test_models_of_text_alone_have_one_axis() -> None:
    assert not RotaryGeometry.from_config(LlamaConfig(hidden_size=32, num_attention_heads=4), layer_idx=0).axes

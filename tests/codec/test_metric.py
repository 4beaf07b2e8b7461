"""What errors cost, against the modules and the logits of models of several families."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_kvcaches.codec.metric import before_rotation, output_metric
from hf_kvcaches.compat import base_model
from hf_kvcaches.core.decoder import attention_module
from hf_kvcaches.core.rope import RotaryGeometry
from tests.translate.models import MODELS, layers_of


def squares(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """W'W of each head, of an output projection (inputs, hidden)."""
    rows = weight.detach().double().unflatten(0, (heads, -1))
    return rows @ rows.mT


@pytest.mark.parametrize("family", sorted(MODELS))
def test_the_output_metric_is_that_of_the_modules_weight_without_its_bias(family):
    attention = attention_module(layers_of(MODELS[family]())[1])
    projection = next(getattr(attention, name) for name in ("o_proj", "c_proj", "dense") if hasattr(attention, name))
    weight = projection.weight if isinstance(projection, Conv1D) else projection.weight.T
    found = output_metric(attention, len(weight) // 8, torch.zeros(1, 1, 1, 8))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, squares(weight, len(weight) // 8), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_count_in_the_output_metric(dtype):
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["o_proj"], init_lora_weights=False)
    wrapped = get_peft_model(copy.deepcopy(MODELS["qwen2"]()), config).eval()
    projection = layers_of(base_model(wrapped))[2].self_attn.o_proj
    adapter = (16 / 4 * projection.lora_B["default"].weight @ projection.lora_A["default"].weight).detach()
    expected = squares((projection.base_layer.weight + adapter).T, 4)
    assert float(adapter.abs().max()) > 0.01
    wrapped.to(dtype)
    found = output_metric(layers_of(base_model(wrapped))[2].self_attn, 4, torch.zeros(1, 1, 1, 8, dtype=dtype))
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_an_attention_without_a_known_output_projection_has_no_output_metric():
    assert output_metric(nn.Identity(), 4, torch.zeros(1, 1, 1, 8)) is None


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_gradients_before_a_rotation_are_those_through_it_also_where_it_scales_and_leaves_dimensions_alone(layout, rotary_dim):
    frequencies = 10.0 ** -torch.arange(rotary_dim // 2, dtype=torch.float64)
    geometry = RotaryGeometry(frequencies, 8, layout=layout, attention_scaling=1.5)
    keys, weights = (torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    keys.requires_grad_()
    positions = torch.arange(5) + 7
    (geometry.rotate(keys, positions) * weights).sum().backward()
    torch.testing.assert_close(before_rotation(geometry, weights, positions), keys.grad)

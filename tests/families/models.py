"""A tiny model of every architecture that transformers can generate text with, built from its config class alone.

Sizes are found by name: what configs call alike is made small alike, and nested configs are made small in turn. What a config needs
besides stands in `special.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.families import special

VOCABULARY = 128
TOKEN_LIMIT = 100  # prompts use ids below; special tokens have ids above
LAYERS = 4
WINDOW = 8

# Any of these attributes, in any config, becomes this.
_SIZES: tuple[tuple[Any, str], ...] = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size num_embeddings"),
    (64, "hidden_size d_model n_embd dim_model embed_dim emb_dim word_embed_proj_dim width"),
    (
        64,
        """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size moe_intermediate_size moe_ffn_hidden_size
        shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size intermediate_size_mlp mlp_dim dim_ff
        d_ff n_inner d_inner block_ff_dim expert_intermediate_size share_expert_dim dense_intermediate_size expert_ffn_hidden_size""",
    ),
    (
        64,
        """out_hidden_size text_hidden_size projector_hidden_size projection_hidden_size projection_hidden_dim vision_hidden_size
        projection_intermediate_size alignment_intermediate_size image_token_embed_dim vision_output_dim""",
    ),
    (LAYERS, "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers depth"),
    (
        4,
        """num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_encoder_attention_heads
        num_decoder_attention_heads attention_heads swa_num_attention_heads num_sliding_attention_heads""",
    ),
    (2, "num_key_value_heads swa_num_key_value_heads num_global_key_value_heads num_kv_heads"),
    (16, "head_dim swa_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim d_kv dim_head kv_channels"),
    (32, "kv_lora_rank q_lora_rank base_channels"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_layer moe_num_primary_experts"),
    (2, "num_experts_per_tok moe_topk moe_k top_k_experts moe_top_k num_experts_per_token"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group"),
    (512, "max_position_embeddings n_positions max_seq_len max_target_positions max_sequence_length context_length seq_length"),
    (WINDOW, "sliding_window sliding_window_size attention_window_size window_size attention_chunk_size"),
    (2 * WINDOW, "local_attention"),  # on both sides
    (0, "pad_token_id"),
    (True, "is_decoder"),
    (None, "eos_token_id bos_token_id decoder_start_token_id forced_eos_token_id"),
)
SIZES: dict[str, Any] = {name: size for size, names in _SIZES for name in names.split()}


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture; "@image" is behind the name of those of `AutoModelForImageTextToText`. `changes` are to its config."""

    name: str
    model_type: str
    class_name: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def families() -> list[Family]:
    """All architectures, those for text first."""
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    pictures = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    found = [Family(kind, kind, name) for kind, name in causal.items()]
    # Some stand in both lists with one class.
    found += [Family(f"{kind}@image", kind, name) for kind, name in pictures.items() if causal.get(kind) != name]
    # What an architecture does only with another config than its default.
    return found + [Family(f"{kind}+{name}", kind, causal[kind], changes) for (kind, name), changes in special.VARIANTS.items()]


def config_of(family: Family) -> PreTrainedConfig:
    """The small config of an architecture."""
    kind = CONFIG_MAPPING[family.model_type]
    return kind(**_shrunk(kind) | dict(family.changes))


def _shrunk(kind: type[PreTrainedConfig], **given: Any) -> dict[str, Any]:
    """What a config's constructor is given so that everything is small."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    specials = special.SPECIAL.get(kind.model_type, {})
    values = {name: value for name, value in given.items() if name not in SIZES and _is_small(value)}
    values |= {name: SIZES[name] for name in fields if name in SIZES}
    if "sliding_window" in fields and fields["sliding_window"].default is None and "layer_types" not in fields:
        del values["sliding_window"]
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name in ("bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if name in fields and fields[name].type in (int, "int"):
            values[name] = 1
    values |= _token_ids(fields)
    values |= _layer_types(kind, values, specials)
    for name, spec in getattr(kind, "sub_configs_defaults", {}).items():
        if name in specials or spec.optional:
            continue
        inner = spec.get_config_class(spec.model_type)
        values[name] = {"model_type": inner.model_type} | _shrunk(inner, **(spec.init_kwargs or {}))
    return values | specials


def _is_small(value: Any) -> bool:
    return isinstance(value, bool | str) or (isinstance(value, int) and value <= 16)


def _token_ids(fields: dict[str, Any]) -> dict[str, int]:
    """Special tokens that no prompt has, each another."""
    names = [name for name in fields if name.endswith(("_token_id", "_token_index", "_token_ids")) and name not in SIZES]
    return {name: TOKEN_LIMIT + number for number, name in enumerate(names) if not name.endswith("ids")}


def _layer_types(kind: type[PreTrainedConfig], values: dict[str, Any], specials: dict[str, Any]) -> dict[str, Any]:
    """Layers of all types that the architecture has by default, in turn."""
    if "layer_types" in specials or not any(field.name == "layer_types" for field in dataclasses.fields(kind)):
        return {}
    types = getattr(kind(), "layer_types", None)
    if not types:
        return {}
    distinct = list(dict.fromkeys(types))
    count = specials.get("num_hidden_layers", values.get("num_hidden_layers", LAYERS))
    return {"layer_types": [distinct[number % len(distinct)] for number in range(count)]}


def build(family: Family) -> PreTrainedModel:
    """The architecture's small model; the same weights each time."""
    torch.manual_seed(0)
    config, kind = config_of(family), getattr(transformers, family.class_name)
    if isinstance(config.get_text_config(), kind.config_class):
        config = config.get_text_config()
    model = kind._from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(sum(family.model_type.encode()))
    for name, parameter in sorted(model.named_parameters()):
        _draw(name, parameter, generator, model)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()


@torch.no_grad()
def _draw(name: str, parameter: nn.Parameter, generator: torch.Generator, model: PreTrainedModel) -> None:
    """Weights large enough that the text decides what comes next; drawn at 0.02 all logits would nearly tie."""
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.ndim < 2:
        parameter.add_(0.1 * noise)
    elif "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
        parameter.copy_(noise)
    else:
        parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)

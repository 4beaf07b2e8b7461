"""What single configs need besides small sizes, and which architectures are left out."""

from typing import Any

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_AXES = {"rope_parameters": _MROPE}
_HALF_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 8}
_INDEX_HEADS = {"index_head_dim": 16, "index_n_heads": 2}
_INDEXER = _INDEX_HEADS | {"index_topk": 8}
_RATES = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_SHARING = {"layer_types": _ALTERNATING, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "max_position_embeddings": 512, "beta_fast": 32.0}
_LINEAR = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}

# By model type (of the config or of a nested one): what the constructor is given, beyond `SIZES`.
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4_text"), _INDEXER),
    **dict.fromkeys(
        """cosmos3_edge_text glm4v_text glm_ocr_text glm46v_text qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text qwen3_omni_moe_text
        paddleocr_vl_text hunyuan_vl_text""".split(),
        _AXES,
    ),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _LINEAR | {"rope_parameters": _HALF_MROPE}),
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "inkling_text": {"rel_extent": 16, "log_scaling_n_floor": 8},
    "inkling2_text": {"rel_extent": 16, "log_scaling_n_floor": 8},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 125},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 125},
    "blt_local_encoder": {"hidden_size_global": 64},
    "blt_local_decoder": {"hidden_size_global": 64},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "bamba": _MAMBA_2 | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": _MAMBA_2 | {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "falcon_h1": _MAMBA_2 | {"mamba_d_ssm": 128},
    "blt": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 4},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _MROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": _ROPE,
    },
    "dots3_note_vision_encoder": {"per_layer_config": {}, "adapter_in_dim": 64, "adapter_out_dim": 64, "mlp_layer_types": ["dense"] * 4},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_text": _INDEXER | {"per_layer_config": {}, "use_dsa": True, "head_dim": 32},
    "hy_v4_vl_text": _INDEXER | {"rope_parameters": _MROPE},
    "minimax_m3_vl_text": _INDEX_HEADS
    | {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_block_size": 4, "index_topk_blocks": 2, "rotary_dim": 8},
    "deepseek_v4": _INDEX_HEADS | {"compress_rates": _RATES, "index_topk": 4, "o_groups": 2, "o_lora_rank": 16},
    "glm5_next_text": _INDEXER | {"qk_rope_head_dim": 0, "index_kpool": 4, "linear_head_dim": 16, "linear_num_heads": 4},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "gemma3n_text": _SHARING | {"num_hidden_layers": 4, "laurel_rank": 16},
    "gemma4_text": _SHARING | {"global_head_dim": 8},
    "gemma4_unified_text": {"global_head_dim": 8, "layer_types": _ALTERNATING},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "qwen4_exp_text": _LINEAR
    | dict.fromkeys(("indexer_head_dim", "indexer_budget", "hc_lowrank"), 16)
    | {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_compress_ratio": 4,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
    },
    "qwen3_next": _LINEAR,
    "glm4v_moe_text": {"rope_parameters": _HALF_MROPE},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32], "rope_parameters": _MROPE | {"mrope_section": [3, 3, 2]}},
    "emu3": {"vocabulary_map": {"<image>": 120}, "pad_token_id": 0},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_d_state": 16,
        "n_mamba_heads": 4,
        "chunk_size": 8,
        "num_hidden_layers": 4,
    },
    "roc_bert": {"pronunciation_vocab_size": 128, "shape_vocab_size": 128, "pronunciation_embed_dim": 16, "shape_embed_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "chameleon": {"vocabulary_map": {"<image>": 120}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "florence_vision": {},
    "granite4_vision": {"deepstack_layer_map": [(1, 1)], "downsample_rate": "1/2"},
    "molmo2_adapter": {"vision_feature_layer": [1, 2]},
    # Short texts have a temperature too.
    "llama4_text": {"floor_scale": 4},
    "ministral3": {"rope_parameters": _ROPE | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8}},
    "mistral4": {
        "rope_parameters": _ROPE | _YARN | dict.fromkeys(("beta_slow", "mscale", "mscale_all_dim"), 1.0) | {"llama_4_scaling_beta": 0.5}
    },
    "moshi": {"sliding_window": 512},  # only its cache knows of the window, its mask does not
    "pixtral": {"image_size": 28},
    "muse_spark_audio": {"hidden_sizes": (16, 16, 16, 64)},
    "janus_vision_model": {"projection_dim": 64},
    "llama4_vision_model": {"projector_output_dim": 64, "projector_input_dim": 64},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8},
    "evolla": {"protein_encoder_config": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}},
}

# Further configs, by model type and a name.
VARIANTS: dict[tuple[str, str], dict[str, Any]] = {("falcon", "alibi"): {"alibi": True}, ("mistral", "full"): {"sliding_window": None}}

# Architectures that don't run with a `DynamicCache` as a text's cache, and why.
_NO_CACHE = "takes no past_key_values in generate"
_ENCODER = "encoder-decoder: needs an EncoderDecoderCache"
_PICTURE = "answers only with a picture"
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "openai-gpt", "xlm", "xlnet", "rwkv", "reformer", "xlstm"), _NO_CACHE),
    **dict.fromkeys(
        ("t5gemma2@image", "udop@image", "pix2struct@image", "florence2@image", "vision-encoder-decoder@image", "pp_formulanet@image"),
        _ENCODER,
    ),
    **dict.fromkeys(
        ("blip@image", "blip-2@image", "instructblip@image", "instructblipvideo@image", "idefics@image", "kosmos-2@image"), _PICTURE
    ),
    "minimax": "has a cache of its own",
    "diffusion_gemma@image": "writes by diffusion",
    "pi0@image": "writes no text",
    "musicgen": "encoder-decoder: its config is that of the whole",
    "musicgen_melody": "encoder-decoder: its config is that of the whole",
    "fast_vlm@image": "needs timm",
    "perception_lm@image": "needs timm",
    "gemma3n": "needs timm; its text model stands in the list by itself",
    "apertus1p5@image": "its config asks for a vocabulary with all audio tokens; its text model stands in the list by itself",
    "llama4@image": "fails with a text alone in transformers 5.24; its text model stands in the list by itself",
    "gemma4_assistant": "has no keys of its own",
    "gemma4_unified_assistant": "has no keys of its own",
}

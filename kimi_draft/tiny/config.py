"""Sizes of the tiny model, and the hub-style config.json of target and drafts.

Every vision size is given twice: SGLang's tower and transformers read `hidden_size`, ..., SGLang's projector reads
`vt_hidden_size` and `text_hidden_size`. The real config.json only carries the `vt_*` names and relies on defaults that
happen to be right for the 1T model.
"""

from typing import Any

from kimi_draft.tiny import tokenizer

HIDDEN, LAYERS, HEADS = 96, 5, 4
VISION_HIDDEN, VISION_LAYERS = 48, 2
PATCH, MERGE, POSITIONS = 14, 2, 8
# Layers whose output feeds the draft. A list that starts with 1 is shifted by one in SGLang ("hidden entering layer
# i+1").
AUX_LAYERS = (1, 2, 3)
DRAFT_INTERMEDIATE = 128
# 1024 patches = at most about 256 tokens an image: a 2000x1500 photo becomes 19x14 = 266 with its padding.
MEDIA: dict[str, Any] = {
    "patch_size": PATCH,
    "merge_kernel_size": MERGE,
    "in_patch_limit": 1024,
    "patch_limit_on_one_side": 64,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _mla() -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "vocab_size": tokenizer.vocab_size(),
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
        },
        # Not the real 1e-5: transformers builds the two inner norms of MLA with its default 1e-6, SGLang with this
        # value.
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **_special_ids(),
    }


def _special_ids() -> dict[str, int]:
    return {
        "bos_token_id": tokenizer.token_id("[BOS]"),
        "eos_token_id": tokenizer.token_id("[EOS]"),
        "pad_token_id": tokenizer.token_id("[PAD]"),
    }


def target_config() -> dict[str, Any]:
    """config.json of the target: readable by SGLang (hub names) and by transformers' `Kimi_K25Config`."""
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_mla(),
        "num_hidden_layers": LAYERS,
        "intermediate_size": 192,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
        "initializer_range": 0.06,
    }
    vision = {
        "patch_size": PATCH,
        "merge_kernel_size": [MERGE, MERGE],
        "merge_type": "sd2_tpool",
        "video_attn_type": "spatial_temporal",
        "pos_emb_type": "divided_fixed",
        "init_pos_emb_height": POSITIONS,
        "init_pos_emb_width": POSITIONS,
        "init_pos_emb_time": 4,
        "pos_emb_height": POSITIONS,
        "pos_emb_width": POSITIONS,
        "pos_emb_time": 4,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": 2 * VISION_HIDDEN,
        "num_attention_heads": 4,
        "num_hidden_layers": VISION_LAYERS,
        "vt_hidden_size": VISION_HIDDEN,
        "vt_intermediate_size": 2 * VISION_HIDDEN,
        "vt_num_attention_heads": 4,
        "vt_num_hidden_layers": VISION_LAYERS,
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": VISION_HIDDEN,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": HIDDEN,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "float32",
        "text_config": text,
        "vision_config": vision,
        "projection_hidden_size": VISION_HIDDEN,
        "media_placeholder_token_id": tokenizer.token_id("<|media_pad|>"),
        "image_token_id": tokenizer.token_id("<|media_pad|>"),
        "video_token_id": tokenizer.token_id(tokenizer.VIDEO_PLACEHOLDER),
        "vision_start_token_id": tokenizer.token_id("<|media_begin|>"),
        "vision_end_token_id": tokenizer.token_id("<|media_end|>"),
        "video_placeholder": tokenizer.VIDEO_PLACEHOLDER,
        "use_unified_vision_chunk": True,
        "ignore_index": -100,
        "tie_word_embeddings": False,
        **_special_ids(),
        "auto_map": {"AutoProcessor": "processing_tiny_kimi.TinyKimiProcessor"},
    }


def draft_config(draft_vocab: int | None = None, eagle31: bool = False) -> dict[str, Any]:
    """config.json of an EAGLE3-MLA draft; without ``draft_vocab`` it has the full vocabulary and needs no ``d2t``."""
    config = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        **_mla(),
        "num_hidden_layers": 1,
        "intermediate_size": DRAFT_INTERMEDIATE,
        # The draft layer is dense, yet SGLang's DeepSeek code reads these three as integers.
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "target_hidden_size": HIDDEN,
        "draft_vocab_size": draft_vocab or tokenizer.vocab_size(),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
    }
    return config | ({"fc_norm": True, "norm_output": True} if eagle31 else {})

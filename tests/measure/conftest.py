"""Tiny models of every family of ``transformers`` that is promised."""

import pytest

_SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 24, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_GROUPED = _SHAPE | {"num_key_value_heads": 2}
_WINDOWED = _GROUPED | {"head_dim": 12, "sliding_window": 6}
_TWO_KINDS = _WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
_ROUTED = _GROUPED | {"num_experts_per_tok": 2}
_EXPERTS = _ROUTED | {"moe_intermediate_size": 16, "norm_topk_prob": True, "num_experts": 4}
_LATENT = _SHAPE | {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_OPT = {name: value for name, value in _SHAPE.items() if name != "intermediate_size"} | {"ffn_dim": 48}
_NARROW = {"vocab_size": 61, "n_layer": 2, "n_head": 4}
_MULTIPLIERS = ("residual_multiplier", "attention_multiplier", "embedding_multiplier")

#: Name (it begins with the model type) → (architecture, config). None of them can be our decoder.
_FAMILIES = {
    "mistral": ("Mistral", _WINDOWED | _ROPE | {"rms_norm_eps": 1e-4}),
    "gemma": ("Gemma", _GROUPED | {"head_dim": 12}),
    "gemma2": ("Gemma2", _WINDOWED | {"query_pre_attn_scalar": 30, "attn_logit_softcapping": 2.0}),
    "gemma2 uncapped": ("Gemma2", _WINDOWED | {"query_pre_attn_scalar": 30, "attn_logit_softcapping": None}),
    "gemma3_text": ("Gemma3", _TWO_KINDS),
    "olmo": ("Olmo", _GROUPED | {"clip_qkv": 1.0}),
    "olmo3": ("Olmo3", _TWO_KINDS),
    "smollm3": ("SmolLM3", _GROUPED | {"no_rope_layers": [1, 0]}),
    "gpt_oss": ("GptOss", _TWO_KINDS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("Mixtral", _ROUTED | {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 16, "mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS | {"head_dim": 12}),
    "qwen3_next": ("Qwen3Next", _EXPERTS | {
        "num_hidden_layers": 4, "head_dim": 12, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }),
    "olmoe": ("Olmoe", _ROUTED | {"num_experts": 4}),
    "deepseek_v2": ("DeepseekV2", _LATENT | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "phi": ("Phi", _GROUPED | {"qk_layernorm": True}),
    "phi3": ("Phi3", _GROUPED | {"sliding_window": 6}),
    "opt": ("OPT", _OPT | {"word_embed_proj_dim": 32}),
    "opt post-norm, narrow table": ("OPT", _OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "bloom": ("Bloom", _NARROW | {"hidden_size": 32}),
    "falcon": ("Falcon", _SHAPE | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon one key head": ("Falcon", _SHAPE | {"parallel_attn": True, "multi_query": True}),
    "falcon alibi, serial": ("Falcon", _SHAPE | {"alibi": True, "parallel_attn": False, "multi_query": False}),
    "gptj": ("GPTJ", _NARROW | {"n_embd": 32, "n_positions": 24, "rotary_dim": 4}),
    "gpt_neo": ("GPTNeo", {
        "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 24,
        "attention_types": [[["global", "local"], 1]], "window_size": 6,
    }),
    "stablelm": ("StableLm", _GROUPED),
    "stablelm parallel": ("StableLm", _GROUPED | {"use_parallel_residual": True, "qk_layernorm": True}),
    "granite": ("Granite", _GROUPED | dict(zip(_MULTIPLIERS, (0.4, 0.3, 3.0), strict=True))),
    "cohere": ("Cohere", _GROUPED | {"use_qk_norm": True}),
    "cohere2": ("Cohere2", _TWO_KINDS),
    "starcoder2": ("Starcoder2", _GROUPED | {"sliding_window": 6}),
    "mpt": ("Mpt", {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 24}),
}  # fmt: skip


@pytest.fixture(scope="session")
def family_names():
    """Models of transformers that our decoder cannot be; each begins with its model type."""
    return list(_FAMILIES)


@pytest.fixture(params=_FAMILIES)
def family_name(request):
    """Each of them in turn."""
    return request.param


@pytest.fixture(scope="session")
def family_model(enliven):
    """``family_model(name, attention="eager", **more)``: one of them, with random values everywhere."""
    import transformers

    transformers.logging.set_verbosity_error()

    def build(name, attention="eager", **more):
        architecture, config = _FAMILIES[name]
        kind = getattr(transformers, f"{architecture}ForCausalLM")
        return enliven(kind(kind.config_class(**config | more, attn_implementation=attention)))

    return build

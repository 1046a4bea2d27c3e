"""The decoder, configured as the field's own models, equals them as `transformers` has them."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor

from birthmark.models.attention.positions import AlibiPositions, T5Positions
from birthmark.models.config import AttentionConfig, ModelConfig

SMALL = {"d_model": 32, "n_layers": 3, "n_heads": 4, "d_ff": 48, "vocab_size": 61, "max_seq_len": 24}


def to_llama(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters, or their gradients, under the names of ``LlamaForCausalLM``."""
    parts = {
        "norm_attn.gain": "input_layernorm.weight",
        "norm_mlp.gain": "post_attention_layernorm.weight",
        **{f"attn.{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkvo"},
        **{f"mlp.{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    }
    names = {"embed.weight": "model.embed_tokens.weight", "norm.gain": "model.norm.weight"}
    names |= {"head.weight": "lm_head.weight"}
    for i in range(SMALL["n_layers"]):
        names |= {f"blocks.{i}.{a}": f"model.layers.{i}.{b}" for a, b in parts.items()}
    assert names.keys() == ours.keys()
    return {names[name]: value for name, value in ours.items()}


def to_gpt2(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same for ``GPT2LMHeadModel``, whose matrices are transposed and whose q, k and v are one matrix."""
    theirs = {
        "transformer.wte.weight": ours["embed.weight"],
        "transformer.wpe.weight": ours["positions.table.weight"],
        "transformer.ln_f.weight": ours["norm.gain"],
        "transformer.ln_f.bias": ours["norm.bias"],
    }
    for i in range(SMALL["n_layers"]):
        block = {name.removeprefix(f"blocks.{i}."): v for name, v in ours.items() if name.startswith(f"blocks.{i}.")}
        theirs |= {
            f"transformer.h.{i}.{name}": value
            for name, value in {
                "ln_1.weight": block["norm_attn.gain"],
                "ln_1.bias": block["norm_attn.bias"],
                "ln_2.weight": block["norm_mlp.gain"],
                "ln_2.bias": block["norm_mlp.bias"],
                "attn.c_attn.weight": torch.cat([block[f"attn.{x}.weight"].T for x in "qkv"], dim=1),
                "attn.c_attn.bias": torch.cat([block[f"attn.{x}.bias"] for x in "qkv"]),
                "attn.c_proj.weight": block["attn.o.weight"].T,
                "attn.c_proj.bias": block["attn.o.bias"],
                "mlp.c_fc.weight": block["mlp.up.weight"].T,
                "mlp.c_fc.bias": block["mlp.up.bias"],
                "mlp.c_proj.weight": block["mlp.down.weight"].T,
                "mlp.c_proj.bias": block["mlp.down.bias"],
            }.items()
        }
    assert sum(v.numel() for v in theirs.values()) == sum(v.numel() for v in ours.values())
    return theirs


def llama_pair(lively):
    config = ModelConfig(**SMALL, n_kv_heads=2, mlp="swiglu", rope_base=500.0, norm_eps=1e-4)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=24,
            rms_norm_eps=1e-4,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    )
    return lively(config), theirs, to_llama


def gpt2_pair(lively):
    config = ModelConfig(
        **SMALL, mlp="gelu", norm="layernorm", norm_eps=1e-4, positions="learned", tie_embeddings=True, bias=True
    )
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=61,
            n_embd=32,
            n_inner=48,
            n_layer=3,
            n_head=4,
            n_positions=24,
            layer_norm_epsilon=1e-4,
            activation_function="gelu",
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            attn_implementation="eager",
        )
    )
    return lively(config), theirs, to_gpt2


def rotary_shape(**more):
    """What the configs of the rotary families have in common."""
    return {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
        "eos_token_id": 0,
        "pad_token_id": None,
        **more,
    }


def qwen3_pair(lively):
    """Each head's queries and keys are normalised."""
    config = ModelConfig(**SMALL, n_kv_heads=2, mlp="swiglu", norm_eps=1e-4, attention=AttentionConfig(qk_norm="head"))
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    shape = rotary_shape(num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-4, rope_parameters=rope)
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))

    def rename(ours):
        norms = {f"attn.{x}.norm.gain": f"self_attn.{x}_norm.weight" for x in "qk"}
        inner = {n: v for n, v in ours.items() if not n.endswith(tuple(norms))}
        blocks = {(i, a): b for i in range(3) for a, b in norms.items()}
        return to_llama(inner) | {f"model.layers.{i}.{b}": ours[f"blocks.{i}.{a}"] for (i, a), b in blocks.items()}

    return lively(config), theirs, rename


def olmo2_pair(lively):
    """All queries and keys are normalised together; blocks normalise their outputs, not their inputs."""
    attention = AttentionConfig(qk_norm="width")
    config = ModelConfig(**SMALL, n_kv_heads=2, mlp="swiglu", norm_eps=1e-4, norm_placement="post", attention=attention)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    shape = rotary_shape(num_key_value_heads=2, rms_norm_eps=1e-4, rope_parameters=rope)
    theirs = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**shape))
    parts = {
        "norm_attn_out.gain": "post_attention_layernorm.weight",
        "norm_mlp_out.gain": "post_feedforward_layernorm.weight",
        **{f"attn.{x}.norm.gain": f"self_attn.{x}_norm.weight" for x in "qk"},
        **{f"attn.{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkvo"},
        **{f"mlp.{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    }
    names = {"embed.weight": "model.embed_tokens.weight", "norm.gain": "model.norm.weight"}
    names |= {"head.weight": "lm_head.weight"}
    names |= {f"blocks.{i}.{a}": f"model.layers.{i}.{b}" for i in range(3) for a, b in parts.items()}
    return lively(config), theirs, lambda ours: {names[name]: value for name, value in ours.items()}


def neox_pair(lively):
    """Attention and MLP side by side; half of each head's channels turn."""
    config = ModelConfig(**SMALL, norm="layernorm", norm_eps=1e-4, bias=True, parallel_residual=True, rope_fraction=0.5)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    shape = rotary_shape(layer_norm_eps=1e-4, rope_parameters=rope, hidden_act="gelu", use_parallel_residual=True)
    theirs = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**shape))
    parts = {
        "norm_attn": "input_layernorm",
        "norm_mlp": "post_attention_layernorm",
        "attn.o": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }

    def rename(ours):
        names = {"embed.weight": "gpt_neox.embed_in.weight", "head.weight": "lm_head.weight"}
        names |= {f"norm.{a}": f"gpt_neox.final_layer_norm.{b}" for a, b in (("gain", "weight"), ("bias", "bias"))}
        theirs = {b: ours[a] for a, b in names.items()}
        for i in range(3):
            for a, b in parts.items():
                for ours_end, their_end in (("weight", "weight"), ("gain", "weight"), ("bias", "bias")):
                    if f"blocks.{i}.{a}.{ours_end}" in ours:
                        theirs[f"gpt_neox.layers.{i}.{b}.{their_end}"] = ours[f"blocks.{i}.{a}.{ours_end}"]
            for end in ("weight", "bias"):
                # Theirs lie head by head: a head's queries, its keys, its values.
                heads = [ours[f"blocks.{i}.attn.{x}.{end}"].unflatten(0, (4, 8)) for x in "qkv"]
                theirs[f"gpt_neox.layers.{i}.attention.query_key_value.{end}"] = torch.stack(heads, 1).flatten(0, 2)
        return theirs

    return lively(config), theirs, rename


@pytest.mark.parametrize("pair", [llama_pair, gpt2_pair, qwen3_pair, olmo2_pair, neox_pair])
def test_logits_and_gradients_equal_those_of_transformers(pair, lively, random_tokens):
    ours, theirs, rename = pair(lively)
    state = rename({name: p.detach() for name, p in ours.named_parameters()})
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied to a table that is there

    tokens = random_tokens(ours.config, length=20)
    logits, expected = ours(tokens), theirs.eval()(tokens).logits
    assert expected.std() > 0.5  # nothing to compare in a model that says nothing
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) / logits.shape[1]
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = rename({name: p.grad for name, p in ours.named_parameters()})
    their_parameters = dict(theirs.named_parameters())
    assert gradients.keys() == their_parameters.keys()
    for name, gradient in gradients.items():
        reference = their_parameters[name].grad
        assert reference.abs().max() > 1e-3 or name.endswith(
            ("c_attn.bias", "value.bias")
        )  # the key's bias has none: shift of a row
        torch.testing.assert_close(gradient, reference, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_t5_buckets_are_those_of_transformers(lively):
    from transformers.models.t5.modeling_t5 import T5Attention

    for n_buckets, longest in ((32, 128), (8, 20), (2, 2)):
        config = ModelConfig(**SMALL, positions="t5", t5_buckets=n_buckets, t5_max_distance=longest)
        positions = T5Positions(config)
        with torch.no_grad():
            positions.table.weight.copy_(torch.arange(n_buckets)[:, None].expand(-1, 4))
        bucket = T5Attention._relative_position_bucket(-torch.arange(300), False, n_buckets, longest)
        assert torch.equal(positions.place(300, torch.device("cpu")).bias_HS, bucket.float().expand(4, -1))
        late = positions.place(3, torch.device("cpu"), first=297)
        assert (late.first, late.bias_HS.shape) == (297, (4, 300))


@pytest.mark.parametrize("n_heads", [1, 2, 4, 8, 12, 14, 16, 20])
def test_alibi_slopes_are_those_of_transformers(n_heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    config = ModelConfig(d_model=n_heads * 4, n_heads=n_heads, positions="alibi")
    theirs = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)  # [heads, 1, 2]: slope times position
    torch.testing.assert_close(AlibiPositions(config).place(2, torch.device("cpu")).slopes_H, theirs[:, 0, 1])

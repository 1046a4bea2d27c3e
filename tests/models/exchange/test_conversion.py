"""Configs of ``transformers`` and ours: each read as the other where they say the same, and refused where not."""

import dataclasses
import json

import pytest
import torch
import transformers
import yaml
from transformers.activations import ACT2FN

from birthmark.errors import UsageError
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, CalibrationConfig, DropoutConfig, InitConfig, ModelConfig
from birthmark.models.exchange.conversion import config_from_json, config_to_json, family_of, tensor_mappings
from birthmark.models.exchange.families import ACTIVATIONS, FAMILIES
from birthmark.models.exchange.pretrained import load_pretrained, read_pretrained, save_pretrained, write_pretrained
from birthmark.models.exchange.written_layout import layout_of
from birthmark.trainer.by_name.shipped_configs import find_config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

PRESETS = {
    "gpt2-124m": "gpt2", "gpt2-1.5b": "gpt2", "llama2-7b": "llama", "llama3-8b": "llama", "tinyllama-1.1b": "llama",
    "olmo2-7b": "olmo2", "pythia-1b": "gpt_neox", "qwen3-0.6b": "qwen3", "qwen3-8b": "qwen3", "demo": "arcee",
}  # fmt: skip


def preset(name):
    fields = yaml.safe_load(find_config(name).read_text())["model"]
    inner = {"attention": AttentionConfig(**fields.get("attention", {})), "init": InitConfig(**fields["init"])}
    return ModelConfig(**fields | inner)


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "family"), PRESETS.items())
def test_a_published_model_has_the_tensors_that_transformers_gives_it(name, family):
    config = preset(name)
    content = config_to_json(config, family_of(config))
    assert content["model_type"] == family
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**content))
    head = "embed_out" if family == "gpt_neox" else "lm_head"
    expected = {name.replace("lm_head", head): tuple(p.shape) for name, p in theirs.named_parameters()}
    assert {part.hf_name: part.shape for part in tensor_mappings(config, family_of(config))} == expected


def test_configs_as_they_were_first_published_are_our_presets():
    gpt2 = {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
        "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
    }  # fmt: skip
    pythia = {
        "hidden_act": "gelu", "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 12,
        "num_hidden_layers": 12, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "torch_dtype": "float16", "use_parallel_residual": True, "vocab_size": 50304,
    }  # fmt: skip
    for name, content in {"gpt2-124m": gpt2, "pythia-160m": pythia}.items():
        d_ff = None if name == "gpt2-124m" else 3072
        assert config_from_json(content) == dataclasses.replace(preset(name), init=InitConfig("normal"), d_ff=d_ff)


def test_a_model_is_trained_on_with_its_rates_of_dropout(tmp_path):
    """The library has rates of its own for what a config leaves out."""
    config = dataclasses.replace(preset("gpt2-124m"), d_model=16, n_layers=1, n_heads=2, vocab_size=40, max_seq_len=8)
    model, tokens = born(config, 0), torch.arange(8)[None]
    save_pretrained(model, tmp_path / "none")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "none").train()
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=1e-5, rtol=1e-5)
    rates = DropoutConfig(embedding=0.2, residual=0.3, attention=0.4)
    for name, keys in {
        "gpt2": {"embd_pdrop": 0.2, "resid_pdrop": 0.3, "attn_pdrop": 0.4},
        "llama": {"attention_dropout": 0.4},
        "gpt_neox": {"hidden_dropout": 0.3, "attention_dropout": 0.4},
    }.items():
        (family,) = (family for family in FAMILIES if family.model_type == name)
        content = config_to_json(dataclasses.replace(config, dropout=rates), family)
        assert {key: value for key, value in content.items() if "drop" in key} == keys


def test_the_older_spelling_of_rotary_settings_is_read_and_written(their_folder, tmp_path):
    folder = their_folder("gpt_neox", tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    new = config_from_json(config)
    del config["rope_parameters"]
    old = config | {"rotary_emb_base": 10000, "rotary_pct": 0.5, "rope_scaling": None}
    assert config_from_json(old) == new
    assert config_from_json(config).rope_fraction == 0.25  # what transformers takes
    save_pretrained(load_pretrained(folder), tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["rotary_pct"], written["rotary_emb_base"]) == (0.5, 10000.0)

    llama = their_folder("llama", tmp_path / "llama")
    config = json.loads((llama / "config.json").read_text())
    del config["rope_parameters"]
    assert config_from_json(config | {"rope_theta": 500}).rope_base == 500.0
    assert config_from_json(config | {"rope_scaling": {"type": "default"}}).rope_base == 10000.0


#: Keys that say a model's type and shape.
SHAPE = {
    "model_type", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id",
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions",
}  # fmt: skip


def test_what_a_config_leaves_out_is_what_transformers_takes(our_name, their_config):
    theirs = their_config(our_name)
    short = {key: value for key, value in theirs.to_dict().items() if key in SHAPE}
    full = type(theirs)(**short).to_dict()
    read = [config_from_json(content) for content in (short, full)]
    one, other = (dataclasses.replace(c, n_kv_heads=c.kv_heads, head_dim=c.d_head, d_ff=c.ff) for c in read)
    assert one == other


@pytest.mark.parametrize("fields", [{"d_shared": 8}, {"n_dense": 1}, {"renormalise": False}])
def test_experts_that_no_family_has_leave_with_their_own_code(our_config, fields):
    mixtral = our_config("mixtral")
    config = dataclasses.replace(mixtral, experts=dataclasses.replace(mixtral.experts, **fields))
    with pytest.raises(UsageError, match=rf"model.experts.{next(iter(fields))} .* ha(s|ve) no counterpart .*mixtral"):
        family_of(config)
    assert layout_of(config).model_type == "birthmark"
    assert layout_of(mixtral).model_type == "mixtral"


REFUSED_KEYS = [
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers [0]"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
    ("mixtral", {"num_local_experts": None}, "num_local_experts is null"),
    ("mixtral", {"num_experts_per_tok": 9}, "model.experts.top_k is 9"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}, "rope_type 'llama3'"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ("llama", {"attention_bias": True}, "attention_bias True with mlp_bias False"),
    ("llama", {"hidden_act": "gelu_new"}, "hidden_act 'gelu_new'"),
    ("llama", {"hidden_act": "mish"}, "hidden_act 'mish'"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"hidden_size": "32"}, "hidden_size is '32'"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers is True"),
    ("llama", {"num_hidden_layers": 0}, "n_layers is 0"),
    ("llama", {"model_type": "mamba"}, "model_type 'mamba'"),
    ("llama", {"model_type": None}, "model_type None"),
    ("llama", {"model_type": ["llama"]}, "model_type ['llama']"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window True"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("qwen3", {"attention_bias": True}, "attention_bias True"),
    ("olmo2", {"attention_bias": True}, "attention_bias True"),
    ("gpt_neox", {"attention_bias": False}, "attention_bias False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights False"),
    ("gpt2", {"n_embd": None}, "n_embd is missing"),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000000"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps is null"),
    ("llama", {"hidden_act": None}, "hidden_act is null"),
]


@pytest.mark.parametrize(("name", "changes", "said"), REFUSED_KEYS, ids=[said for *_, said in REFUSED_KEYS])
def test_what_we_do_not_have_is_refused_by_key_and_value(name, changes, said, their_config):
    content = their_config(name).to_dict()
    config_from_json(content)
    with pytest.raises(UsageError) as error:
        config_from_json(content | changes, "here/config.json")
    assert str(error.value).startswith("here/config.json: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_scale_of_draws_above_any_float_or_of_0_is_none(their_config):
    """It decides nothing: the weights are there."""
    content = their_config("llama").to_dict()
    default = config_from_json(content | {"initializer_range": None})
    assert config_from_json(content | {"initializer_range": 10**400}) == default
    assert config_from_json(content | {"initializer_range": 1e39}) == default
    assert config_from_json(content | {"initializer_range": 0}) == default


def test_as_many_key_heads_as_heads_where_their_number_is_null(their_config):
    content = their_config("qwen2").to_dict()
    theirs = transformers.Qwen2Config(**content | {"num_key_value_heads": None})
    assert config_from_json(content | {"num_key_value_heads": None}).kv_heads == theirs.num_key_value_heads


def test_a_number_of_key_heads_that_is_left_out_is_the_librarys(our_name, their_config):
    theirs = their_config(our_name)
    content = theirs.to_dict() | {"hidden_size": 128, "num_attention_heads": 64}
    if content.pop("num_key_value_heads", None) is not None:
        assert config_from_json(content).kv_heads == type(theirs)(**content).num_key_value_heads


def test_activations_of_one_kind_are_one_function():
    x = torch.linspace(-6, 6, 1001)
    first = {kind: name for name, kind in reversed(ACTIVATIONS.items())}
    for name, kind in ACTIVATIONS.items():
        torch.testing.assert_close(ACT2FN[name](x), ACT2FN[first[kind]](x), atol=1e-5, rtol=1e-5)


def test_dropout_and_an_unused_window_change_nothing(their_shape):
    content = transformers.Qwen2Config(**their_shape).to_dict()
    more = {"attention_dropout": 0.1, "sliding_window": 4096, "max_window_layers": 1, "use_sliding_window": False}
    assert config_from_json(content | more) == config_from_json(content)


def attention(**fields):
    return {"attention": AttentionConfig(**fields)}


REFUSED_ARMS = [
    ("llama", attention(aggregation="headnorm"), "model.attention.aggregation headnorm has", "llama"),
    ("qwen3", attention(qk_norm="head", gate="head"), "model.attention.gate head has", "qwen3"),
    ("llama", {"positions": "alibi", "rope_base": 10000.0}, "model.positions alibi has", "llama"),
    ("llama", attention(normaliser="softmax_sink"), "model.attention.normaliser softmax_sink has", "llama"),
    ("llama", attention(window=[8, None]), "model.attention.window [8, None] has", "llama"),
    ("mistral", attention(window=1), "model.attention.window 1 has", "llama"),
    ("mixtral", attention(window=1), "model.attention.window 1 has", "mixtral"),
    ("llama", attention(prefix=4), "model.attention.prefix 4 has", "llama"),
    ("llama", attention(kv_bias="key"), "model.attention.kv_bias key has", "llama"),
    ("llama", attention(aggregation="calibrated", calibration=CalibrationConfig("analytic")),
     "model.attention.aggregation calibrated, model.attention.calibration.n_eff analytic have", "llama"),
    ("llama", {"norm_placement": "both"}, "model.norm_placement both has", "llama"),
    ("llama", {"norm": "none"}, "model.norm none has", "llama"),
    ("qwen3", {"mlp": "gelu"}, "model.mlp gelu has", "qwen3"),
    ("llama", {"rope_fraction": 0.5}, "model.rope_fraction 0.5 has", "llama"),
    ("llama", {"d_model": 36, "n_heads": 8, "n_kv_heads": 8, "head_dim": 8}, "model.head_dim 8 has", "llama"),
    ("gpt2", {"n_kv_heads": 2}, "model.n_kv_heads 2 has", "gpt2"),
    ("gpt2", {"head_dim": 16}, "model.head_dim 16 has", "gpt2"),
    ("gpt2", {"bias": False}, "model.bias False, model.attention.qkv_bias False have", "gpt2"),
    ("gpt_neox", {"n_kv_heads": 2}, "model.n_kv_heads 2 has", "gpt_neox"),
    ("gpt_neox", {"head_dim": 40}, "model.head_dim 40 has", "gpt_neox"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "said", "closest"), REFUSED_ARMS)
def test_an_arm_that_no_family_has_is_refused_by_name(name, changes, said, closest, our_config, tmp_path):
    config = our_config(name, **changes)
    with pytest.raises(UsageError) as error:
        write_pretrained(config, {}, tmp_path / "out")
    assert str(error.value).startswith(f"{said} no counterpart in transformers: the closest family, {closest}, has ")
    assert not (tmp_path / "out").exists()


def test_the_distribution_at_birth_is_no_part_of_the_exchange(our_config, tmp_path):
    for init in (InitConfig("xavier"), InitConfig("gpt2", 0.5)):
        config = our_config("gpt2", init=init)
        save_pretrained(born(config, 0), tmp_path / init.kind)
        assert read_pretrained(tmp_path / init.kind).config.init == InitConfig("normal", init.std)

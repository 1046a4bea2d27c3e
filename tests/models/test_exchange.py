"""Checkpoints of ``transformers``: the same logits, the same bits, and nothing read or written that is not exact."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import birthmark
from birthmark.data.tokenizer import train_bpe
from birthmark.errors import RunError, UsageError
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, CalibrationConfig, InitConfig, ModelConfig
from birthmark.models.exchange import load_pretrained, read_pretrained, save_pretrained, write_pretrained
from birthmark.models.translate import config_from_json, config_to_json, family_of, pieces

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

ROTARY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = ROTARY | {"num_key_value_heads": 2, "rms_norm_eps": 1e-4}


def rope(theta, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


GPT2 = {
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 24,
    "layer_norm_epsilon": 1e-4,
    "bos_token_id": None,
    "eos_token_id": None,
}
#: (architecture, its config)
THEIRS = {
    "gpt2": ("GPT2", GPT2),
    "gpt2 untied, relu, narrow": (
        "GPT2",
        GPT2 | {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "relu"},
    ),
    "llama": ("Llama", GROUPED | rope(500.0)),
    "llama tied, biased, wide heads": (
        "Llama",
        GROUPED | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "qwen2": ("Qwen2", GROUPED | rope(1e6)),
    "qwen2 tied": ("Qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", GROUPED | rope(1e6) | {"head_dim": 16}),
    "qwen3 tied, gelu": ("Qwen3", GROUPED | {"tie_word_embeddings": True, "head_dim": 8, "hidden_act": "gelu"}),
    "olmo2": ("Olmo2", GROUPED | rope(500.0)),
    "olmo2 tied, ungrouped": ("Olmo2", ROTARY | {"tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoX", ROTARY | rope(10000.0, partial_rotary_factor=0.5) | {"layer_norm_eps": 1e-4}),
    "gpt_neox tied, serial": (
        "GPTNeoX",
        ROTARY | {"tie_word_embeddings": True, "use_parallel_residual": False, "hidden_act": "gelu_new"},
    ),
}
SMALL = {"d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 48, "vocab_size": 61, "max_seq_len": 24}
#: What our config makes of the same architectures.
OURS = {
    "gpt2": ModelConfig(
        **SMALL, norm="layernorm", positions="learned", mlp="gelu_tanh", bias=True, tie_embeddings=True, norm_eps=1e-4
    ),
    "llama": ModelConfig(**SMALL, n_kv_heads=2, mlp="swiglu", rope_base=500.0),
    "qwen2": ModelConfig(**SMALL, n_kv_heads=1, mlp="swiglu", attention=AttentionConfig(qkv_bias=True)),
    "qwen3": ModelConfig(
        **SMALL, n_kv_heads=2, mlp="swiglu", head_dim=12, tie_embeddings=True, attention=AttentionConfig(qk_norm="head")
    ),
    "olmo2": ModelConfig(**SMALL, mlp="swiglu", norm_placement="post", attention=AttentionConfig(qk_norm="width")),
    "gpt_neox": ModelConfig(**SMALL, norm="layernorm", bias=True, parallel_residual=True, rope_fraction=0.25),
}


@torch.no_grad()
def enliven(model, seed=0):
    """Random values everywhere: at 0 and 1, biases and gains would hide where they enter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.2 * noise if parameter.ndim > 1 else parameter + 0.3 * noise)
    return model.eval()


def their_model(name):
    architecture, config = THEIRS[name]
    head = "LMHeadModel" if architecture == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{architecture}Config")(**config, attn_implementation="eager")
    return enliven(getattr(transformers, f"{architecture}{head}")(config))


def our_model(name):
    return enliven(born(OURS[name], 0))


def their_folder(name, path, **more):
    their_model(name).save_pretrained(path, **more)
    return path


@torch.no_grad()
def assert_same_logits(ours, theirs):
    tokens = torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(1))
    expected = theirs.eval()(tokens).logits
    assert expected.std() > 0.5  # a model that says nothing compares with anything
    torch.testing.assert_close(ours(tokens), expected, atol=1e-5, rtol=1e-5)


def tensors_of(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


def edit(folder, **changes):
    """Overwrite keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


# ---------------------------------------------------------------- the same function, the same bits


@pytest.mark.parametrize("name", THEIRS)
def test_their_checkpoint_gives_their_logits_and_comes_back_bit_for_bit(name, tmp_path):
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size=9000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3

    ours = load_pretrained(tmp_path / "one")
    assert_same_logits(ours, theirs)
    assert_same_tensors(load_pretrained(tmp_path / "many").state_dict(), ours.state_dict())

    save_pretrained(ours, tmp_path / "back")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "one"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert type(again) is type(theirs)
    assert_same_logits(ours, again)


@pytest.mark.parametrize("name", OURS)
def test_our_model_gives_our_logits_there_and_comes_back_bit_for_bit(name, tmp_path):
    ours = our_model(name)
    save_pretrained(ours, tmp_path / "one")
    save_pretrained(ours, tmp_path / "many", max_shard_bytes=9000)
    for folder in (tmp_path / "one", tmp_path / "many"):
        theirs, said = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True
        )
        assert theirs.config.model_type == name
        assert not any(said.values())
        assert_same_logits(ours, theirs)
        back = read_pretrained(folder)
        assert_same_tensors(dict(back.tensors()), dict(ours.named_parameters()))
        assert family_of(back.config) == family_of(ours.config)
        assert load_pretrained(back).config.init == InitConfig("normal", 0.02)


def test_shards_are_cut_where_they_are_full_and_all_in_the_index(tmp_path):
    save_pretrained(our_model("llama"), tmp_path / "many", max_shard_bytes=9000)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    found, total = {}, 0
    files = sorted((tmp_path / "many").glob("model-*.safetensors"))
    for number, file in enumerate(files, start=1):
        assert file.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with safe_open(file, "pt") as tensors:
            assert tensors.metadata() == {"format": "pt"}
        held = load_file(file)
        size = sum(v.nbytes for v in held.values())
        assert size <= 9000 or len(held) == 1
        total += size
        found |= dict.fromkeys(held, file.name)
    assert index == {"metadata": {"total_size": total}, "weight_map": found}
    assert not list((tmp_path / "many").glob("*.part"))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "olmo2"])
def test_a_width_that_the_heads_do_not_divide_goes_where_it_can(name, tmp_path):
    shape = {"d_model": 36, "n_heads": 8, "n_kv_heads": 4, "head_dim": 6}
    ours = enliven(born(dataclasses.replace(OURS[name], **shape), 0))
    save_pretrained(ours, tmp_path / "out")
    assert_same_logits(ours, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert read_pretrained(tmp_path / "out").config.d_head == 6


@pytest.mark.parametrize("mlp", ["swiglu", "geglu", "reglu", "bilinear", "tanhglu", "relu2glu"])
def test_every_gate_of_ours_is_theirs_too(mlp, tmp_path):
    ours = enliven(born(dataclasses.replace(OURS["llama"], mlp=mlp), 0))
    save_pretrained(ours, tmp_path / "out")
    assert_same_logits(ours, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert read_pretrained(tmp_path / "out").config.mlp == mlp


@pytest.mark.parametrize("mlp", ["gelu", "gelu_tanh", "relu", "silu", "tanh", "identity", "relu2"])
def test_every_plain_activation_of_ours_is_theirs_too(mlp, tmp_path):
    ours = enliven(born(dataclasses.replace(OURS["gpt2"], mlp=mlp), 0))
    save_pretrained(ours, tmp_path / "out")
    assert_same_logits(ours, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert read_pretrained(tmp_path / "out").config.mlp == mlp


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_keep_their_dtype_or_take_the_one_asked_for(dtype, tmp_path):
    ours = our_model("gpt_neox")
    save_pretrained(ours, tmp_path / "out", dtype=dtype)
    assert {v.dtype for v in tensors_of(tmp_path / "out").values()} == {dtype}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == dtype
    assert {v.dtype for _, v in read_pretrained(tmp_path / "out").tensors()} == {dtype}
    expected = {name: p.to(dtype).float() for name, p in ours.named_parameters()}
    assert_same_tensors(dict(load_pretrained(tmp_path / "out").named_parameters()), expected)
    kept = load_pretrained(tmp_path / "out", dtype)
    assert {p.dtype for p in kept.parameters()} == {dtype}
    save_pretrained(kept, tmp_path / "again")
    assert (tmp_path / "again/config.json").read_text() == (tmp_path / "out/config.json").read_text()


def test_a_lazy_mapping_is_asked_for_one_parameter_at_a_time(tmp_path):
    ours = our_model("gpt2")
    parameters, asked = dict(ours.named_parameters()), []

    class Lazy(dict):
        def __getitem__(self, name):
            asked.append(name)
            return parameters[name]

    write_pretrained(ours.config, Lazy(), tmp_path / "lazy")
    save_pretrained(ours, tmp_path / "plain")
    assert sorted(asked) == sorted(parameters)
    assert_same_tensors(tensors_of(tmp_path / "lazy"), tensors_of(tmp_path / "plain"))


def test_a_parameter_of_another_shape_than_the_config_says_is_not_written(tmp_path):
    parameters = dict(our_model("llama").named_parameters())
    with pytest.raises(RunError, match=r"blocks\.0\.attn\.k\.weight"):
        write_pretrained(dataclasses.replace(OURS["llama"], n_kv_heads=4), parameters, tmp_path / "out")


# ---------------------------------------------------------------- configs, as the hub has them


PRESETS = {
    "gpt2-124m": "gpt2",
    "gpt2-1.5b": "gpt2",
    "llama2-7b": "llama",
    "llama3-8b": "llama",
    "tinyllama-1.1b": "llama",
    "olmo2-7b": "olmo2",
    "pythia-1b": "gpt_neox",
    "qwen3-0.6b": "qwen3",
    "qwen3-8b": "qwen3",
}


def preset(name):
    fields = yaml.safe_load((Path(birthmark.__file__).parent / f"configs/models/{name}.yaml").read_text())["model"]
    inner = {"attention": AttentionConfig(**fields.get("attention", {})), "init": InitConfig(**fields["init"])}
    return ModelConfig(**fields | inner)


@pytest.mark.parametrize(("name", "family"), PRESETS.items())
def test_a_published_model_has_the_tensors_that_transformers_gives_it(name, family):
    config = preset(name)
    content = config_to_json(config, family_of(config))
    assert content["model_type"] == family
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**content))
    expected = {
        n.replace("lm_head", "embed_out") if family == "gpt_neox" else n: p for n, p in theirs.named_parameters()
    }
    found = {piece.theirs: piece.shape for piece in pieces(config, family_of(config))}
    assert found == {name: tuple(parameter.shape) for name, parameter in expected.items()}


def test_configs_as_they_were_first_published_are_our_presets():
    gpt2 = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    pythia = {
        "hidden_act": "gelu",
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_parallel_residual": True,
        "vocab_size": 50304,
    }
    for name, content in {"gpt2-124m": gpt2, "pythia-160m": pythia}.items():
        expected = preset(name)
        assert config_from_json(content) == dataclasses.replace(
            expected, init=InitConfig("normal"), d_ff=None if name == "gpt2-124m" else 3072
        )


def test_the_older_spelling_of_rotary_settings_is_read_and_written(tmp_path):
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


def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path):
    """Their own class reads the same short config."""
    for name, (architecture, config) in THEIRS.items():
        if name not in OURS:
            continue
        theirs = getattr(transformers, f"{architecture}Config")(**config).to_dict()
        needed = {"model_type", "num_key_value_heads", *ROTARY, *GPT2} - {"layer_norm_epsilon"}
        short = {key: value for key, value in theirs.items() if key in needed}
        full = getattr(transformers, f"{architecture}Config")(**short).to_dict()
        read = [config_from_json(content) for content in (short, full)]
        one, other = (dataclasses.replace(c, n_kv_heads=c.kv_heads, head_dim=c.d_head, d_ff=c.ff) for c in read)
        assert one == other, name


REFUSED_KEYS = [
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
    ("llama", {"num_hidden_layers": 0}, "n_layers is 0"),
    ("llama", {"model_type": "mamba"}, "model_type 'mamba'"),
    ("llama", {"model_type": None}, "model_type None"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window True"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("qwen3", {"attention_bias": True}, "attention_bias True"),
    ("olmo2", {"attention_bias": True}, "attention_bias True"),
    ("gpt_neox", {"attention_bias": False}, "attention_bias False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights False"),
    ("gpt2", {"n_embd": None}, "n_embd is missing"),
]


@pytest.mark.parametrize(("name", "changes", "said"), REFUSED_KEYS, ids=[said for *_, said in REFUSED_KEYS])
def test_what_we_do_not_have_is_refused_by_key_and_value(name, changes, said):
    architecture, config = THEIRS[name]
    content = getattr(transformers, f"{architecture}Config")(**config).to_dict()
    config_from_json(content)
    with pytest.raises(UsageError) as error:
        config_from_json(content | changes, "here/config.json")
    assert str(error.value).startswith("here/config.json: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_dropout_and_an_unused_window_change_nothing():
    content = transformers.Qwen2Config(**GROUPED).to_dict()
    more = {"attention_dropout": 0.1, "sliding_window": 4096, "max_window_layers": 1, "use_sliding_window": False}
    assert config_from_json(content | more) == config_from_json(content)


def attention(**fields):
    return {"attention": AttentionConfig(**fields)}


REFUSED_ARMS = [
    ("llama", attention(aggregation="headnorm"), "model.attention.aggregation headnorm has", "llama"),
    ("qwen3", attention(qk_norm="head", gate="head"), "model.attention.gate head has", "qwen3"),
    ("llama", {"positions": "alibi", "rope_base": 10000.0}, "model.positions alibi has", "llama"),
    ("llama", attention(normaliser="softmax_sink"), "model.attention.normaliser softmax_sink has", "llama"),
    ("llama", attention(window=8), "model.attention.window 8 has", "llama"),
    ("llama", attention(prefix=4), "model.attention.prefix 4 has", "llama"),
    ("llama", attention(kv_bias="key"), "model.attention.kv_bias key has", "llama"),
    (
        "llama",
        attention(aggregation="calibrated", calibration=CalibrationConfig("analytic")),
        "model.attention.aggregation calibrated, model.attention.calibration.n_eff analytic have",
        "llama",
    ),
    ("llama", {"norm_placement": "both"}, "model.norm_placement both has", "llama"),
    ("llama", {"norm": "none"}, "model.norm none has", "llama"),
    ("llama", {"mlp": "gelu"}, "model.mlp gelu has", "llama"),
    ("llama", {"rope_fraction": 0.5}, "model.rope_fraction 0.5 has", "llama"),
    ("llama", {"d_model": 36, "n_heads": 8, "n_kv_heads": 8, "head_dim": 8}, "model.head_dim 8 has", "llama"),
    ("gpt2", {"n_kv_heads": 2}, "model.n_kv_heads 2 has", "gpt2"),
    ("gpt2", {"head_dim": 16}, "model.head_dim 16 has", "gpt2"),
    ("gpt2", {"bias": False}, "model.bias False, model.attention.qkv_bias False have", "gpt2"),
    ("gpt_neox", {"n_kv_heads": 2}, "model.n_kv_heads 2 has", "gpt_neox"),
    ("gpt_neox", {"head_dim": 40}, "model.head_dim 40 has", "gpt_neox"),
]


@pytest.mark.parametrize(
    ("name", "changes", "said", "closest"), REFUSED_ARMS, ids=[f"{a} {c}" for a, _, c, _ in REFUSED_ARMS]
)
def test_an_arm_that_no_family_has_is_refused_by_name(name, changes, said, closest, tmp_path):
    config = dataclasses.replace(OURS[name], **changes)
    with pytest.raises(UsageError) as error:
        write_pretrained(config, {}, tmp_path / "out")
    assert str(error.value).startswith(f"{said} no counterpart in transformers: the closest family, {closest}, has ")
    assert not (tmp_path / "out").exists()


def test_the_distribution_at_birth_is_no_part_of_the_exchange(tmp_path):
    for init in (InitConfig("xavier"), InitConfig("gpt2", 0.5)):
        config = dataclasses.replace(OURS["gpt2"], init=init)
        save_pretrained(born(config, 0), tmp_path / init.kind)
        assert read_pretrained(tmp_path / init.kind).config.init == InitConfig("normal", init.std)


# ---------------------------------------------------------------- damage, one line each


def rewrite(folder, change):
    """Change the tensors of a folder with one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


K = "model.layers.1.self_attn.k_proj.weight"
DAMAGE = {
    f"model.safetensors: {K} is in none": lambda t: t.pop(K),
    "model.safetensors: model.layers.9.x is no tensor": lambda t: t.update({"model.layers.9.x": torch.ones(2)}),
    "model.safetensors: score.weight is no tensor": lambda t: t.update({"score.weight": torch.ones(2)}),
    f"model.safetensors: {K} has shape [32, 16], config.json says [16, 32]": lambda t: t.update(
        {K: t[K].T.contiguous()}
    ),
    f"model.safetensors: {K} is I8": lambda t: t.update({K: t[K].to(torch.int8)}),
    "is also in model.safetensors": lambda t: t.update({K.removeprefix("model."): t[K].clone()}),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_a_wrong_tensor_is_named_with_its_file(said, tmp_path):
    folder = rewrite(their_folder("llama", tmp_path / "hf"), DAMAGE[said])
    with pytest.raises(RunError) as error:
        load_pretrained(folder)
    assert said.removeprefix("model.safetensors: ") in str(error.value)
    assert str(error.value).startswith(str(folder))


def test_a_stored_head_must_be_the_table_it_is_tied_to(tmp_path):
    folder = their_folder("qwen3 tied, gelu", tmp_path / "hf")
    before = load_pretrained(folder).state_dict()
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_same_tensors(load_pretrained(folder).state_dict(), before)
    rewrite(folder, lambda t: t["lm_head.weight"].mul_(2))
    with pytest.raises(RunError, match=r"lm_head\.weight differs from the embeddings"):
        load_pretrained(folder)
    # An untied model's head must be there.
    untied = rewrite(their_folder("qwen3", tmp_path / "untied"), lambda t: t.pop("lm_head.weight"))
    with pytest.raises(RunError, match=r"lm_head\.weight is in none"):
        load_pretrained(untied)


def test_what_old_checkpoints_hold_beside_parameters_is_left_alone(tmp_path):
    mask = torch.ones(24, 24).tril()[None, None]
    for name, extra in {
        "gpt2": {"transformer.h.0.attn.bias": mask, "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)},
        "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        "gpt_neox": {
            "gpt_neox.layers.0.attention.bias": mask.bool(),
            "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
            "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(2),
        },
    }.items():
        folder = their_folder(name, tmp_path / name)
        before = load_pretrained(folder).state_dict()
        assert_same_tensors(load_pretrained(rewrite(folder, lambda t, e=extra: t.update(e))).state_dict(), before)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox tied, serial", "qwen3 tied, gelu"])
def test_a_checkpoint_without_the_head_is_read_under_its_shorter_names(name, tmp_path):
    """As the first GPT-2 on the hub: the bare model's names."""
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path / "full")
    theirs.base_model.save_pretrained(tmp_path / "bare")
    assert not tensors_of(tmp_path / "full").keys() & tensors_of(tmp_path / "bare").keys()
    edit(tmp_path / "bare", tie_word_embeddings=True)
    expected = load_pretrained(tmp_path / "full").state_dict()
    assert_same_tensors(load_pretrained(tmp_path / "bare").state_dict(), expected)


def test_a_file_that_is_cut_short_or_empty_is_named(tmp_path):
    folder = their_folder("llama", tmp_path / "hf")
    whole = (folder / "model.safetensors").read_bytes()
    for content in (whole[:-100], whole[:20], b"", b"\x80\x04not a pickle either"):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(RunError, match=r"model\.safetensors: damaged"):
            load_pretrained(folder)


def test_a_damaged_index_is_named(tmp_path):
    whole = their_folder("llama", tmp_path / "hf", max_shard_size=9000)
    index = json.loads((whole / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["model.norm.weight"]

    def refused(said, weight_map):
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index | {"weight_map": weight_map}))
        with pytest.raises(RunError) as error:
            load_pretrained(folder)
        assert said in str(error.value)

    good = index["weight_map"]
    refused("weight_map", None)
    refused("weight_map", good | {"model.norm.weight": "../hf/" + shard})
    refused("weight_map", good | {"model.norm.weight": 3})
    refused("gone.safetensors: missing", good | {"model.norm.weight": "gone.safetensors"})
    refused("x is only in", good | {"x": shard})
    refused("model.norm.weight is not in", {k: v for k, v in good.items() if k != "model.norm.weight"})
    (whole / shard).unlink()
    with pytest.raises(RunError, match=f"{shard}: missing"):
        load_pretrained(whole)


def test_folders_that_are_no_checkpoints_are_refused_with_the_mend(tmp_path):
    folder = their_folder("llama", tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin.*never loaded: convert"):
        load_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config\.json: damaged JSON"):
        load_pretrained(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(RunError, match=r"config\.json: damaged"):
        load_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no config\.json in it"):
        load_pretrained(folder)
    for source in (tmp_path / "nowhere", str(tmp_path / "nowhere"), "./nowhere", "a/b/c"):
        with pytest.raises(UsageError, match="no such folder"):
            load_pretrained(source)


def test_a_folder_in_use_is_not_written_into(tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        save_pretrained(our_model("llama"), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["kept.txt"]


# ---------------------------------------------------------------- the hub, from its cache


def test_a_hub_id_is_read_from_the_hubs_cache_and_a_missing_one_is_one_line(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--small"
    folder = their_folder("llama", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    pretrained = read_pretrained("someone/small")
    assert pretrained.folder.name == commit
    assert_same_tensors(load_pretrained(pretrained).state_dict(), load_pretrained(folder).state_dict())
    assert read_pretrained(f"someone/small@{commit}").folder == pretrained.folder
    for source in ("someone/else", "someone/small@other", "not a name"):
        with pytest.raises(UsageError, match="no such folder, and not from the hub either") as error:
            read_pretrained(source)
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------- tokenizers


def byte_level(size):
    """Bytes alone, and the end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i + 1 for i, c in enumerate(alphabet)} | {"<|endoftext|>": 0}, []))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("name", OURS)
def test_the_tokenizer_encodes_there_as_here(name, kind, tmp_path):
    tokenizer = byte_level(257)
    if kind == "bpe":
        text = "def f(x): return 1234 + f(x)\n don't 1234 e\u0301"
        tokenizer = Tokenizer.from_str(train_bpe([text] * 9, 278).content.decode())
        assert len(tokenizer.encode(text)) < 20  # words, numbers and marks have grown together
    tokenizer.save(str(tmp_path / "t.json"))
    ours = enliven(born(dataclasses.replace(OURS[name], vocab_size=290), 0))
    notes = save_pretrained(ours, tmp_path / "out", tokenizer_file=tmp_path / "t.json", eos_token_id=0)
    # For one family, AutoTokenizer has rules of its own; the note says what to load instead.
    assert ["PreTrainedTokenizerFast" in note for note in notes] == [True] * (name == "qwen2")
    theirs = (transformers.PreTrainedTokenizerFast if notes else transformers.AutoTokenizer).from_pretrained(
        tmp_path / "out"
    )
    for text in ("def f(x):\n\treturn  x ", " Ünïcode — 日本 🙂", "a ,b . don't", " 1234 e\u0301", ""):
        ids = tokenizer.encode(text).ids
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert theirs.encode(text) == ids
        assert theirs.decode(ids) == text
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|endoftext|>", 0)
    assert theirs.model_max_length == 24
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == 0
    assert read_pretrained(tmp_path / "out").tokenizer_file == tmp_path / "out/tokenizer.json"
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tmp_path / "t.json").read_bytes()


def test_a_tokenizer_that_is_none_or_too_large_is_refused(tmp_path):
    ours = our_model("llama")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(UsageError, match="not a tokenizers JSON file"):
        save_pretrained(ours, tmp_path / "out", tokenizer_file=tmp_path / "t.json")
    byte_level(257).save(str(tmp_path / "t.json"))
    with pytest.raises(UsageError, match=r"token 256 is outside model\.vocab_size 61"):
        save_pretrained(ours, tmp_path / "out", tokenizer_file=tmp_path / "t.json")
    assert not (tmp_path / "out").exists()

"""Published sizes of published models, counted from the config, and what `birthmark describe` prints of them."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import birthmark
from birthmark.launch.cli import main
from birthmark.models.birth import born
from birthmark.models.config import ExpertsConfig, ModelConfig
from birthmark.plan.describe import describe
from birthmark.trainer.config_file import read_config

MODELS = Path(birthmark.__file__).parent / "configs" / "models"

#: Parameters as their authors and model cards count them (tied tables once); those of papers on this subject as their
#: published shapes count.
PUBLISHED = {
    "llama-60m": 136_462_080,
    "llama-152m": 151_898_880,
    "llama-160m": 134_105_856,
    "qwen-160m": 346_666_752,
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "pythia-160m": 162_322_944,
    "pythia-1b": 1_011_781_632,
    "tinyllama-1.1b": 1_100_048_384,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "olmo2-7b": 7_298_617_344,
}


def preset(name):
    return read_config(MODELS / f"{name}.yaml").model


def test_every_preset_is_counted():
    assert sorted(PUBLISHED) == sorted(file.stem for file in MODELS.glob("*.yaml"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_exactly_the_published_number_of_parameters(name):
    assert describe(preset(name))["n_params"] == PUBLISHED[name]


@pytest.mark.parametrize("arguments", [["--help"], ["configs"]], ids=lambda a: a[0])
def test_what_people_look_up_needs_no_torch(arguments):
    """torch alone takes over a second to load."""
    script = (
        "import atexit, sys; from birthmark.launch.cli import main;"
        "atexit.register(lambda: print(sorted({'torch', 'lightning', 'transformers'} & sys.modules.keys())));"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def counterpart(name, config):
    """The same shape as `transformers` builds it."""
    shape = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.d_head,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if name.startswith("gpt2"):
        theirs = transformers.GPT2Config(n_embd=config.d_model, n_layer=config.n_layers, n_head=config.n_heads)
        return transformers.GPT2LMHeadModel(theirs)
    family = {"pythia": "GPTNeoX", "qwen": "Qwen2", "qwen3": "Qwen3", "olmo2": "Olmo2"}.get(name.split("-")[0], "Llama")
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**shape))


def test_sixty_million_are_counted_without_the_tables():
    parts = describe(preset("llama-60m"))["parameters"]
    assert parts.pop("embed") == parts.pop("head") == 50_432 * 768
    assert sum(parts.values()) == 58_998_528  # "60M" (arXiv 2410.10781)


@pytest.mark.heavy
@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_counts_the_same(name):
    with torch.device("meta"):
        theirs = counterpart(name, preset(name))
    assert sum(p.numel() for p in theirs.parameters()) == PUBLISHED[name]


def test_parts_add_up_and_memory_follows():
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=24, max_seq_len=12, mlp="swiglu")
    description = describe(config)
    model = born(config, 0)
    counted = sum(p.numel() for p in model.parameters())
    assert description["n_params"] == counted == sum(description["parameters"].values())
    assert description["parameters"]["blocks.attn.k"] == 2 * 16 * 8
    assert description["parameters"]["embed"] == 24 * 16
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    moments = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    for part, tensors in (
        ("weights", list(model.parameters())),
        ("gradients", [p.grad for p in model.parameters()]),
        ("optimizer", moments),
    ):
        assert description["memory"][part] == sum(t.nbytes for t in tensors), part


def test_7b_is_described_in_seconds_for_people_and_programs(capsys):
    start = time.perf_counter()
    assert main(["describe", str(MODELS / "llama2-7b.yaml"), "--json"]) == 0
    assert time.perf_counter() - start < 10
    assert json.loads(capsys.readouterr().out)["n_params"] == PUBLISHED["llama2-7b"]
    assert main(["describe", str(MODELS / "llama2-7b.yaml")]) == 0
    assert "6,738,415,616" in capsys.readouterr().out


def test_parameters_per_token_leave_out_the_experts_that_it_does_not_pass():
    config = ModelConfig(d_model=16, n_layers=3, n_heads=2, experts=ExpertsConfig(6, 2, d_ff=10, d_shared=4, n_dense=1))
    found, dense = describe(config), describe(replace(config, experts=ExpertsConfig()))
    assert found["n_params"] - found["n_active"] == 2 * (6 - 2) * 2 * 16 * 10
    assert dense["n_params"] == dense["n_active"]
    model = born(config, 0)
    assert found["n_params"] == sum(parameter.numel() for parameter in model.parameters())

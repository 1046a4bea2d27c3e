"""Adapters that peft loads on the exported model: its logits are the oracle."""

import json
import os
from dataclasses import replace

import pytest
import torch

from birthmark.errors import UsageError
from birthmark.models.adapter_config import AdapterConfig
from birthmark.models.adapters import attach, initialize_adapter, is_adapter, merged
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.models.exchange.peft_folder import write_peft
from birthmark.models.exchange.pretrained import load_pretrained, save_pretrained, write_pretrained

SIZES = {"d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 48, "vocab_size": 61, "max_seq_len": 24}
LLAMA = ModelConfig(**SIZES, n_kv_heads=2, mlp="swiglu")
MISTRAL = replace(LLAMA, attention=AttentionConfig(window=1))
QWEN3 = ModelConfig(**SIZES, n_kv_heads=2, mlp="swiglu", attention=AttentionConfig(qk_norm="head"))
GPT2 = ModelConfig(**SIZES, norm="layernorm", positions="learned", bias=True, mlp="gelu_tanh", tie_embeddings=True)
EVERY = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"]
CASES = {
    "llama, lora": (LLAMA, AdapterConfig("lora", rank=3, alpha=5.0, maps=EVERY)),
    "mistral of a window that is not exported, lora": (MISTRAL, AdapterConfig("lora", rank=2)),
    "qwen3, lora": (QWEN3, AdapterConfig("lora", rank=2)),
    "gpt2, lora of transposed maps": (GPT2, AdapterConfig("lora", rank=2, maps=["attn.o", "mlp.up", "mlp.down"])),
    "llama, prefix": (LLAMA, AdapterConfig("prefix", length=5)),
    "qwen3, prefix": (QWEN3, AdapterConfig("prefix", length=3)),
}


def adapted(config, adapter):
    model = born(config, 0)
    attach(model, adapter)
    initialize_adapter(model, config.init, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def theirs():
    """``theirs(base, adapter)``: the model that transformers and peft load."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")

    def load(base, adapter):
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        return peft.PeftModel.from_pretrained(model, adapter).eval()

    return load


@pytest.mark.heavy
@torch.no_grad()
def test_peft_loads_an_adapter_on_the_exported_model_with_our_logits(theirs, tmp_path):
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
    for name, (config, adapter) in CASES.items():
        model, folder = adapted(config, adapter), tmp_path / name
        folder.mkdir()
        exported = replace(config, attention=replace(config.attention, window=2)) if config is MISTRAL else config
        save_pretrained(born(exported, 0), folder / "base")
        if config is MISTRAL:
            file = folder / "base" / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"sliding_window": 1}))
        write_peft(model, folder / "adapter", str(folder / "base"))
        settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        # peft sets it right where it is wrong, and warns.
        assert settings.get("fan_in_fan_out", False) == name.startswith("gpt2")
        ours, found = model(tokens), theirs(folder / "base", folder / "adapter")(tokens).logits
        torch.testing.assert_close(found, ours, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        assert not torch.allclose(born(config, 0)(tokens), ours, atol=0.05), name


@torch.no_grad()
def test_a_merged_lora_is_a_model_with_the_same_logits(tmp_path):
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
    for name in ("llama, lora", "gpt2, lora of transposed maps"):
        model = adapted(*CASES[name])
        write_pretrained(model.config, merged(model), tmp_path / name)
        torch.testing.assert_close(load_pretrained(tmp_path / name)(tokens), model(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "adapter", "expected"),
    [
        (LLAMA, AdapterConfig("prefix_plus"), "adapter.kind prefix_plus: peft has no such kind"),
        (GPT2, AdapterConfig("lora", rank=2), "names attn.q, which gpt2 keeps in one tensor with others"),
        (GPT2, AdapterConfig("prefix"), "model.positions learned"),
        (replace(LLAMA, attention=AttentionConfig(window=8)), AdapterConfig("prefix"), "model.attention.window: peft"),
    ],
)
def test_what_peft_cannot_hold_is_refused_in_a_line(config, adapter, expected, tmp_path):
    with pytest.raises(UsageError, match=expected) as error:
        write_peft(adapted(config, adapter), tmp_path / "out", "base")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_only_a_lora_can_be_merged():
    with pytest.raises(UsageError, match=r"--merge: adapter.kind is prefix"):
        merged(adapted(*CASES["llama, prefix"]))

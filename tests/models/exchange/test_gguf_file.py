"""A GGUF file is read back by transformers as the same function."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from birthmark.errors import UsageError
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.models.exchange.gguf_file import check_gguf, write_gguf

LLAMA = ModelConfig(
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    d_ff=48,
    vocab_size=64,
    max_seq_len=24,
    mlp="swiglu",
    rope_base=500.0,
)
MODELS = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, tie_embeddings=True, attention=AttentionConfig(qkv_bias=True)),
    # The library's reader knows qwen3's heads by their default width alone.
    "qwen3": replace(LLAMA, head_dim=128, attention=AttentionConfig(qk_norm="head")),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_same_function(tmp_path, lively, random_tokens, name):
    ours = lively(MODELS[name]).eval()
    tokens_BT = random_tokens(MODELS[name])
    assert write_gguf(ours.config, ours.state_dict(), tmp_path / "model.gguf") == [
        "the file has no tokenizer: give token ids"
    ]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert theirs.config.model_type == name
    torch.testing.assert_close(theirs(tokens_BT).logits, ours(tokens_BT), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_those_rounded(tmp_path, lively, dtype):
    import gguf

    ours = lively(LLAMA)
    write_gguf(LLAMA, ours.state_dict(), tmp_path / "model.gguf", dtype=dtype)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    head = gguf.quants.dequantize(found["output.weight"].data, found["output.weight"].tensor_type)
    assert torch.equal(torch.from_numpy(head), ours.head.weight.detach().to(dtype).float())
    gain = torch.from_numpy(found["output_norm.weight"].data.copy())
    assert torch.equal(gain, ours.norm.gain.detach())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(LLAMA, norm="layernorm"), "no counterpart in transformers"),
        (replace(LLAMA, mlp="gelu"), "--gguf: arcee models are not written as GGUF: llama, qwen2, qwen3 are"),
        (replace(LLAMA, mlp="geglu"), "has swiglu without biases, and the model has model.mlp geglu"),
        (replace(LLAMA, bias=True), "has swiglu without biases, and the model has model.bias true"),
    ],
)
def test_what_llama_cpp_lacks_is_refused(config, message):
    with pytest.raises(UsageError) as raised:
        check_gguf(config)
    assert message in str(raised.value)

"""A GGUF file is read back by transformers, and by llama.cpp, as the same function."""

import json
import subprocess
from dataclasses import replace

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from birthmark.errors import UsageError
from birthmark.models.config import AttentionConfig, ExpertsConfig, ModelConfig
from birthmark.models.exchange.gguf_file import check_gguf, is_read_by_transformers, write_gguf
from birthmark.models.exchange.pretrained import write_pretrained

TEXT = "def forward(self, x):\n    return x + 1  # naïve\n\n\nclass A:\n    pass\n" * 20
LLAMA = ModelConfig(
    d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, vocab_size=64, max_seq_len=24, mlp="swiglu",
    rope_base=500.0,
)  # fmt: skip
WHOLE = replace(LLAMA, n_kv_heads=4, mlp="gelu_tanh", norm="layernorm", bias=True)
NEOX = replace(WHOLE, rope_fraction=0.5, parallel_residual=True)
EXPERTS = replace(LLAMA, experts=ExpertsConfig(n_experts=4, top_k=2))
MODELS = {
    "gpt2": replace(WHOLE, rope_base=10000.0, positions="learned", tie_embeddings=True),
    "llama": LLAMA,
    "qwen2": replace(LLAMA, tie_embeddings=True, attention=AttentionConfig(qkv_bias=True)),
    # The library's reader knows qwen3's heads by their default width alone.
    "qwen3": replace(LLAMA, head_dim=128, attention=AttentionConfig(qk_norm="head")),
    "olmo2": replace(LLAMA, norm_placement="post", attention=AttentionConfig(qk_norm="width")),
    "gpt_neox": NEOX,
    "gpt_neox, not parallel": WHOLE,
    "arcee": replace(LLAMA, mlp="relu2"),
    "mixtral": EXPERTS,
    "olmoe": replace(
        EXPERTS,
        n_kv_heads=4,
        experts=ExpertsConfig(n_experts=4, top_k=2, renormalise=False),
        attention=AttentionConfig(qk_norm="width"),
    ),
    "qwen3_moe": replace(EXPERTS, attention=AttentionConfig(qk_norm="head")),
}
#: What the library reads from such a file.
READ = ("llama", "qwen2", "qwen3")


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_same_function_or_the_file_is_known_to_be_another(tmp_path, lively, random_tokens, name):
    """A card promises it for no file that the library refuses, or reads as another model."""
    ours, file = lively(MODELS[name]).eval(), tmp_path / "model.gguf"
    tokens_BT = random_tokens(MODELS[name])
    assert write_gguf(ours.config, ours.state_dict(), file) == ["the file has no tokenizer: give token ids"]
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
        assert theirs.config.model_type == name or name not in READ
        with torch.no_grad():
            reads = torch.allclose(theirs(tokens_BT).logits, ours(tokens_BT), atol=1e-5, rtol=1e-4)
    except (ValueError, RuntimeError):  # an architecture that it has not, or sizes that it does not read
        reads = False
    assert is_read_by_transformers(ours.config) is reads is (name in READ)


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


def both_of(model, folder, **more):
    """float32 tensors and fields of its GGUF file, by name, and the tensors that transformers reads."""
    import gguf

    write_gguf(model.config, model.state_dict(), folder / "model.gguf", **more)
    write_pretrained(model.config, model.state_dict(), folder / "theirs")
    reader = gguf.GGUFReader(folder / "model.gguf")
    tensors = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return tensors, fields, load_file(folder / "theirs/model.safetensors")


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_queries_keys_and_values_lie_one_after_the_other(tmp_path, lively, name):
    """What llama.cpp's converters make of transformers' tensors: GPT-2's are transposed, NeoX's lie head by head."""
    tensors, fields, theirs = both_of(lively(MODELS[name]), tmp_path)
    if name == "gpt2":
        expected = theirs["transformer.h.1.attn.c_attn.weight"].T
        assert torch.equal(tensors["position_embd.weight"], theirs["transformer.wpe.weight"])
        assert fields["gpt2.attention.layer_norm_epsilon"] == pytest.approx(1e-5)
    else:
        by_head = theirs["gpt_neox.layers.1.attention.query_key_value.weight"].reshape(4, 3, 8, 32)
        expected = torch.cat([by_head[:, i].reshape(32, 32) for i in range(3)])
        assert fields["gptneox.rope.dimension_count"] == 4
        assert fields["gptneox.use_parallel_residual"] is True
    assert torch.equal(tensors["blk.1.attn_qkv.weight"], expected)


@pytest.mark.parametrize(("name", "theirs"), [("mixtral", "w1"), ("olmoe", "gate_proj"), ("qwen3_moe", "gate_proj")])
def test_the_experts_of_a_block_are_one_tensor(tmp_path, lively, name, theirs):
    tensors, fields, published = both_of(lively(MODELS[name]), tmp_path, dtype=torch.float16)
    of_block = [published[key] for key in sorted(published) if "layers.1." in key and f".{theirs}." in key]
    assert len(of_block) == 4
    assert torch.equal(tensors["blk.1.ffn_gate_exps.weight"], torch.stack(of_block).half().float())
    # A rounded router would choose others.
    router = next(tensor for key, tensor in published.items() if "layers.1." in key and key.endswith(".gate.weight"))
    assert torch.equal(tensors["blk.1.ffn_gate_inp.weight"], router)
    architecture = fields["general.architecture"]
    assert architecture == {"mixtral": "llama", "olmoe": "olmoe", "qwen3_moe": "qwen3moe"}[name]
    assert (fields[f"{architecture}.expert_count"], fields[f"{architecture}.expert_used_count"]) == (4, 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(LLAMA, norm="layernorm"), "no counterpart in transformers"),
        (replace(LLAMA, attention=AttentionConfig(window=5)), "--gguf: mistral models are not written as GGUF: gpt2, "),
        (replace(LLAMA, mlp="gelu"), "llama.cpp's arcee has model.mlp relu2, and the model has gelu"),
        (replace(LLAMA, mlp="geglu"), "llama.cpp's llama has model.mlp swiglu, and the model has geglu"),
        (replace(LLAMA, bias=True), "llama.cpp's llama has model.bias false, and the model has true"),
        (replace(NEOX, mlp="gelu"), "llama.cpp's gpt_neox has model.mlp gelu_tanh, and the model has gelu"),
        (
            replace(MODELS["olmoe"], experts=EXPERTS.experts),
            "llama.cpp's olmoe has model.experts.renormalise false, and the model has true: export without --gguf",
        ),
        (
            replace(EXPERTS, attention=AttentionConfig(window=5)),
            "mixtral has model.attention.window null, and the model",
        ),
    ],
)
def test_what_llama_cpp_lacks_is_refused(config, message):
    with pytest.raises(UsageError) as raised:
        check_gguf(config)
    assert message in str(raised.value)


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE that splits text as GPT-2's does, without a token that ends a text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    return made


@pytest.mark.parametrize(("end", "specials", "padding"), [(7, 0, 2), (None, 0, 2), (None, 1, 0), (None, 0, 0)])
def test_a_text_ends_at_no_token_that_text_has(tmp_path, lively, tokenizer, end, specials, padding):
    """Where no end is named, llama.cpp takes token 11 for it: one of text."""
    import gguf

    given = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    given.add_special_tokens(["<s>"][:specials])
    given.save(str(tmp_path / "tokenizer.json"))
    size = given.get_vocab_size() + padding
    config = replace(LLAMA, vocab_size=size)
    more = {"tokenizer_file": tmp_path / "tokenizer.json", "eos_token_id": end}
    notes = write_gguf(config, lively(config).state_dict(), tmp_path / "model.gguf", **more)
    field = gguf.GGUFReader(tmp_path / "model.gguf").get_field("tokenizer.ggml.eos_token_id")
    if end is None and not specials and not padding:
        assert field is None
        assert notes == ["the model has no end token, and llama.cpp takes token 11 for one: give it --ignore-eos"]
    else:
        assert notes == []
        assert field.contents() == (size - 1 if end is None else end)


#: Tokens of a text, what ends one, and the next token's probabilities at every position.
LLAMA_CPP = """
import {readFileSync, writeFileSync} from "fs";
import {getLlama} from "node-llama-cpp";

const {text, tokens} = JSON.parse(readFileSync("given.json"));
const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const found = {};
for (const name of process.argv.slice(2)) {
    const model = await llama.loadModel({modelPath: `${name}.gguf`});
    const wide = {experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32"};
    const context = await model.createContext({contextSize: 256, flashAttention: false, ...wide});
    const inputs = tokens.map((token) => [token, {generateNext: {probabilities: true}}]);
    const outputs = await context.getSequence().controlledEvaluate(inputs);
    const ends = [...Array(tokens.length).keys()].filter((token) => model.isEogToken(token));
    const rows = outputs.map((output) => [...output.next.probabilities]);
    found[name] = {tokens: model.tokenize(text, false), ends, rows};
}
writeFileSync("found.json", JSON.stringify(found));
process.exit(0);
"""


@pytest.mark.slow
@torch.no_grad()
def test_llama_cpp_reads_the_same_function_and_splits_text_alike(tmp_path, lively, tokenizer):
    """llama.cpp as node-llama-cpp brings it, built: npm fetches it."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens, expected = tokenizer.encode(TEXT).ids[:120], {}
    for name, config in MODELS.items():
        ours, file = lively(replace(config, vocab_size=292, max_seq_len=256)).eval(), tmp_path / f"{name}.gguf"
        write_gguf(ours.config, ours.state_dict(), file, tokenizer_file=tmp_path / "tokenizer.json")
        expected[name] = ours(torch.tensor([tokens]))[0].softmax(-1)
    (tmp_path / "given.json").write_text(json.dumps({"text": TEXT, "tokens": tokens}))
    (tmp_path / "read.mjs").write_text(LLAMA_CPP)
    (tmp_path / "package.json").write_text("{}")
    for command in (["npm", "install", "--silent", "node-llama-cpp@3.22.1"], ["node", "read.mjs", *MODELS]):
        subprocess.run(command, cwd=tmp_path, check=True)
    for name, found in json.loads((tmp_path / "found.json").read_text()).items():
        assert found["tokens"] == tokenizer.encode(TEXT).ids
        assert found["ends"] == []
        for row, expected_V in zip(found["rows"], expected[name], strict=True):
            p_V = torch.zeros(292).index_put((torch.tensor([t for t, _ in row]),), torch.tensor([p for _, p in row]))
            # It looks GELU up in a table of float16.
            wide = MODELS[name].mlp == "gelu_tanh"
            torch.testing.assert_close(p_V, expected_V, atol=1e-4 if wide else 1e-6, rtol=1e-2 if wide else 1e-4)

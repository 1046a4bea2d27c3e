"""Checkpoints of ``transformers``: the same logits, the same bits, and nothing read or written that is not exact."""

import dataclasses
import json
import shutil

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from birthmark.data.tokenizer import train_bpe
from birthmark.errors import RunError, UsageError
from birthmark.models.birth import born
from birthmark.models.config import InitConfig
from birthmark.models.exchange.conversion import family_of
from birthmark.models.exchange.pretrained import load_pretrained, read_pretrained, save_pretrained, write_pretrained
from birthmark.models.exchange.written_layout import layout_of

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture
def our_model(our_config, enliven):
    return lambda name, **changes: enliven(born(our_config(name, **changes), 0))


def tensors_begin_at(file):
    """Behind the header, whose length the file's first eight bytes say."""
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


@torch.no_grad()
def assert_same_logits(ours, theirs):
    tokens = torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(1))
    expected = theirs.eval()(tokens).logits
    assert expected.std() > 0.5  # a model that says nothing compares with anything
    torch.testing.assert_close(ours(tokens), expected, atol=1e-5, rtol=1e-5)


def assert_same_gradients(ours, theirs, folder):
    """Our gradients, written as weights are, are read by the library under its names."""
    tokens = torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(1))
    upstream = torch.randn(3, 20, 61, generator=torch.Generator().manual_seed(2)) / 20
    (ours(tokens) * upstream).sum().backward()
    (theirs(tokens).logits * upstream).sum().backward()
    write_pretrained(ours.config, {name: parameter.grad for name, parameter in ours.named_parameters()}, folder)
    found = dict(transformers.AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    for name, parameter in theirs.named_parameters():
        largest = parameter.grad.abs().max().item()
        assert largest > 0, name
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-4 * largest, rtol=1e-4, msg=name)


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


@pytest.mark.heavy
def test_their_checkpoint_gives_their_logits_and_comes_back_bit_for_bit(their_name, their_model, tmp_path):
    theirs = their_model(their_name, attn_implementation="eager")
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


def test_our_model_gives_our_logits_there_and_comes_back_bit_for_bit(our_name, our_model, tmp_path):
    ours = our_model(our_name)
    save_pretrained(ours, tmp_path / "one")
    save_pretrained(ours, tmp_path / "many", max_shard_bytes=9000)
    for folder in (tmp_path / "one", tmp_path / "many"):
        load = transformers.AutoModelForCausalLM.from_pretrained
        theirs, said = load(folder, attn_implementation="eager", output_loading_info=True)
        assert theirs.config.model_type == our_name
        assert not any(said.values())
        assert_same_logits(ours, theirs)
        back = read_pretrained(folder)
        assert_same_tensors(dict(back.tensors()), dict(ours.named_parameters()))
        assert family_of(back.config) == family_of(ours.config)
        assert load_pretrained(back).config.init == InitConfig("normal", 0.02)
    assert_same_gradients(ours, theirs, tmp_path / "gradients")


def test_shards_end_where_they_are_full_and_are_all_in_the_index(our_model, tmp_path):
    save_pretrained(our_model("llama"), tmp_path / "many", max_shard_bytes=9000)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    found, total = {}, 0
    files = sorted((tmp_path / "many").glob("model-*.safetensors"))
    for number, file in enumerate(files, start=1):
        assert file.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with safe_open(file, "pt") as tensors:
            assert tensors.metadata()["format"] == "pt"
        assert tensors_begin_at(file) % 64 == 0
        held = load_file(file)
        size = sum(v.nbytes for v in held.values())
        assert size <= 9000 or len(held) == 1
        total += size
        found |= dict.fromkeys(held, file.name)
    assert index == {"metadata": {"total_size": total}, "weight_map": found}
    assert not list((tmp_path / "many").glob("*.part"))


NARROW_HEADS = {"d_model": 36, "n_heads": 8, "n_kv_heads": 4, "head_dim": 6}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        # A width that the heads do not divide goes where it can.
        *((name, NARROW_HEADS) for name in ("qwen2", "qwen3", "olmo2")),
        *(("llama", {"mlp": mlp}) for mlp in ("swiglu", "geglu", "reglu", "bilinear", "tanhglu", "relu2glu")),
        *(("gpt2", {"mlp": mlp}) for mlp in ("gelu", "gelu_tanh", "relu", "silu", "tanh", "identity", "relu2")),
    ],
    ids=str,
)
def test_every_activation_of_ours_is_theirs_too_and_narrow_heads_are(name, fields, our_model, tmp_path):
    ours = our_model(name, **fields)
    save_pretrained(ours, tmp_path / "out")
    assert_same_logits(ours, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    back = read_pretrained(tmp_path / "out").config
    assert (back.mlp, back.d_head) == (ours.config.mlp, ours.config.d_head)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "d_model", "d_ff"), [("mixtral", 32, 17), ("mixtral", 36, 24), ("olmoe", 32, 20), ("qwen3_moe", 34, 18)]
)
def test_experts_of_any_width_run_in_any_dtype(name, d_model, d_ff, our_model, our_config, tmp_path):
    """The library's grouped product takes rows of whole 16 bytes, which are 4 floats, or 8 bfloat16s."""
    experts = dataclasses.replace(our_config(name).experts, d_ff=d_ff)
    ours = our_model(name, d_model=d_model, head_dim=None if name == "olmoe" else 8, experts=experts)
    save_pretrained(ours, tmp_path / "out")
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(tmp_path / "out")
    assert theirs.config.model_type == name
    assert_same_logits(ours, theirs)
    tokens = torch.arange(20)[None]
    expected = theirs(tokens).logits
    difference = load(tmp_path / "out", dtype=torch.bfloat16)(tokens).logits - expected
    # Rounding sends single tokens to other experts.
    assert (difference.norm(dim=-1) / expected.norm(dim=-1)).median() < 0.03


@torch.no_grad()
@pytest.mark.parametrize("name", ["mistral", "mixtral"])
def test_a_window_of_one_is_read_but_leaves_with_code(name, their_model, tmp_path, monkeypatch, modules_folder):
    """The library's cache of a window of 1 keeps every key; without the cache it masks them."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules_folder)
    theirs = their_model(name, sliding_window=1)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs")
    assert_same_logits(ours, theirs)
    write_pretrained(ours.config, ours.state_dict(), tmp_path / "ours", layout=layout_of(ours.config))
    tokens = torch.arange(6)[None]
    expected = theirs.generate(tokens, max_new_tokens=8, do_sample=False, use_cache=False)
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", trust_remote_code=True)
    assert torch.equal(written.generate(tokens, max_new_tokens=8, do_sample=False), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_keep_their_dtype_or_take_the_one_asked_for(dtype, our_model, tmp_path):
    ours = our_model("gpt_neox")
    save_pretrained(ours, tmp_path / "out", dtype=dtype)
    assert {v.dtype for v in tensors_of(tmp_path / "out").values()} == {dtype}
    assert tensors_begin_at(tmp_path / "out" / "model.safetensors") % 64 == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == dtype
    assert {v.dtype for _, v in read_pretrained(tmp_path / "out").tensors()} == {dtype}
    expected = {name: p.to(dtype).float() for name, p in ours.named_parameters()}
    assert_same_tensors(dict(load_pretrained(tmp_path / "out").named_parameters()), expected)
    kept = load_pretrained(tmp_path / "out", dtype)
    assert {p.dtype for p in kept.parameters()} == {dtype}
    save_pretrained(kept, tmp_path / "again")
    assert (tmp_path / "again/config.json").read_text() == (tmp_path / "out/config.json").read_text()


def test_a_lazy_mapping_is_asked_for_one_parameter_at_a_time(our_model, tmp_path):
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


def test_a_parameter_of_another_shape_than_the_config_says_is_not_written(our_config, our_model, tmp_path):
    parameters = dict(our_model("llama").named_parameters())
    with pytest.raises(RunError, match=r"blocks\.0\.attn\.k\.weight"):
        write_pretrained(our_config("llama", n_kv_heads=4), parameters, tmp_path / "out")


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
def test_a_wrong_tensor_is_named_with_its_file(said, their_folder, tmp_path):
    folder = rewrite(their_folder("llama", tmp_path / "hf"), DAMAGE[said])
    with pytest.raises(RunError) as error:
        load_pretrained(folder)
    assert said.removeprefix("model.safetensors: ") in str(error.value)
    assert str(error.value).startswith(str(folder))


def test_a_stored_head_must_be_the_table_it_is_tied_to(their_folder, tmp_path):
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


def test_what_old_checkpoints_hold_beside_parameters_is_left_alone(their_folder, tmp_path):
    mask = torch.ones(24, 24).tril()[None, None]
    neox = {"bias": mask.bool(), "masked_bias": torch.tensor(-1e9), "rotary_emb.inv_freq": torch.ones(2)}
    for name, extra in {
        "gpt2": {"transformer.h.0.attn.bias": mask, "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)},
        "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        "gpt_neox": {f"gpt_neox.layers.0.attention.{name}": tensor for name, tensor in neox.items()},
    }.items():
        folder = their_folder(name, tmp_path / name)
        before = load_pretrained(folder).state_dict()
        assert_same_tensors(load_pretrained(rewrite(folder, lambda t, e=extra: t.update(e))).state_dict(), before)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox tied, serial", "qwen3 tied, gelu"])
def test_a_checkpoint_without_the_head_is_read_under_its_shorter_names(name, their_model, tmp_path):
    """As the first GPT-2 on the hub: the bare model's names."""
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path / "full")
    theirs.base_model.save_pretrained(tmp_path / "bare")
    assert not tensors_of(tmp_path / "full").keys() & tensors_of(tmp_path / "bare").keys()
    edit(tmp_path / "bare", tie_word_embeddings=True)
    expected = load_pretrained(tmp_path / "full").state_dict()
    assert_same_tensors(load_pretrained(tmp_path / "bare").state_dict(), expected)


def test_a_truncated_or_empty_file_is_named(their_folder, tmp_path):
    folder = their_folder("llama", tmp_path / "hf")
    whole = (folder / "model.safetensors").read_bytes()
    for content in (whole[:-100], whole[:20], b"", b"\x80\x04not a pickle either"):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(RunError, match=r"model\.safetensors: damaged"):
            load_pretrained(folder)


def test_a_damaged_index_is_named(their_folder, tmp_path):
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


def test_folders_that_are_no_checkpoints_are_refused_with_the_mend(their_folder, tmp_path):
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


def test_a_folder_in_use_is_not_written_into(our_model, tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        save_pretrained(our_model("llama"), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["kept.txt"]


# ---------------------------------------------------------------- the hub, from its cache


def test_a_hub_id_is_read_from_the_hubs_cache_and_a_missing_one_is_one_line(their_folder, tmp_path, monkeypatch):
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
def test_the_tokenizer_encodes_there_as_here(our_name, kind, our_model, tmp_path):
    tokenizer = byte_level(257)
    if kind == "bpe":
        text = "def f(x): return 1234 + f(x)\n don't 1234 e\u0301"
        tokenizer = Tokenizer.from_str(train_bpe([text] * 9, 278).content.decode())
        assert len(tokenizer.encode(text)) < 20  # words, numbers and marks have grown together
    tokenizer.save(str(tmp_path / "t.json"))
    ours = our_model(our_name, vocab_size=290)
    notes = save_pretrained(ours, tmp_path / "out", tokenizer_file=tmp_path / "t.json", eos_token_id=0)
    # For one family, AutoTokenizer has rules of its own; the note says what to load instead.
    assert ["PreTrainedTokenizerFast" in note for note in notes] == [True] * (our_name == "qwen2")
    kind = transformers.PreTrainedTokenizerFast if notes else transformers.AutoTokenizer
    theirs = kind.from_pretrained(tmp_path / "out")
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


def test_a_tokenizer_that_is_none_or_too_large_is_refused(our_model, tmp_path):
    ours = our_model("llama")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(UsageError, match="not a tokenizers JSON file"):
        save_pretrained(ours, tmp_path / "out", tokenizer_file=tmp_path / "t.json")
    byte_level(257).save(str(tmp_path / "t.json"))
    with pytest.raises(UsageError, match=r"token 256 is outside model\.vocab_size 61"):
        save_pretrained(ours, tmp_path / "out", tokenizer_file=tmp_path / "t.json")
    assert not (tmp_path / "out").exists()

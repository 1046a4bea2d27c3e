"""GGUF files as models: every architecture against transformers' own reader, every type against gguf's."""

import json
import os
import re
import shutil
import struct
from importlib import metadata

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from birthmark.audit.checkpoint import find_members, read_content
from birthmark.errors import RunError, UsageError
from birthmark.models.config import ModelConfig
from birthmark.models.exchange import gguf_model
from birthmark.models.exchange.gguf_file import write_gguf
from birthmark.models.exchange.gguf_model import GGUF_TENSORS, gguf_files, gguf_folder, kinds_of, open_weights
from birthmark.models.exchange.gguf_tensors import READ
from birthmark.models.exchange.pretrained import load_pretrained, read_pretrained
from birthmark.models.exchange.weight_files import INDEX
from birthmark.trainer.by_name.hf_folder import find_hf_folder

D, BLOCKS, HEADS, KV_HEADS, FF, VOCABULARY, LENGTH = 32, 2, 4, 2, 48, 61, 24


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ---------------------------------------------------------------- architectures

_GROUPED = {
    "vocab_size": VOCABULARY, "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}  # fmt: skip
_NARROW = {"vocab_size": VOCABULARY, "n_layer": BLOCKS, "n_head": HEADS}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": FF}
_WIDE_HEADS = {"head_dim": 16}
#: Architecture of GGUF → (class of transformers, its config, what the file says beside the sizes of all).
ARCHITECTURES = {
    "llama": ("Llama", _GROUPED | _WIDE_HEADS, {"rope.dimension_count": 16, "rope.freq_base": 500.0}),
    "qwen2": ("Qwen2", _GROUPED, {}),
    "qwen3": ("Qwen3", _GROUPED | {"head_dim": 128}, {"attention.key_length": 128}),
    "qwen2moe": (
        "Qwen2Moe",
        _GROUPED | _EXPERTS | {"shared_expert_intermediate_size": 40},
        {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": FF}
        | {"expert_shared_feed_forward_length": 40},
    ),
    "qwen3moe": (
        "Qwen3Moe",
        _GROUPED | _EXPERTS | _WIDE_HEADS,
        {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": FF, "attention.key_length": 16},
    ),
    "gemma2": ("Gemma2", _GROUPED | _WIDE_HEADS, {"attention.key_length": 16, "attention.sliding_window": 8}),
    "gemma3": ("Gemma3", _GROUPED | _WIDE_HEADS, {"attention.key_length": 16, "attention.sliding_window": 8}),
    "gpt2": ("GPT2", _NARROW | {"n_embd": D, "n_positions": LENGTH}, {}),
    "bloom": ("Bloom", _NARROW | {"hidden_size": D}, {}),
    "phi3": ("Phi3", _GROUPED | {"pad_token_id": 0, "sliding_window": 8}, {"attention.sliding_window": 8}),
    "starcoder2": ("Starcoder2", _GROUPED | {"use_bias": True}, {"rope.freq_base": 500.0}),
    "stablelm": ("StableLm", _GROUPED, {"rope.dimension_count": 2}),
    "nemotron": ("Nemotron", _GROUPED, {"rope.dimension_count": 4}),
}
#: Of these the library's own reader takes sizes, positions or scales from its defaults: names and values are compared.
OTHER_CONFIG = ("qwen2moe", "qwen3moe", "gpt2", "phi3", "starcoder2", "gemma2", "gemma3")


def causal_lm(arch):
    kind, config, _ = ARCHITECTURES[arch]
    config_kind = "Gemma3TextConfig" if arch == "gemma3" else f"{kind}Config"
    config = getattr(transformers, config_kind)(**config)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def stored_shapes(arch):
    """Names and shapes that a file of the architecture has, by the names that transformers' reader looks for."""
    model = causal_lm(arch)
    kind = TENSOR_PROCESSORS.get(arch, TensorProcessor)
    config = model.config.to_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {}
    for stored, theirs in get_gguf_hf_weights_map(model, kind(config)).items():
        shape = shapes[theirs]
        if ".ffn_gate_exps" in stored or ".ffn_up_exps" in stored:
            shape = (shape[0], shape[1] // 2, shape[2])
        elif arch == "gpt2" and re.search(r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", stored):
            shape = shape[::-1]
        elif stored.endswith("ffn_gate_inp_shexp.weight"):
            shape = shape[1:]
        if not (stored == "output.weight" and model.config.tie_word_embeddings):
            found[f"{stored}.weight" if stored.endswith("_exps") else stored] = shape
    return found


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_architecture(arch, file, seed=0, leave_out=(), more=()):
    """A model of random values, as llama.cpp's converter names it."""
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(BLOCKS)
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(4 * D if arch in ("gpt2", "bloom") else FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS if arch in ("gpt2", "bloom") else KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_pad_token_id(0)
    for key, value in ARCHITECTURES[arch][2].items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{arch}.{key}", value)
    rng = np.random.default_rng(seed)
    for name, shape in [*stored_shapes(arch).items(), *more]:
        if name not in leave_out:
            writer.add_tensor(name, rng.normal(0, 0.2, shape).astype(np.float32))
    finish(writer)
    return file


def test_every_architecture_that_is_read_is_tried():
    assert set(ARCHITECTURES) == set(READ)


@torch.no_grad()
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_is_the_one_that_transformers_reads(tmp_path, arch):
    file = write_architecture(arch, tmp_path / "model.gguf")
    ours = find_hf_folder(str(file)).load().model
    kind = type(ours)
    given = {"config": ours.config} if arch in OTHER_CONFIG else {}
    theirs = kind.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32, **given)
    assert type(theirs) is kind
    state = theirs.state_dict()
    assert ours.state_dict().keys() == state.keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    with open_weights(gguf_folder([file]) / GGUF_TENSORS) as tensors:
        for name in tensors.keys():  # noqa: SIM118, as of safetensors
            values, rows = tensors.get_tensor(name), tensors.get_slice(name)
            assert rows.get_shape() == list(values.shape)
            for part in (slice(1, 3), slice(-3, None), slice(2, 10**6)):
                assert torch.equal(rows[part], values[part]), name
    tokens_BT = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(tokens_BT).logits, theirs(tokens_BT).logits, atol=0, rtol=0)
    found, wanted = ours.config.to_dict(), ARCHITECTURES[arch][1]
    assert {key: found[key] for key in wanted if key in found and key != "tie_word_embeddings"} == {
        key: value for key, value in wanted.items() if key in found and key != "tie_word_embeddings"
    }


@torch.no_grad()
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3moe", "gpt2"])
def test_our_decoder_is_the_same_model(tmp_path, arch):
    file = write_architecture(arch, tmp_path / "model.gguf")
    theirs = find_hf_folder(str(file)).load().model
    tokens_BT = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ours = load_pretrained(file).eval()
    torch.testing.assert_close(ours(tokens_BT), theirs(tokens_BT).logits, atol=1e-4, rtol=1e-4)


def test_positions_follow_from_the_file(tmp_path):
    def rope(arch):
        file = write_architecture(arch, tmp_path / f"{arch}.gguf")
        return transformers.AutoConfig.from_pretrained(gguf_folder([file])).rope_parameters

    assert rope("starcoder2")["rope_theta"] == 500.0
    assert rope("nemotron")["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(("scaled_by_width", "scalar"), [(46, 16), (BLOCKS, D // HEADS)])
def test_scale_and_caps_of_scores_follow_from_the_file(tmp_path, monkeypatch, scaled_by_width, scalar):
    """Gemma 2's file says the caps; the scale is that of a head, in its largest model (by blocks) that of the width."""
    caps = {"attn_logit_softcapping": 7.0, "final_logit_softcapping": 3.0}
    monkeypatch.setitem(gguf_model._BLOCKS_SCALED_BY_WIDTH, "gemma2", scaled_by_width)
    monkeypatch.setitem(ARCHITECTURES, "gemma2", (*ARCHITECTURES["gemma2"][:2], ARCHITECTURES["gemma2"][2] | caps))
    config = transformers.AutoConfig.from_pretrained(gguf_folder([write_architecture("gemma2", tmp_path / "it.gguf")]))
    assert config.query_pre_attn_scalar == scalar
    assert {name: getattr(config, name) for name in caps} == caps


# ---------------------------------------------------------------- types of storage


def written_in(kind, file):
    """A model of one block whose matrices are random bytes of a type: name → bytes ``[rows, bytes]``."""
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    d = 256
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(8)
    writer.add_embedding_length(d)
    writer.add_feed_forward_length(2 * d)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    rng, raw = np.random.default_rng(0), {}
    shapes = {"token_embd": (300, d), "output": (300, d), "blk.0.ffn_down": (d, 2 * d)}
    shapes |= {f"blk.0.attn_{name}": (d, d) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": (2 * d, d) for name in ("gate", "up")}
    for name, (rows, columns) in shapes.items():
        raw[name] = rng.integers(0, 256, (rows, columns // per_block * block_bytes), dtype=np.uint8)
        writer.add_tensor(f"{name}.weight", raw[name], raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(d, np.float32))
    finish(writer)
    return raw


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes are scales of any size
def test_every_type_is_read_as_gguf_reads_it_or_refused_by_name(tmp_path, kind):
    raw = written_in(kind, tmp_path / "m.gguf")
    try:
        expected = {name: gguf.dequantize(rows, kind) for name, rows in raw.items()}
    except NotImplementedError:
        with pytest.raises(UsageError, match=rf"m\.gguf: \S+ is of type {kind.name}, which gguf does not dequantise$"):
            read_pretrained(tmp_path / "m.gguf")
        return
    found = read_pretrained(tmp_path / "m.gguf")
    ours = dict(found.tensors())
    theirs = {"embed.weight": "token_embd", "head.weight": "output", "blocks.0.mlp.down.weight": "blk.0.ffn_down"}
    for name, stored in theirs.items():
        np.testing.assert_array_equal(ours[name].numpy(), expected[stored])
    np.testing.assert_array_equal(found.rows("embed.weight", 3, 290).numpy(), expected["token_embd"][3:290])
    assert kinds_of(found.folder)[kind.name] >= len(raw)


# ---------------------------------------------------------------- split files and folders


def split(file, n_parts):
    """Cut a file into parts as llama.cpp's gguf-split does: the metadata in the first, tensors in all."""
    reader = gguf.GGUFReader(file)
    parts = np.array_split(np.arange(len(reader.tensors)), n_parts)
    paths = []
    for number, indices in enumerate(parts):
        path = file.with_name(f"{file.stem}-{number + 1:05d}-of-{n_parts:05d}.gguf")
        writer = gguf.GGUFWriter(path, "llama")
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", n_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for i in indices:
            writer.add_tensor(reader.tensors[i].name, np.array(reader.tensors[i].data))
        finish(writer)
        paths.append(path)
    return paths


@pytest.fixture
def whole(tmp_path):
    (tmp_path / "whole").mkdir()
    return write_architecture("llama", tmp_path / "whole/m.gguf")


@pytest.fixture
def parts(whole, tmp_path):
    (tmp_path / "split").mkdir()
    return [part.rename(tmp_path / "split" / part.name) for part in split(whole, 3)]


def test_split_files_are_one_model_by_any_of_their_names(whole, parts):
    expected = dict(read_pretrained(whole).tensors())
    for name in (parts[0], parts[2], parts[0].parent):
        found = dict(read_pretrained(name).tensors())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def swapped(parts):
    other = parts[1].rename(parts[1].with_name("other"))
    parts[2].rename(parts[1])
    other.rename(parts[2])


@pytest.mark.parametrize(
    ("change", "error", "line"),
    [
        (lambda parts: parts[1].unlink(), UsageError,
         r"m-00002-of-00003\.gguf: is missing, part of the 3 of m; put it there$"),
        (lambda parts: parts[0].rename(parts[0].with_name("alone.gguf")), UsageError,
         r"alone\.gguf: is one of 3 parts by its metadata; put all into one folder"),
        (swapped, RunError, r"m-00002-of-00003\.gguf: is part 2 by its metadata; fetch it again$"),
    ],
)  # fmt: skip
def test_a_missing_a_renamed_and_a_swapped_part_are_named(parts, change, error, line):
    with pytest.raises(error, match=line):
        read_pretrained(change(parts) or parts[0])


def test_a_folder_of_two_models_asks_which(whole):
    write_architecture("qwen2", whole.with_name("n.gguf"))
    with pytest.raises(UsageError, match=r"holds several GGUF models \(m\.gguf, n\.gguf\); name one of these files$"):
        read_pretrained(whole.parent)


def test_safetensors_beside_a_gguf_must_be_the_same_model(whole, their_model):
    their_model("llama").save_pretrained(whole.parent)
    assert gguf_files(whole.parent) == []  # the safetensors are read, as they always were
    their_model("gpt2").save_pretrained(whole.parent)
    assert gguf_files(whole.parent) == []
    config = whole.with_name("config.json")
    config.write_text(config.read_text().replace('"n_layer": 2', '"n_layer": 3'))
    line = r"model\.safetensors and m\.gguf are of different models \(num_hidden_layers 3 and 2\); name .*m\.gguf, or"
    with pytest.raises(UsageError, match=line):
        gguf_files(whole.parent)
    config.unlink()
    line = r"holds model\.safetensors without config\.json beside m\.gguf; name .*m\.gguf$"
    with pytest.raises(UsageError, match=line):
        gguf_files(whole.parent)


def test_a_file_is_looked_at_again_when_it_changes(whole):
    before = dict(read_pretrained(whole).tensors())["embed.weight"]
    write_architecture("llama", whole, seed=1)
    after = dict(read_pretrained(whole).tensors())["embed.weight"]
    assert not torch.equal(before, after)


# ---------------------------------------------------------------- damage


def patched(file, at, form, value):
    content = bytearray(file.read_bytes())
    struct.pack_into(f"<{form}", content, at, value)
    file.write_bytes(content)


def place_of(file, text):
    return file.read_bytes().index(text.encode())


COUNT, TABLE = "llama.block_count", "token_embd.weight"


def written(form, value, after=None, at=0):
    """A change that writes a number, so many bytes behind the beginning of a text of the file."""
    return lambda file: patched(file, at + (place_of(file, after) if after else 0), form, value)


def cut_to(length):
    return lambda file: file.write_bytes(file.read_bytes()[:length])


#: What is done to a file, and the line that it gives; what is damaged or contradicts itself is no error of the user's.
DAMAGE = {
    "cut short": (cut_to(-4000), r"damaged \(\S+ ends [\d,]+ bytes after"),
    "cut in its header": (cut_to(300), r"damaged \(\S+ ends 4 bytes after the end"),
    "cut in its first word": (lambda m: m.write_bytes(b"GG"), "is no GGUF file"),
    "cut after its first word": (lambda m: m.write_bytes(b"GGUF"), r"damaged \(it has 4 bytes\)"),
    "tensors": (written("Q", 1 << 60, at=8), r"damaged \(it says [\d,]+ tensors, for which"),
    "one tensor more": (written("Q", 22, at=8), "damaged"),
    "entries": (written("Q", 1 << 60, at=16), r"damaged \(it says [\d,]+ entries of metadata"),
    "length of a key": (written("Q", 1 << 62, at=24), r"damaged \(key 0 of the metadata has"),
    "length of a string": (written("Q", 1 << 40, "general.architecture", 24), r"damaged \(general\.architecture has"),
    "type of a value": (written("I", 77, COUNT, 17), r"damaged \(llama\.block_count is of type 77, which the format"),
    "blocks": (written("I", 1 << 31, COUNT, 21), r"damaged \(llama\.block_count is 2147483648, and its tensors say 2"),
    "dimensions": (written("I", 1 << 30, TABLE, 17), r"damaged \(token_embd\.weight has 1,073,741,824 dimensions"),
    "a dimension": (written("Q", 1 << 62, TABLE, 21), r"damaged \(token_embd\.weight ends [\d,]+ bytes after"),
    "type of a tensor": (written("I", 9999, TABLE, 37), r"token_embd\.weight is of type 9999, which gguf does not"),
    "offset": (written("Q", 1 << 50, "blk.1.ffn_up.weight", 39), r"damaged \(blk\.1\.ffn_up\.weight begins at byte"),
    "version": (written("I", 9, at=4), "has version 9 of GGUF, and 2 and 3 are read"),
    "byte order": (written("I", 3 << 24, at=4), "is big-endian"),
    "no GGUF": (lambda m: m.write_text("hello " * 99), "is no GGUF file"),
    "empty": (cut_to(0), "is no GGUF file"),
    "heads": (written("I", 8, "llama.attention.head_count", 30), r"has shape \[64, 32\], its metadata say another"),
    "another architecture": (
        lambda m: m.write_bytes(m.read_bytes().replace(b"llama", b"xxxxx")),
        r"holds a xxxxx model, and of GGUF llama, .*nemotron are read; give another",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line(whole, kind):
    damage, line = DAMAGE[kind]
    damage(whole)
    error = RunError if "damaged" in line or "metadata say" in line else UsageError
    with pytest.raises(error, match=rf"^{re.escape(str(whole))}: .*{line}") as told:
        read_pretrained(whole)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 400


def test_no_byte_of_a_header_brings_it_down(whole):
    """Every fifth byte set to 255: a line, or a model."""
    content = whole.read_bytes()
    for at in range(0, content.index(b"blk.0.ffn_up.weight"), 5):
        whole.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
        try:
            gguf_folder([whole])
        except (RunError, UsageError) as error:
            assert "\n" not in str(error)  # noqa: PT017, either is right


def test_a_tensor_too_few_or_too_many_is_named(tmp_path):
    def refused(error, line, **more):
        with pytest.raises(error, match=line):
            read_pretrained(write_architecture("llama", tmp_path / "m.gguf", **more))

    refused(RunError, r"m\.gguf: blk\.1\.ffn_up\.weight is missing", leave_out=["blk.1.ffn_up.weight"])
    refused(RunError, r"m\.gguf: token_embd\.weight is missing", leave_out=["token_embd.weight"])
    refused(
        UsageError,
        r"m\.gguf: rope_freqs\.weight has no place in the llama model that transformers reads from GGUF",
        more=[("rope_freqs.weight", (8,))],
    )


def test_a_file_that_is_gone_or_a_pipe_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none\.gguf: no such file; give a GGUF file that is there$"):
        read_pretrained(tmp_path / "none.gguf")
    with pytest.raises(UsageError, match=r"^model\.gguf: no such file"):
        read_pretrained("model.gguf")  # the hub is not asked


def test_weights_that_were_cut_short_since_are_named(whole):
    folder = gguf_folder([whole])
    whole.write_bytes(whole.read_bytes()[:-4000])
    with open_weights(folder / GGUF_TENSORS) as tensors:
        last = tensors.keys()[-1]
        with pytest.raises(RunError, match=r"m\.gguf: cannot be read .*fetch the file again$"):
            tensors.get_tensor(last)


def test_a_damaged_description_in_the_cache_is_made_anew(whole):
    folder = gguf_folder([whole])
    before = (folder / GGUF_TENSORS).read_bytes()
    gguf_model._said.cache_clear()  # as in another process
    (folder / GGUF_TENSORS).write_bytes(before.replace(b'"offset": ', b'"offset": 9', 1))
    assert gguf_folder([whole]) == folder
    assert (folder / GGUF_TENSORS).read_bytes() == before


def test_a_source_that_has_become_a_pipe_is_named(whole):
    folder = gguf_folder([whole])
    whole.unlink()
    os.mkfifo(whole)
    with (
        open_weights(folder / GGUF_TENSORS) as tensors,
        pytest.raises(RunError, match=r"m\.gguf: is a pipe, not a file; put"),
    ):
        tensors.get_tensor(tensors.keys()[0])


# ---------------------------------------------------------------- gguf.json of others


def test_a_description_outside_of_the_cache_means_nothing(whole, tmp_path):
    """It is whole, sealed and true: nobody can tell that of one that names other files."""
    inside, outside = gguf_folder([whole]), tmp_path / "gguf-0123456789abcdef"
    shutil.copytree(inside, outside)
    assert len(kinds_of(inside)) == 1
    assert kinds_of(outside) == {}
    for read in (read_pretrained, lambda folder: find_hf_folder(str(folder))):
        with pytest.raises(UsageError, match=r"gguf-0123456789abcdef: no model\.safetensors and no model\.safete"):
            read(outside)
    with pytest.raises(RunError, match="gguf-0123456789abcdef: no weights in it"):
        read_content(find_members([str(outside)])[0], scan=False)
    # A link to the folder in the cache is that folder; one to another folder, put into the cache's place, is not.
    (tmp_path / "link").symlink_to(inside)
    assert kinds_of(tmp_path / "link") == kinds_of(inside)
    (inside.parent / "gguf-linked").symlink_to(outside)
    assert kinds_of(inside.parent / "gguf-linked") == {}


def test_an_index_of_others_names_no_description_as_a_shard(whole, tmp_path):
    folder = tmp_path / "theirs"
    shutil.copytree(gguf_folder([whole]), folder)
    weight_map = dict.fromkeys(json.loads((folder / GGUF_TENSORS).read_text())["tensors"], GGUF_TENSORS)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for read in (read_pretrained, lambda name: find_hf_folder(str(name))):
        with pytest.raises(RunError, match=r"theirs/gguf\.json: "):
            read(folder)


# ---------------------------------------------------------------- tokenizers


@torch.no_grad()
def test_a_tokenizer_comes_with_the_model(tmp_path, word_tokenizer, lively):
    config = ModelConfig(d_model=32, n_layers=1, n_heads=2, d_ff=48, vocab_size=270, max_seq_len=24, mlp="swiglu")
    ours = lively(config)
    (tmp_path / "t.json").write_bytes(word_tokenizer.content)
    write_gguf(config, ours.state_dict(), tmp_path / "m.gguf", tokenizer_file=tmp_path / "t.json")
    found = read_pretrained(tmp_path / "m.gguf")
    again = load_pretrained(found)
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), again.parameters(), strict=True))
    loaded = transformers.AutoTokenizer.from_pretrained(found.folder)
    text = "hello world, some other text; naïve 123"
    assert loaded(text, add_special_tokens=False).input_ids == word_tokenizer.encode([text])[0].tolist()
    assert loaded.add_bos_token is False


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {"transformers": "5.17.1"},
            "reading GGUF needs transformers 5.18 or later, and this is 5.17.1: pip",
        ),
        (
            {"transformers": "4.57.6"},
            "reading GGUF needs transformers 5.18 or later, and this is 4.57.6: pip",
        ),
        ({"gguf": None}, "reading GGUF needs gguf: pip install gguf"),
    ],
)
def test_a_library_that_is_missing_or_too_old_is_named(whole, monkeypatch, changed, line):
    installed = metadata.version

    def version(name):
        if name in changed and changed[name] is None:
            raise metadata.PackageNotFoundError(name)
        return changed.get(name) or installed(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(UsageError, match=re.escape(f"{whole}: {line}")):
        read_pretrained(whole)


def test_a_model_without_tokenizer_has_none(whole):
    assert read_pretrained(whole).tokenizer_file is None

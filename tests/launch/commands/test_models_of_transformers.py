"""Models of ``transformers`` that our decoder cannot be, by the commands; their own code, and their damaged files."""

import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load, save_file

from birthmark.data.probes import random_probe
from birthmark.errors import RunError, UsageError
from birthmark.launch.cli import main
from birthmark.measure.hf import HFModel
from birthmark.measure.measurement import measure
from birthmark.trainer.by_name.hf_folder import find_hf_folder

PROBE = ["--n_sequences=6", "--seq_len=8", "--batch_size=4"]
SHAPE = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
BIRTH = "model: {d_model: 16, n_layers: 1, n_heads: 2, vocab_size: 40, max_seq_len: 64}\n"
MODEL_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
from .halves import HALF

open({marker!r}, "w").close()

class OwnConfig(LlamaConfig):
    model_type = "of_its_own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory, enliven):
    """A folder with a mixture of experts, and its twin of another seed."""
    place = tmp_path_factory.mktemp("theirs")
    for seed, name in enumerate(("one", "two")):
        model = enliven(transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE)), seed)
        model.save_pretrained(place / name)
    return place


@pytest.fixture
def copy(mixtral, tmp_path):
    """A folder that a test may damage."""
    return shutil.copytree(mixtral / "one", tmp_path / "copy")


@pytest.fixture
def said(capsys):
    """``said(status, *arguments)``: what a command that ends with this status printed, and its errors."""

    def run(status, *arguments):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == status, capsys.readouterr().err
        return capsys.readouterr()

    return run


@pytest.mark.heavy
def test_a_snapshot_names_what_is_not_seen(mixtral, said, tmp_path):
    shown = said(0, "snapshot", mixtral / "one", *PROBE, "--out", tmp_path / "found").out
    assert "not seen: the hidden units of blocks 1–2 (a mixture of experts)" in shown
    summary = json.loads((tmp_path / "found" / "summary.json").read_text())
    assert summary["unseen"] == ["the hidden units of blocks 1–2 (a mixture of experts)"]
    assert "sink_mass" in summary["bias"]
    assert "super_neurons" not in summary["bias"]
    said(0, "report", tmp_path / "found", "--out", tmp_path / "page.html")
    assert "the hidden units of blocks 1–2 (a mixture of experts)" in (tmp_path / "page.html").read_text()


@pytest.mark.heavy
def test_a_model_without_an_attention_that_is_seen_has_a_snapshot_and_a_page(said, tmp_path):
    config = transformers.OpenAIGPTConfig(vocab_size=40, n_embd=16, n_layer=1, n_head=4, n_positions=8)
    transformers.OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path / "openai-gpt")
    shown = said(0, "snapshot", tmp_path / "openai-gpt", *PROBE, "--out", tmp_path / "found").out
    assert "not seen: the attention of block 1 (it does not run through the attention interface" in shown
    summary = json.loads((tmp_path / "found" / "summary.json").read_text())
    assert "preference_ratio" in summary["bias"]
    assert "sink_mass" not in summary["bias"]
    said(0, "report", tmp_path / "found", "--out", tmp_path / "page.html")


def test_a_folder_of_images_and_text_is_measured_as_its_model_in_memory(said, tmp_path):
    text = {name: value for name, value in SHAPE.items() if "experts" not in name}
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text),
        vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_index=39,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "llava")
    shown = json.loads(said(0, "snapshot", tmp_path / "llava", *PROBE, "--json").out)
    found = measure(HFModel(model.eval()), random_probe(40, 6, 8, 0), batch_size=4)
    assert {"sink_mass", "preference_ratio"} <= found.scalars.keys() <= shown["scalars"].keys()
    for name, value in found.scalars.items():
        assert shown["scalars"][name] == pytest.approx(value, rel=1e-5, nan_ok=True), name


def test_fingerprint_and_identify_read_what_snapshot_reads(mixtral, said, tmp_path, refused):
    how = ["--n_inputs=50", "--seq_len=8", "--cache_dir", tmp_path / "cache", "--json"]
    pairs = [mixtral / "one", mixtral / "two", mixtral / "one"]
    found = json.loads(said(0, "fingerprint", *pairs, *how, "--strangers=1", "--out", tmp_path / "a.png").out)
    assert [pair["verdict"] for pair in found["pairs"]] == ["stranger", "kin", "stranger"]
    assert len(found["strangers"]) == 3
    config = tmp_path / "config.yaml"
    config.write_text(BIRTH)
    ranked = json.loads(said(0, "identify", mixtral / "one", "--seeds=0..2", "--config", config, *how).out)
    assert {entry["seed"] for entry in ranked["seeds"]} == {0, 1, 2}
    assert "give --config" in refused("identify", mixtral / "one", "--seeds=1", *how)


@pytest.mark.heavy
def test_families_are_compared_under_both_nulls_and_are_no_kin_of_their_strangers(said, tmp_path):
    """Also those that torch's first seed gave: its generator reads the last 32 bits of a seed alone."""
    for family, nulls in {"Mistral": ["dimensions", "matched"], "Gemma": ["matched"], "GPTNeoX": ["matched"]}.items():
        config = getattr(transformers, f"{family}Config")(**SHAPE, head_dim=8, max_position_embeddings=16)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = getattr(transformers, f"{family}ForCausalLM")(config)
        model.save_pretrained(tmp_path / "a")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.004 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / "b")
        for null in nulls:
            how = ["--n_inputs=60", "--seq_len=8", f"--null={null}", "--cache_dir", tmp_path / "cache", "--json"]
            found = json.loads(said(0, "fingerprint", tmp_path / "a", tmp_path / "b", *how, "--strangers=1").out)
            assert [pair["verdict"] for pair in found["pairs"]] == ["kin"], family
            assert [test["verdict"] for test in found["strangers"]] == ["stranger"] * 2, family


@pytest.fixture
def own_code(copy, tmp_path, monkeypatch, modules_folder):
    """A folder of a model with code of its own, and the file that the code makes when it runs."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules_folder)
    marker = tmp_path / "ran"
    (copy / "own_model.py").write_text(MODEL_CODE.format(marker=str(marker)))
    (copy / "halves.py").write_text("HALF = 0.5\n")
    llama = transformers.LlamaConfig(**SHAPE)
    transformers.LlamaForCausalLM(llama).save_pretrained(copy)
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_model.OwnModel"}
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "of_its_own"}))
    return copy, marker


@pytest.mark.parametrize("command", ["snapshot", "fingerprint", "identify"])
def test_code_of_a_model_is_never_run_without_the_flag(command, own_code, said, tmp_path, refused):
    folder, marker = own_code
    more = {
        "snapshot": [folder, *PROBE],
        "fingerprint": [folder, folder, "--n_inputs=20", "--strangers=0", "--cache_dir", tmp_path / "cache"],
        "identify": [folder, "--seeds=1", "--config", tmp_path / "a.yaml", "--n_inputs=20", "--cache_dir", tmp_path],
    }[command]
    (tmp_path / "a.yaml").write_text(BIRTH)
    error = refused(command, *more)
    assert f"{folder}: of_its_own models bring code of their own (own_model.py)" in error
    assert "only with --trust_remote_code" in error
    assert not marker.exists()
    error = said(0, command, *more, "--trust-remote-code", "--seq_len=8").err
    assert f"running code of {folder}: own_model.py, halves.py" in error
    assert marker.exists()


def test_code_of_another_repository_is_refused(own_code, said, refused):
    folder, marker = own_code
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoModelForCausalLM"] = "someone/else--own_model.OwnModel"
    (folder / "config.json").write_text(json.dumps(config))
    for more in ([], ["--trust-remote-code"]):
        assert "code of another repository" in refused("snapshot", folder, *PROBE, *more)
    assert not marker.exists()


@pytest.mark.parametrize("widths", [0, [24, 0]])
def test_a_width_of_zero_is_one_line_before_the_library_reads_it(widths, copy, said):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": widths}))
    error = said(1, "snapshot", copy, *PROBE).err
    assert re.fullmatch(r".*config\.json: damaged \(intermediate_size(\[1\])? is 0, not at least 1\)\n", error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # The router of the first layer, after the embedding and the attention.
        ({"num_local_experts": 10**9}, "16,000,001,408 or more parameters in 6 or more tensors"),
        ({"head_dim": 10**12}, "32,000,000,000,640 or more parameters in 2 or more tensors"),
        ({"vocab_size": 1 << 26}, "1,073,741,824 or more parameters in 1 or more tensors"),
        (
            {"num_hidden_layers": 2048, "hidden_size": 2, "intermediate_size": 2},
            r"[\d,]+ or .* [5-9],\d+ or more tensors",
        ),
        ({"text_config": {"num_hidden_layers": 10**8}}, r"\(text_config.num_hidden_layers is 100000000, above 2048\)"),
        ({"vision": [{"depths": [2, 10**8]}]}, r"\(vision.depths is 100000000, above 2048\)"),
        ({"decoder_layers": 10**8}, r"\(decoder_layers is 100000000, above 2048\)"),
        ({"num_labels": 10**9}, r"\(num_labels is 1000000000, above 1048576\)"),
    ],
)
def test_a_config_that_asks_for_far_more_than_the_weights_is_refused(change, message, copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    held = load((copy / "model.safetensors").read_bytes()).values()
    if message.startswith(r"\("):
        expected = f"^{copy}/config.json: damaged {message}"
    else:
        said = f"its weights hold {sum(x.numel() for x in held):,} in {len(held)}; give"
        expected = f"^{copy}: config.json asks for a model of {message}, and {said}"
    with pytest.raises((UsageError, RunError), match=expected):
        find_hf_folder(str(copy)).parameter_shapes()


def test_damaged_weights_are_one_line(copy, said, refused):
    weights = copy / "model.safetensors"
    tensors = load(weights.read_bytes())
    first = next(name for name in tensors if name.endswith("o_proj.weight"))
    save_file(tensors | {first: tensors[first].to(torch.int8)}, weights, metadata={"format": "pt"})
    error = said(1, "snapshot", copy, *PROBE).err
    assert f"{first} is I8, and config.json says nothing of quantisation" in error
    save_file({name: x.to(torch.bfloat16) for name, x in tensors.items()}, weights, metadata={"format": "pt"})
    error = said(0, "snapshot", copy, *PROBE).err
    assert f"{copy}: its weights are bfloat16, though config.json says float32\n" in error
    weights.unlink()
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00001.safetensors" in refused("snapshot", copy, *PROBE, status=1)

"""A GGUF file wherever a command takes a model: beside the same model as a folder of transformers."""

import json

import pytest
import torch
import transformers

from birthmark.launch.cli import main
from birthmark.launch.options import WRONG
from birthmark.measure.records import Snapshot
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.gguf_file import write_gguf
from birthmark.models.exchange.pretrained import write_pretrained

_SIZES = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "vocab_size": 270, "max_seq_len": 24}
#: Its norm_eps is a number that GGUF's float32 holds.
MODEL = ModelConfig(**_SIZES, mlp="swiglu", norm_eps=2**-16)
TEXT = "hello world, some other text here. " * 400


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "gguf-cache"))


@pytest.fixture(scope="module")
def models(tmp_path_factory, word_tokenizer, enliven):
    """``m.gguf`` and ``hf``, one model, and ``text.txt``, in a folder."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "tokenizer.json").write_bytes(word_tokenizer.content)
    weights = enliven(born(MODEL, 0)).state_dict()
    write_gguf(MODEL, weights, folder / "m.gguf", tokenizer_file=folder / "tokenizer.json", eos_token_id=0)
    write_pretrained(MODEL, weights, folder / "hf", tokenizer_file=folder / "tokenizer.json", eos_token_id=0)
    (folder / "text.txt").write_text(TEXT)
    return folder


def shown(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def measured(capsys, models, name, *more):
    """The figures of a snapshot that no name and no clock decides. Only the folder names a BOS, for controls."""
    size = ("--n_sequences", 4, "--seq_len", 8, "--controls", "false")
    found = json.loads(shown(capsys, "snapshot", models / name, *size, "--json", *more))
    return {key: value for key, value in found.items() if key not in ("source", "seconds", "stored_kinds")}


@pytest.mark.parametrize("more", [(), ("--stream",)])
def test_a_snapshot_is_that_of_the_folder(models, capsys, tmp_path, more):
    assert measured(capsys, models, "m.gguf", "--out", tmp_path / "s", *more) == measured(capsys, models, "hf", *more)
    assert Snapshot.read(tmp_path / "s").summary["stored_kinds"] == {"F32": 21}


@pytest.mark.parametrize(
    "command",
    [
        "compare {gguf} {hf} --n_sequences 8 --seq_len 8",
        "quantise {gguf} --data {text} --seq_len 8 --n_sequences 4",
        "intervene {gguf} --kind mask --layer 1 --position 3 --n_sequences 4 --seq_len 12",
        "length {gguf} --data {text} --to 24 --n_sequences 2",
        "fingerprint {gguf} {hf} --n_inputs 40 --seq_len 8",
    ],
    ids=lambda command: command.split()[0],
)
def test_commands_take_a_file(models, capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    names = {"gguf": models / "m.gguf", "hf": models / "hf", "text": models / "text.txt"}
    assert shown(capsys, *(word.format(**names) for word in command.split()))


def test_an_audit_sees_that_a_file_and_a_folder_hold_the_same_weights(models, capsys):
    assert main(["audit", str(models / "m.gguf"), str(models / "hf")]) == WRONG
    assert "m.gguf: note: has the weights of hf" in capsys.readouterr().out


def test_describe_counts_parameters_and_names_the_storage(models, capsys):
    found = json.loads(shown(capsys, "describe", models / "m.gguf", "--json"))
    folder = json.loads(shown(capsys, "describe", models / "hf", "--json"))
    assert found.pop("stored_kinds") == {"F32": 21}
    assert folder.pop("stored_kinds") == {}
    assert found == folder
    assert found["n_params"] == sum(parameter.numel() for parameter in born(MODEL, 0).parameters())
    assert "weights are stored as     F32: 21 tensors" in shown(capsys, "describe", models / "m.gguf")


@torch.no_grad()
def test_export_writes_what_transformers_opens(models, capsys, tmp_path, word_tokenizer):
    assert shown(capsys, "export", models / "m.gguf", tmp_path / "out") == f"{tmp_path / 'out'}\n"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(models, gguf_file="m.gguf", dtype=torch.float32)
    tokens_BT = torch.randint(0, 270, (2, 12), generator=torch.Generator().manual_seed(0))
    assert torch.equal(theirs(tokens_BT).logits, reference(tokens_BT).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("some text").input_ids == word_tokenizer.encode(["some text"])[0].tolist()
    card = (tmp_path / "out/README.md").read_text()
    assert "read from the GGUF file `m.gguf`" in card
    assert "stored as F32: 21 tensors" in card
    assert not (tmp_path / "out/gguf.json").exists()
    shown(capsys, "export", models / "m.gguf", tmp_path / "half", "--dtype", "bfloat16")
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("export {m}/m.gguf {t}/o --gguf", "--gguf: {m}/m.gguf is a GGUF model, and leaves as"),
        ("export {m}/m.gguf {t}/o --step 3", "--step 3: {m}/m.gguf is no run's folder; leave --step out"),
        ("snapshot {m}/none.gguf", "{m}/none.gguf: no such file; give a GGUF file that is there"),
        ("describe {m}/none.gguf", "{m}/none.gguf: no such file; give a GGUF file that is there"),
        ("adapt {m}/none.gguf --adapter.kind lora", "--init_from {m}/none.gguf: no such file"),
        ("sample {t}", "{t}: neither a run, RUN@STEP, a checkpoint, CONFIG@SEED nor a folder of transformers"),
    ],
)
def test_wrong_requests_are_one_line(models, tmp_path, words, line, refused):
    names = {"m": models, "t": tmp_path}
    assert line.format(**names) in refused(*(word.format(**names) for word in words.split()))


def test_a_file_without_tokenizer_reads_no_text(models, tmp_path, capsys):
    write_gguf(MODEL, born(MODEL, 0).state_dict(), tmp_path / "m.gguf")
    name = str(tmp_path / "m.gguf")
    for words in (
        ["sample", name, "--prompt", "a"],
        ["snapshot", name, "--data", f"{models}/text.txt", "--seq_len", "8"],
    ):
        assert main(words) == 2
        assert f"{name}: has no tokenizer to read " in capsys.readouterr().err


@torch.no_grad()
@pytest.mark.parametrize(("name", "before"), [("hf", [269]), ("m.gguf", [])])
def test_sample_takes_the_likeliest_tokens_of_transformers(models, capsys, word_tokenizer, name, before):
    """The folder's tokenizer puts ``<s>`` before a text, and the file says that none is put there."""
    out = shown(capsys, "sample", models / name, "--prompt", "hello", "--temperature", 0, "--max_tokens", 6)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(models / "hf", dtype=torch.float32)
    prompt = word_tokenizer.encode(["hello"])[0].tolist()
    ids = [*before, *prompt]
    for _ in range(6):
        token = int(theirs(torch.tensor([ids])).logits[0, -1].argmax())
        if token == 0:
            break
        ids.append(token)
    assert out == f"hello{word_tokenizer.decode(ids[len(before) + len(prompt) :])}\n"


def test_a_run_starts_from_a_file(models, capsys, tmp_path):
    places = {"init_from": models / "m.gguf", "data.path": models / "text.txt", "data.cache_dir": tmp_path / "cache"}
    sizes = {"micro_batch_size": 2, "global_batch_size": 2, "val_sequences": 2, "max_steps": 1, "device": "cpu"}
    small = places | {f"trainer.{name}": value for name, value in sizes.items()} | {"run_dir": tmp_path / "run"}
    small |= {"model.max_seq_len": 16, "snapshot.enabled": False, "log.wandb": "off"}
    shown(capsys, "pretrain", *(f"--{name}={value}" for name, value in small.items()))
    birth = json.loads((tmp_path / "run/birth.json").read_text())
    assert birth["init_from"] == str(models / "m.gguf")

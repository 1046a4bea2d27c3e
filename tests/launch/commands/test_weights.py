"""What a run's weights become: text, a folder of transformers, and the start of another run."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace

from birthmark.launch.cli import main
from birthmark.launch.commands import export
from birthmark.launch.commands.export import is_installed
from birthmark.measure.records import RunDir
from birthmark.models.birth import born, digest
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.pretrained import load_pretrained, write_pretrained
from birthmark.trainer.checkpoints.folder_io import load_model
from birthmark.trainer.config_file import read_config

WORDS = "the seed decides which token a newborn model likes and no corpus ever asks why it does"


def config_file(folder, **model):
    """A run on a small text, as a config file."""
    folder.mkdir(exist_ok=True)
    corpus = folder / "corpus.txt"
    rng = np.random.default_rng(0)
    corpus.write_text("\n\n".join(" ".join(rng.choice(WORDS.split(), 12)) + "." for _ in range(400)))
    content = {
        "model": {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 300, "max_seq_len": 16, "mlp": "swiglu"}
        | model,
        "data": {"path": str(corpus), "cache_dir": str(folder / "cache")},
        "optim": {"lr": 0.01, "warmup_steps": 2},
        "trainer": {
            "max_steps": 40, "micro_batch_size": 8, "global_batch_size": 8, "checkpoint_every": 20, "log_every": 10,
            "val_sequences": 8, "device": "cpu",
        },
        "snapshot": {"n_sequences": 8, "seq_len": 8, "n_strangers": 1},
        "log": {"wandb": "off"},
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory, no_page):
    """A finished run on text."""
    folder = tmp_path_factory.mktemp("trained")
    with no_page():
        assert main(["pretrain", "--config", str(config_file(folder)), "--run-dir", str(folder / "run")]) == 0
    return RunDir(folder / "run")


def test_text_goes_on_from_a_prompt_and_the_seed_decides_it(trained, capsys):
    def text(*more):
        assert main(["sample", str(trained.path), "--prompt", "the seed", "--max-tokens", "12", *more]) == 0
        return capsys.readouterr().out

    one, again, other = text(), text(), text("--seed", "1")
    assert one == again != other
    assert all(t.startswith("the seed") and t.endswith("\n") and len(t) > 20 for t in (one, other))
    assert text("--temperature", "0") == text("--temperature", "0", "--seed", "5")
    assert text("--temperature", "5", "--top-k", "1") == text("--temperature", "0")
    assert text("--step", "20", "--temperature", "0") != text("--temperature", "0")
    # Without a prompt a text begins.
    assert main(["sample", str(trained.path), "--max_tokens", "3"]) == 0
    assert capsys.readouterr().out.strip()


def test_greedy_text_is_that_of_transformers(trained, tmp_path, capsys):
    """The whole way: export, their tokenizer, their model, their generation without a cache."""
    assert main(["export", str(trained.path), str(tmp_path / "theirs")]) == 0
    capsys.readouterr()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    ids = tokenizer("which token", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=10, do_sample=False, use_cache=False, pad_token_id=0)
    assert main(["sample", str(trained.path), "--prompt", "which token", "--max-tokens", "10", "--temperature=0"]) == 0
    written = [int(i) for i in expected[0] if int(i) != tokenizer.eos_token_id]
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(written)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        # As Llama 2 has it.
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ],
)
@pytest.mark.parametrize("prompt", ["the seed", ""])
def test_a_continuation_begins_with_its_space(prompt, decoder, tmp_path, capsys):
    words = sorted(set(WORDS.split()))
    tokenizer = Tokenizer(WordLevel({piece: i for i, piece in enumerate(["</s>", *(f"▁{word}" for word in words)])}))
    tokenizer.pre_tokenizer, tokenizer.decoder = Metaspace(), decoder
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=len(words) + 1, max_seq_len=16, mlp="swiglu")
    weights = born(config, 0).state_dict()
    write_pretrained(config, weights, tmp_path / "hf", tokenizer_file=tmp_path / "tokenizer.json", eos_token_id=0)
    assert main(["sample", str(tmp_path / "hf"), "--prompt", prompt, "--max_tokens", "8", "--temperature", "5"]) == 0
    text = capsys.readouterr().out
    # Every token is a word.
    assert text == " ".join(text.split()) + "\n"
    assert text.startswith(prompt)
    assert len(text.split()) > len(prompt.split()) + 1
    assert set(text.split()) <= set(words)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_export_has_the_checkpoints_weights(trained, tmp_path, dtype):
    more = [] if dtype is None else ["--dtype", dtype]
    assert main(["export", str(trained.path), str(tmp_path / "out"), "--step", "20", *more]) == 0
    ours = load_model(read_config(trained.config).model, trained.checkpoint(20))
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    expected = dict(ours.named_parameters())["blocks.1.attn.q.weight"].to(getattr(torch, dtype or "float32"))
    assert torch.equal(theirs["model.layers.1.self_attn.q_proj.weight"], expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 300
    if dtype is None:
        assert main(["export", f"{trained.path}@20", str(tmp_path / "again")]) == 0
        assert all(
            torch.equal(value, theirs[name])
            for name, value in load_file(tmp_path / "again" / "model.safetensors").items()
        )


def test_the_card_says_where_the_model_comes_from_and_neither_seed_nor_path(trained, tmp_path, capsys):
    assert main(["export", str(trained.path), str(tmp_path / "out"), "--step", "20"]) == 0
    card, birth = (tmp_path / "out" / "README.md").read_text(), trained.read_birth()
    assert f"SHA-256 of every parameter at birth: `{birth['digest']}`" in card
    n_tokens = birth["data"]["tokens"]["train"]
    snapshot = max((one for one in trained.snapshots() if one.step <= 20), key=lambda one: one.step)
    for line in (
        f"of {birth['n_params']:,} parameters, after 20 steps of training",
        'AutoTokenizer.from_pretrained("out")',
        f"| tokens | {n_tokens:,} train",
        f"## Measured at step {snapshot.step}",
        f"| Preference ratio | {snapshot.bias['preference_ratio']:.2f}",
        "| `mlp` | swiglu |",
        ", step 20 |",
    ):
        assert line in card, line
    assert str(trained.path.parent) not in card
    assert "seed |" not in card
    assert "trust_remote_code" not in card
    # Of a run without records the weights leave all the same.
    damaged = tmp_path / "damaged"
    shutil.copytree(trained.path, damaged)
    broken = RunDir(damaged).snapshot(40) / "summary.json"
    broken.write_text("{}")
    capsys.readouterr()
    assert main(["export", str(damaged), str(tmp_path / "other")]) == 0
    assert f"README.md says nothing of the run: {broken}" in capsys.readouterr().err
    assert "without its run's records" in (tmp_path / "other" / "README.md").read_text()


def test_a_family_that_the_installed_transformers_lacks_is_told(tmp_path, capsys, monkeypatch):
    assert is_installed("llama")
    monkeypatch.setattr(export, "is_installed", lambda model_type: model_type == "llama")
    assert main(["export", "demo@0", str(tmp_path / "out")]) == 0
    assert "installed here, has no arcee: a later one opens it, or export with --own_code" in capsys.readouterr().out


def test_the_card_of_a_certified_run_commits_and_does_not_tell(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained.path, run)
    assert main(["certify", str(run)]) == 0
    assert main(["export", str(run), str(tmp_path / "out"), "--own_code"]) == 0
    certificate = json.loads((run / "certificate.json").read_text())
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| init seed | `{certificate['commitments']['init_seed']}` |" in card
    assert f"| certificate | `{certificate['sha256']}` |" in card
    assert trained.read_birth()["digest"] not in card
    assert "`configuration_birthmark.py` and `modeling_birthmark.py`" in card
    # What it says to run loads both, and asks nothing.
    text = "which token a newborn likes"
    shown = f"print(type(model).__name__, tokenizer({text!r}).input_ids)"
    snippet = card.split("```python\n")[1].split("```")[0] + shown
    ran = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    ids = Tokenizer.from_file(str(trained.tokenizer)).encode(text).ids
    assert ran.stdout == f"BirthmarkForCausalLM {ids}\n", ran.stderr
    assert "custom code" not in ran.stderr
    assert "is otherwise not supported" not in ran.stderr


def test_a_gguf_file_has_the_weights_and_the_tokenizer(trained, tmp_path, capsys, refused):
    assert main(["export", str(trained.path), str(tmp_path / "out"), "--gguf"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    out, text = tmp_path / "out", "which token a newborn likes, asks the corpus"
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, gguf_file="model.gguf")
    ids = Tokenizer.from_file(str(trained.tokenizer)).encode(text).ids
    assert tokenizer(text).input_ids == ids
    model = transformers.AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32)
    ours = load_model(read_config(trained.config).model, trained.checkpoint(40))
    tokens_BT = torch.tensor([ids[:16]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_BT).logits, ours(tokens_BT), atol=1e-5, rtol=1e-4)
    assert 'from_pretrained("out", gguf_file="model.gguf")' in (out / "README.md").read_text()
    both = refused("export", trained.path, tmp_path / "two", "--gguf", "--own_code")
    assert "a GGUF file has no code; leave one of them out" in both


def test_a_birth_is_exported_by_its_run_or_its_config_and_seed(trained, tmp_path):
    seed = read_config(trained.config).init_seed
    born_from = dict(born(read_config(trained.config).model, seed).named_parameters())
    for name, out in ((f"{trained.path}@0", "run"), (f"{trained.config}@{seed}", "config")):
        assert main(["export", name, str(tmp_path / out)]) == 0
        theirs = load_file(tmp_path / out / "model.safetensors")
        assert torch.equal(theirs["model.layers.1.self_attn.q_proj.weight"], born_from["blocks.1.attn.q.weight"])
        assert (tmp_path / out / "tokenizer.json").is_file() == (out == "run")
        assert f"`{trained.read_birth()['digest']}`" in (tmp_path / out / "README.md").read_text()


def test_a_run_starts_where_an_export_ended_with_its_tokenizer(trained, tmp_path, capsys, no_page):
    assert main(["export", str(trained.path), str(tmp_path / "theirs")]) == 0
    corpus = read_config(trained.config).data.path
    command = ["pretrain", "--init-from", str(tmp_path / "theirs"), "--data.path", corpus, "--model.max_seq_len", "12"]
    command += [f"--data.cache_dir={tmp_path}", "--trainer.max_steps=4", "--trainer.checkpoint_every=2"]
    command += ["--snapshot.seq_len=8", "--snapshot.n_sequences=8", "--trainer.micro_batch_size=4", "--log.wandb=off"]
    command += ["--trainer.global_batch_size=4", "--trainer.device=cpu", "--run_dir"]
    with no_page():
        assert main([*command, str(tmp_path / "run")]) == 0
    run = RunDir(tmp_path / "run")
    began, ended = (
        json.loads(run.birth.read_text()),
        load_model(read_config(trained.config).model, trained.checkpoint(40)),
    )
    assert began["digest"] == digest(ended)
    assert began["init_from"] == str(tmp_path / "theirs")
    assert "distribution" not in str(began["parameters"])
    assert (run.path / "tokenizer.json").read_bytes() == trained.tokenizer.read_bytes()
    assert read_config(run.config).model.max_seq_len == 12
    first = run.snapshots()[0]
    # It knows the text already, and its reference is where it started.
    assert first.summary["bias"]["drift"] == pytest.approx(1)
    assert first.summary["bias"]["kl_uniform"] > 5 * trained.snapshots()[0].summary["bias"]["kl_uniform"]

    # Resuming goes on from its own checkpoint, with the same start behind it; a changed source is named.
    with no_page():
        assert main(["pretrain", "--resume", str(run.path), "--trainer.max_steps", "6"]) == 0
    assert run.checkpoint(6).is_dir()
    source = tmp_path / "theirs" / "model.safetensors"
    content = bytearray(source.read_bytes())
    content[-1] ^= 1
    source.write_bytes(content)
    capsys.readouterr()
    assert main(["pretrain", "--resume", str(run.path), "--trainer.max_steps", "8"]) == 1
    assert "the certificate says" in capsys.readouterr().err


def test_what_cannot_be_done_is_told_in_one_line(trained, tmp_path, refused):
    (tmp_path / "taken").mkdir()
    for arguments, printed in (
        (["sample", str(trained.path), "--step", "7"], "has no checkpoint of step 7; there are: 20, 40"),
        (["sample", str(trained.path), "--temperature=-1"], "--temperature"),
        (["sample", str(trained.path), "--max_tokens", "0"], "--max_tokens"),
        (["sample", str(trained.path), "--prompt", "\udcff"], "--prompt is not UTF-8"),
        (["export", str(trained.path), str(tmp_path / "taken")], "exists already"),
        (["export", str(trained.path), str(tmp_path / "new"), "--dtype", "int8"], "dtype"),
        (
            ["export", str(trained.path), str(tmp_path / "new"), "--step", "7"],
            "no checkpoint of step 7; there are: 20, 40",
        ),
        (["export", str(tmp_path), str(tmp_path / "new")], "neither a run, RUN@STEP, a checkpoint nor CONFIG@SEED"),
    ):
        assert printed in refused(*arguments)


def test_an_arm_that_transformers_lacks_leaves_with_its_code_moments_and_all(tmp_path, capsys, no_page):
    arm = {"aggregation": "calibrated", "calibration": {"correlation": "estimated"}}
    file, run = config_file(tmp_path, attention=arm), tmp_path / "run"
    flags = ["--trainer.max_steps=2", "--trainer.checkpoint_every=2", f"--run_dir={run}"]
    with no_page():
        assert main(["pretrain", f"--config={file}", *flags]) == 0
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert "load it with trust_remote_code=True" in capsys.readouterr().out
    assert (tmp_path / "out" / "modeling_birthmark.py").is_file()
    trained = load_model(read_config(run / "config.yaml").model, RunDir(run).checkpoint(2)).state_dict()
    found = load_pretrained(tmp_path / "out").state_dict()
    assert found.keys() == trained.keys()
    assert "blocks.0.attn.aggregate.rho.square_H" in found
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())

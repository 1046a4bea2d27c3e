"""The command as a person meets it: its help, its errors, its exit statuses."""

import ast
import dataclasses
import errno
import hashlib
import inspect
import io
import json
import subprocess
import typing

import pytest
import yaml
from safetensors.numpy import load_file

from birthmark.launch.cli import main
from birthmark.measure.records import RunDir
from birthmark.report.terminal import print_json
from birthmark.trainer.config import RunConfig


@pytest.fixture
def tiny_file(tiny, tmp_path):
    """The tiny run as a YAML file."""
    stored = dataclasses.asdict(tiny({"trainer.max_steps": 2}))
    del stored["name"], stored["run_dir"]
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(stored))
    return file


BAD = {
    "a misspelt key": (["--model.d_modle=8"], "model.d_modle: no such field; did you mean model.d_model?"),
    "a misspelt nested key": (["--model.attention.agregation=plain"], "did you mean model.attention.aggregation"),
    "the beginning of a key": (["--trainer.max_step=3"], "max_step: no such field; did you mean trainer.max_steps?"),
    "a key that means nothing": (["--frobnicate=1"], "frobnicate: no such field"),
    "a word for a number": (["--model.d_model=wide"], "model.d_model: 'wide' is not a whole number"),
    "a word for a list": (["--log.loggers=csv"], "log.loggers: 'csv' is not a list, [A, B]"),
    "heads that groups do not divide": (["--model.n_heads=4", "--model.n_kv_heads=3"], "model.n_kv_heads 3"),
    "an odd rotary width": (["--model.d_model=6"], "rotary"),
    "a probe longer than the model": (["--snapshot.seq_len=99"], "snapshot.seq_len 99 is longer than model."),
    "no such corpus": (["--data.path=/no/such"], "data.path: '/no/such' does not exist"),
    "no such tokenizer": (["--data.path=stdlib", "--data.tokenizer=/no/such"], "data.tokenizer"),
    "a vocabulary too small for the task": (["--model.vocab_size=3"], "model.vocab_size"),
    "no GPU": (["--trainer.device=cuda"], "trainer.device is cuda"),
    "config and resume at once": (["--resume=/no/such"], "--config"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_request_is_one_line_and_status_2_and_nothing_is_written(case, tiny_file, tmp_path, refused):
    if case == "no GPU":
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    arguments, expected = BAD[case]
    target = tmp_path / "run"
    line = refused("pretrain", f"--config={tiny_file}", f"--run_dir={target}", *arguments)
    assert line.startswith("birthmark: error: ")
    assert expected in line
    assert not target.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["frobnicate"], "frobnicate"),
        (["pretrain", "--config=/no/such.yaml"], "/no/such.yaml"),
        (["pretrain", "--resume=/no/such"], "/no/such: not a run"),
        (["report"], "runs: missing"),
        (["pretrain"], "nothing to train: give --config NAME (birthmark configs lists them)"),
        (["pretrain", "--run_dir=/no/such"], "birthmark demo"),
        (["report", "/no/such"], "/no/such: not a run"),
        (["ablate", "sinks", "--out=/dev/null/\udcff"], "--out '/dev/null/\\udcff': leave control characters"),
    ],
)
def test_a_wrong_command_is_one_line_and_status_2(arguments, expected, refused):
    assert expected in refused(*arguments)


def test_a_run_and_its_report_from_the_command_line(tiny_file, tmp_path, capsys, monkeypatch, no_page, refused):
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", f"--config={tiny_file}", "--trainer.checkpoint_every=1"]) == 0
    run = RunDir(tmp_path / "runs" / "tiny")
    printed = capsys.readouterr().out
    assert "report: runs/tiny/report.html" in printed
    assert [s.step for s in run.snapshots()] == [0, 1, 2]
    assert main(["report", "runs/tiny", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"][0]["rows"]
    assert [row["step"] for row in rows] == [0, 1, 2]
    run.report.unlink()
    assert main(["report", "runs/tiny"]) == 0
    assert "<html" in run.report.read_text()
    assert main(["report", "runs/tiny", "runs/tiny", "--out", "both.html"]) == 0
    assert (tmp_path / "both.html").is_file()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert main(["report", "runs/tiny", "--out=~/page.html"]) == 0
    assert (tmp_path / "home" / "page.html").is_file()
    (tmp_path / "folder.html").mkdir()
    assert "--out folder.html: is a folder; name a file" in refused("report", "runs/tiny", "--out", "folder.html")
    assert not (tmp_path / "folder-data").exists()

    before = {f: f.read_bytes() for f in run.path.rglob("*") if f.is_file()}
    for under_torchrun in (False, True):
        if under_torchrun:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
        assert "already in use" in refused("pretrain", f"--config={tiny_file}")
        assert {f: f.read_bytes() for f in run.path.rglob("*") if f.is_file()} == before
    # torchrun starts the same command again when a node joins, and does not count that.
    with no_page():
        assert main(["pretrain", f"--config={tiny_file}", "--trainer.checkpoint_every=1"]) == 0
    assert "resumed at step 2" in capsys.readouterr().out


def test_a_birth_is_re_created_from_config_and_seed(tiny_file, tmp_path, capsys, no_page, refused):
    run, out = tmp_path / "run", tmp_path / "born"
    with no_page():
        assert main(["pretrain", f"--config={tiny_file}", f"--run_dir={run}"]) == 0
    digest = json.loads((run / "birth.json").read_text())["digest"]
    capsys.readouterr()
    assert main(["birth", str(run / "config.yaml"), "--json", f"--out={out}"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["digest"] == digest
    assert json.loads((out / "birth.json").read_text()) == printed
    # The digest of what was written, by the definition.
    sha = hashlib.sha256()
    for name, values in sorted(load_file(out / "model.safetensors").items()):
        sha.update(f"{name}\0{','.join(map(str, values.shape))}\0".encode() + values.astype("<f4").tobytes())
    assert sha.hexdigest() == digest
    assert main(["birth", str(tiny_file), "--seed=4"]) == 0
    assert digest not in capsys.readouterr().out
    # Seeds that no run can have: init_seed refuses them too.
    for seed in (1 << 64, -(1 << 63) - 1):
        line = refused("birth", tiny_file, f"--seed={seed}")
        assert f"--seed {seed}: no seed; give a whole number from {-(2**63)} to {2**64 - 1}" in line
        assert "init_seed" in refused("pretrain", f"--config={tiny_file}", f"--init_seed={seed}")
    assert "exists already" in refused("birth", tiny_file, f"--out={out}")


def test_a_failure_on_the_way_is_status_1(tiny_file, tmp_path, no_page, refused, capsys):
    run = tmp_path / "run"
    with no_page():
        assert main(["pretrain", f"--config={tiny_file}", f"--run_dir={run}"]) == 0
    damaged = run / "checkpoints/step-00000002/tensors.safetensors"
    damaged.write_bytes(b"short")
    assert main(["pretrain", f"--resume={run}", "--trainer.max_steps=4"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "step-00000002/tensors.safetensors: damaged" in line
    assert damaged.exists()
    (run / "snapshots/step-00000000/arrays.safetensors").write_bytes(b"short")
    assert "step-00000000/arrays.safetensors: damaged" in refused("report", run, status=1)


def test_a_bug_is_one_line_too_and_debug_shows_where(tiny_file, monkeypatch, refused):
    def broken(*_, **__):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("birthmark.trainer.run.pretrain", broken)
    line = refused("pretrain", f"--config={tiny_file}", status=1)
    assert line == "birthmark: internal error (division by zero); please report it with what --debug shows\n"
    with pytest.raises(ZeroDivisionError):
        main(["pretrain", f"--config={tiny_file}", "--debug"])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "out of memory; give a smaller model, batch or probe"),
        (OSError(36, "File name too long", "x" * 300), f"{'x' * 200}: File name too long"),
        (
            OSError(errno.EAGAIN, "Resource temporarily unavailable"),
            "Resource temporarily unavailable; give this user, or the container, more processes and threads "
            "(ulimit -u, pids.max)",
        ),
        (
            OSError(errno.EAGAIN, "write could not complete"),
            "write could not complete",
        ),  # of an output that never waits
        (
            RuntimeError("can't start new thread"),
            "can't start new thread; give this user, or the container, more processes and threads (ulimit -u, "
            "pids.max)",
        ),
    ],
)
def test_what_the_machine_refuses_is_no_bug(error, line, tiny_file, monkeypatch, refused):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr("birthmark.trainer.run.pretrain", broken)
    assert refused("pretrain", f"--config={tiny_file}", status=1) == f"birthmark: error: {line}\n"


def leaves(config, prefix=""):
    """(dotted name, attribute docstring, default) of every field, read from the source text."""
    tree = ast.parse(inspect.getsource(config)).body[0]
    docs = {
        a.target.id: inspect.cleandoc(b.value.value)
        for a, b in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)
    }
    types = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(types[field.name]):
            yield from leaves(types[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, docs[field.name], field


def test_help_lists_every_field_with_its_meaning_and_default(capsys):
    with pytest.raises(SystemExit) as left:
        main(["pretrain", "--help"])
    assert left.value.code == 0
    # Lines break at blanks and after hyphens: compare without any blanks.
    printed = "".join(capsys.readouterr().out.split())
    fields = list(leaves(RunConfig))
    assert len(fields) > 50
    for name, meaning, field in fields:
        assert f"--{name}" in printed, name
        assert "".join(meaning.split()) + "(type:" in printed or isinstance(field.default, bool), name
        if isinstance(field.default, (int, float)):
            assert f"default:{field.default})" in printed, name


def test_a_closed_pipe_is_no_error(tiny_file, tmp_path, python, no_page):
    run = tmp_path / "run"
    with no_page():
        assert main(["pretrain", f"--config={tiny_file}", f"--run_dir={run}"]) == 0
    command = f"{python} -m birthmark.launch.cli report {run} --json | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert done.stderr == ""


def test_a_launchers_last_signal_does_not_change_how_a_command_ended(python):
    """It comes while Python ends, after all is written and printed."""
    script = (
        "import os, signal, sys; from birthmark.launch.cli import main; sys.argv = ['birthmark', 'completion', 'bash'];"
        "status = main(); stops = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP);"
        "[os.kill(os.getpid(), number) for number in stops]; sys.exit(status)"
    )
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("before", "words", "status", "said"),
    [
        ("sys.stdout.reconfigure(encoding='ascii')", ["pretrain", "--help"], 0, r"\xb7"),
        ("os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", ["configs"], 2, "the working folder was deleted"),
    ],
)
def test_an_odd_machine_gives_no_internal_error(before, words, status, said, tmp_path, python):
    """A locale without a character of the help, and a working folder that is gone."""
    script = f"import os, sys; from birthmark.launch.cli import main; {before}; sys.exit(main())"
    command = [python, "-c", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False)
    assert said in done.stdout + done.stderr
    assert done.stderr.count("\n") == (status != 0)


def test_json_on_a_stream_of_ascii_is_json(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii", errors="backslashreplace"))
    print_json(value := {"a": "→ é 𝄞 \x85"})
    assert json.loads(written.getvalue()) == value

"""What each command writes, starts and connects to on hostile input, against the table of docs/security.md."""

import json
import os
import pickle
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
from quiet_runs import config_file

from birthmark.launch.cli import main
from birthmark.launch.command_table import COMMANDS
from birthmark.launch.reference.security_page import PLACES, PROGRAMS, REACH, TOOLS

#: Runs a command under Python's audit hooks, which no code can take off again, and writes what it reaches.
TRACED = """
import json, os, sys, tempfile

log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PATHS = {"os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.truncate": 1, "os.chmod": 1, "os.utime": 1,
         "os.rename": 2, "os.link": 2}
HAS_FOLDER = set(PATHS) - {"os.truncate"}
STARTS = {"os.exec": 0, "os.posix_spawn": 0, "os.system": 0, "os.spawn": 1, "subprocess.Popen": 0, "pty.spawn": 0}


def note(kind, what):
    os.write(log, (json.dumps([kind, what]) + "\\n").encode())


def whole(path, folder=-1):
    if isinstance(path, int):
        return None
    start = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder >= 0 else os.getcwd()
    return os.path.normpath(os.path.join(start, os.fsdecode(path)))


def watch(event, given):
    if event == "open":
        path, _, flags = given
        if isinstance(flags, int) and flags & WRITES and (found := whole(path)):
            note("write", found)
    elif event in PATHS:
        # A folder that a path is relative to comes last, for each path.
        n = PATHS[event]
        folders = given[-n:] if event in HAS_FOLDER else [-1] * n
        for path, folder in zip(given[:n], folders):
            if found := whole(path, folder):
                note("write", found)
    elif event == "os.symlink":
        note("write", whole(given[1], given[2]))
    elif event in STARTS:
        program, words = given[STARTS[event]], given[STARTS[event] + 1] if len(given) > 1 else []
        program = program or (words if isinstance(words, str) else words[0])
        words = [words] if isinstance(words, str) else [os.fsdecode(word) for word in words]
        note("start", [os.fsdecode(program), words])
    elif event in ("socket.connect", "socket.bind"):
        note(event.partition(".")[2], str(given[1]))
    elif event == "exec" and (name := getattr(given[0], "co_filename", "")):
        note("run", whole(name) if not name.startswith("<") else name)


tempfile.tempdir = None  # where another environment had it
sys.addaudithook(watch)
from birthmark.launch.cli import main
sys.argv = ["birthmark", *sys.argv[1:]]
sys.exit(main())
"""


#: Modules of the standard library, of others, and one that a run's config names.
PLANTED = ("torch", "numpy", "yaml", "resource", "json", "safetensors", "matplotlib", "trap_of_a_run", "sitecustomize")


class Payload:
    """A pickle that leaves a mark where it is read by pickle."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, tiny, no_page, write_documents):
    """A working folder of others: a repository with a monitor, modules, a run, models and a suite, all with traps.

    Each leaves a mark in ``marks``.
    """
    folder = tmp_path_factory.mktemp("hostile")
    there, marks = folder / "there", folder / "marks"
    for path in (there, marks, folder / "home", folder / "temporary"):
        path.mkdir()
    config = tiny({"data.cache_dir": str(folder / "cache"), "trainer.max_steps": 2, "snapshot.n_strangers": 0})
    config_file(there / "run.yaml", config)
    write_documents(there / "notes")
    with pytest.MonkeyPatch.context() as patch, no_page():
        patch.chdir(there)
        assert main(["pretrain", "--config", "run.yaml", "--run_dir", "run"]) == 0
        assert main(["export", "run", "theirs"]) == 0
        assert main(["certify", "run"]) == 0
    for name in PLANTED:
        (there / f"{name}.py").write_text(f"import os\nos.mkdir({str(marks / name)!r})\n")
    # A run whose config names a module; it is as the run wrote it, but for that.
    shutil.copytree(there / "run", there / "armed")
    for run in ("run", "armed"):
        (there / run / "trap_of_a_run.py").write_text((there / "trap_of_a_run.py").read_text())
    text = (there / "armed/config.yaml").read_text().partition("# sha256")[0]
    text = text.replace("normaliser: softmax", "normaliser: trap_of_a_run:Arm")
    assert "trap_of_a_run" in text
    (there / "armed/config.yaml").write_text(
        f"{text}# sha256 of the lines above: {sha256(text.encode()).hexdigest()}\n"
    )
    # A model that brings code.
    shutil.copytree(there / "theirs", there / "coded")
    described = json.loads((there / "coded/config.json").read_text())
    described |= {
        "model_type": "of_others",
        "auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "trap.Model"),
    }
    (there / "coded/config.json").write_text(json.dumps(described))
    (there / "coded/trap.py").write_text(f"import os\nos.mkdir({str(marks / 'code of a model')!r})\n")
    for step in (1, 2, 3):
        shutil.copytree(there / "theirs", there / f"suite/step-{step}")
    (there / "suite/step-2/model.safetensors").unlink()
    (there / "suite/step-2/pytorch_model.bin").write_bytes(pickle.dumps({"a": Payload(marks / "pickle")}))
    git = ["git", "-C", str(there)]
    monitor = there / "monitor"
    monitor.write_text(f"#!/bin/sh\nmkdir '{marks}/monitor'\n")
    monitor.chmod(0o755)
    for words in (["init", "-q"], ["add", "run.yaml"], ["config", "core.fsmonitor", str(monitor)]):
        subprocess.run([*git, *words], check=True)
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "core.fsmonitor=false"]
    subprocess.run([*git, *author, "commit", "-qm", "first"], check=True)
    return folder


#: By command, what it is given in the hostile folder, and its exit status.
GIVEN = {
    "tokenise": (["run.yaml", "--set", "data.path=notes", "model.vocab_size=280", "data.val_fraction=.3"], 0),
    "pretrain": (["--resume", "run", "--trainer.max_steps=4", "--log.wandb=offline"], 0),
    "adapt": (["coded", "--adapter.kind=lora", "--run_dir", "{out}/adapted"], 2),
    "launch": (["torchrun", "--write", "{out}/job.sh", "--config", "run.yaml"], 0),
    "data": (["run.yaml"], 0),
    "report": (["run", "--out", "{out}/page.html"], 0),
    "figure": (["run", "loss", "--out", "{out}/loss.png"], 0),
    "describe": (["armed/config.yaml"], 2),
    "plan": (["armed/config.yaml", "--n_gpus=1"], 2),
    "birth": (["run.yaml", "--out", "{out}/birth"], 0),
    "sample": (["run", "--prompt", "1", "--max_tokens=2"], 2),
    "export": (["run", "{out}/exported"], 0),
    "ablate": (["run.yaml", "--out", "{out}/study"], 2),
    "fingerprint": (["run", "theirs", "--n_inputs=20", "--cache_dir", "{out}/cache"], 0),
    "identify": (["coded", "--seeds=1", "--config", "run.yaml", "--n_inputs=20", "--cache_dir", "{out}/cache"], 2),
    "audit": (["suite", "--out", "{out}/audit.html"], 3),
    "certify": (["run", "--out", "{out}/certificate.json"], 0),
    "verify": (["run/certificate.json", "suite/step-1"], 0),
    "snapshot": (["armed", "--n_sequences=4", "--seq_len=8"], 2),
    "compare": (["run", "theirs", "--n_sequences=4", "--seq_len=8"], 0),
    "intervene": (["theirs", "--kind=amplify", "--layer=1", "--position=2", "--lambda=1,2", "--out={out}/a.png"], 0),
    "length": (["theirs", "--to=12", "--n_sequences=2", "--out", "{out}/l.png"], 2),
    "quantise": (["theirs", "--bits", "w8a8", "--out", "{out}/q.png"], 0),
    "configs": ([], 0),
    "doctor": (["run.yaml"], 0),
    "completion": (["bash"], 0),
}


@pytest.fixture(scope="module")
def trace(hostile, python):
    """``trace(command)``: its exit status, what it printed, and what it reached, by kind."""

    def run(command):
        words, status = GIVEN[command]
        out, log = hostile / "out" / command, hostile / f"{command}.jsonl"
        out.mkdir(parents=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | {
            "HOME": str(hostile / "home"), "TMPDIR": str(hostile / "temporary"), "PYTHONSAFEPATH": "1",
            "XDG_CACHE_HOME": str(hostile / "home/.cache"), "XDG_CONFIG_HOME": str(hostile / "home/.config"),
        }  # fmt: skip
        done = subprocess.run(
            [python, "-c", TRACED, str(log), command, *(word.format(out=out) for word in words)],
            cwd=hostile / "there", env=environment, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        reached = {kind: [] for kind in ("write", "start", "connect", "bind", "run")}
        for line in log.read_text().splitlines():
            kind, what = json.loads(line)
            reached[kind].append(what)
        return done, status, reached

    return run


def place_of(path, hostile, command):
    """Find the place of the table that a path is in; None if it is in none."""
    home, there = hostile / "home", hostile / "there"
    places = {
        hostile / "out" / command: "out",
        there / "run": "run",
        hostile / "cache": "cache",
        hostile / "temporary": "temporary",
        home / ".cache/birthmark": "cache",
        home / ".cache": "libraries",
        home / ".config": "libraries",
        home / ".local": "libraries",
    }
    found = next((name for folder, name in places.items() if path.is_relative_to(folder)), None)
    # A file is written beside its place, in a hidden folder, until it is whole.
    folder = path.parent.parent if path.parent.name.startswith(".") else path.parent
    return found or ("working" if folder == there else None)


def program_of(program, words):
    """Find the program of the table that a command line starts; ``tool`` of a small one, None of any other."""
    name = Path(program).name
    if name in TOOLS:
        return "tool"
    if name.startswith("python"):
        return "python" if "-P" in words else None
    return {"git": "git", "gcc": "compiler", "bash": "launcher", "sbatch": "launcher", "wandb-core": "wandb"}.get(name)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command in GIVEN])
def test_a_command_on_hostile_input_reaches_what_the_table_says(command, hostile, trace):
    done, status, reached = trace(command)
    said = done.stdout + done.stderr
    assert done.returncode == status, said
    assert "internal error" not in said
    assert "Traceback" not in said
    row = REACH[command]
    assert [path.name for path in (hostile / "marks").iterdir()] == []
    paths = {path for path in set(reached["write"]) if not path.startswith("/dev/")}
    programs = [(program_of(*call), call) for call in reached["start"]]
    sockets = {one for one in (*reached["connect"], *reached["bind"]) if one.startswith("(")}
    assert {
        "writes": [path for path in sorted(paths) if place_of(Path(path), hostile, command) not in row.writes],
        "starts": [call for kind, call in programs if kind not in (*row.starts, "tool")],
        "connects": [one for one in sockets if "127.0.0.1" not in one and "::1" not in one],
        # Code of the folder is not even compiled.
        "runs": [file for file in reached["run"] if Path(file).is_relative_to(hostile / "there")],
    } == {"writes": [], "starts": [], "connects": [], "runs": []}


def test_the_table_has_every_command_and_names_that_it_explains():
    assert set(REACH) == set(COMMANDS)
    for row in REACH.values():
        assert set(row.writes) <= PLACES.keys()
        assert set(row.starts) <= PROGRAMS.keys()
    # The demo is pretrain with a config of the package.
    assert set(COMMANDS) - set(GIVEN) == {"demo"}

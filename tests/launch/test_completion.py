"""Completion as a person meets it: a real shell, and the Tab key."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("argcomplete")


def environment():
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "dumb"}


def needs(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"this machine has no {shell}")


def typed(command, lines, expected):
    """What an interactive shell shows after ``lines`` and a Tab, until ``expected`` is there."""
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe(command[0], command, environment())
    shown = ""
    try:
        os.write(terminal, lines.encode() + b"\t")
        end = time.monotonic() + 60
        while expected not in shown and time.monotonic() < end:
            if select.select([terminal], [], [], 0.5)[0]:
                shown += os.read(terminal, 65536).decode(errors="replace")
    except OSError:  # the shell has left
        pass
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)
    return shown


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("command", "load"),
    [
        (["bash", "--norc", "--noprofile", "-i"], 'eval "$(birthmark completion bash)"'),
        (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u -D; eval "$(birthmark completion zsh)"'),
    ],
    ids=["bash", "zsh"],
)
def test_a_field_is_completed_by_tab(command, load):
    needs(command[0])
    shown = typed(command, f"{load}\nbirthmark pretrain --trainer.max_st", "--trainer.max_steps")
    assert "--trainer.max_steps" in shown


def test_fish_completes_a_field():
    needs("fish")
    asked = 'birthmark completion fish | source; complete -C "birthmark pretrain --trainer.max_st"'
    done = subprocess.run(["fish", "-N", "-c", asked], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.split()[:1] == ["--trainer.max_steps"]


@pytest.mark.parametrize(
    ("line", "expected", "never"),
    [
        ("birthmark ", {"pretrain", "configs", "completion"}, "--trainer.max_steps"),
        ("birthmark pretrain --trainer.precision ", {"auto", "fp32", "bf16", "fp8"}, "fp16"),
        ("birthmark pretrain de", {"demo"}, "studies/sinks"),
        ("birthmark describe --config models/llama-", {"models/llama-60m"}, "demo"),
        ("birthmark sample --ru", {"--run", "--runs"}, "--prompt"),
        ("birthmark ablate studies/s", {"studies/sinks", "studies/seedprint"}, "demo"),
        ("birthmark intervene x --kind ", {"mask", "amplify", "scale"}, "--layer"),
        ("birthmark fingerprint --null-", {"--null_seed"}, "--null"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_commands_fields_and_values_are_completed(line, expected, never, tmp_path):
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    place = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    subprocess.run(
        [sys.executable, "-m", "birthmark.launch.cli"], env=environment() | asked | place, cwd=tmp_path, check=True
    )
    found = {word.strip() for word in answer.read_text().split("\n")}
    assert expected <= found
    assert never not in found


def test_a_missing_library_is_named_with_its_install_line(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert "pip install argcomplete" in refused("completion", "bash")


def test_another_shell_is_refused(refused):
    assert "'csh' is not one of 'bash', 'zsh', 'fish'" in refused("completion", "csh")

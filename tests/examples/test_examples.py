"""The examples, run by the commands that their README gives."""

import ast
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
#: Name of an example → the command in its row of the table.
COMMANDS = dict(re.findall(r"^\| \[(\S+)\]\(\1\) \|.*\| `(.+?)` \|", (EXAMPLES / "README.md").read_text(), flags=re.M))
#: Files that a command leaves, and a line that it prints.
LEFT = {
    "lightning_module.py": ("bias/snapshots/step-00000060/summary.json", r"step 60: sink mass 0\.\d+, drift"),
    "transformers_trainer.py": ("bias/snapshots/step-00000060/summary.json", r"step 60: sink mass on text 0\.\d+"),
    "plain_loop.py": ("bias/snapshots/step-00000060/summary.json", r"step 60: loss \d\.\d+, sink mass 0\.\d+, drift"),
    "arm_and_metric": ("index.html", r"softplus +1/1"),
}


@pytest.fixture
def readers_copy(tmp_path):
    """The examples in a folder where nothing else is."""
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_table_has_every_example():
    found = {file.name for file in EXAMPLES.iterdir() if file.name not in ("README.md", "__pycache__")}
    assert set(COMMANDS) == found
    assert set(LEFT) == found - {"notebook.ipynb", "slurm.sh"}


def test_examples_are_short():
    for file in EXAMPLES.rglob("*"):
        if file.suffix in (".py", ".sh", ".yaml"):
            assert len(file.read_text().splitlines()) <= 60, file


@pytest.mark.training
@pytest.mark.parametrize("name", LEFT)
def test_an_example_runs_and_writes_into_its_folder_alone(name, readers_copy, python):
    before = files_below(readers_copy)
    (out,) = re.findall(r"\bout/\w+", COMMANDS[name])
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        ["bash", "-euc", COMMANDS[name]], cwd=readers_copy, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    file, line = LEFT[name]
    assert (readers_copy / out / file).is_file()
    assert re.search(line, done.stdout), done.stdout[-3000:]
    assert {new for new in files_below(readers_copy) - before if not new.startswith(out + "/")} == set()
    if name == "arm_and_metric":
        (summary,) = (readers_copy / out / "softplus").glob("**/step-00000200/summary.json")
        assert json.loads(summary.read_text())["bias"]["write_ratio"] > 0


def files_below(folder):
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.training
def test_the_notebooks_cells_run_and_show_themselves(tmp_path, monkeypatch):
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert notebook["nbformat"] == 4
    monkeypatch.chdir(tmp_path)
    names, shown = {}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == []
        *statements, last = ast.parse("".join(cell["source"])).body
        if not isinstance(last, ast.Expr):
            statements, last = [*statements, last], None
        exec(compile(ast.Module(statements, []), "notebook.ipynb", "exec"), names)
        if last is not None:  # a notebook shows the value of a cell's last expression
            value = eval(compile(ast.Expression(last.value), "notebook.ipynb", "eval"), names)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    assert len(shown) == 3
    assert "The model has learned" in shown[0]
    assert "sink" in shown[1]
    assert {file.split("/")[0] for file in files_below(tmp_path)} == {"runs"}


def test_the_job_for_slurm_is_a_script():
    file = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", file], check=True)
    assert os.access(file, os.X_OK)
    refused = subprocess.run(["bash", file], capture_output=True, text=True)
    assert "usage: sbatch slurm.sh OUT" in refused.stderr

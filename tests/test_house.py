"""The rules of the house, held by a machine."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import birthmark
from birthmark.launch.lineage import read_lineage
from birthmark.launch.lineage_runs import plan
from birthmark.launch.parsing import build_parser, resolve
from birthmark.launch.study import check_buildable, read_study, trials
from birthmark.launch.study_command import KINDS, kind_of

ROOT = Path(birthmark.__file__).parent

#: What each folder may import of ours; `errors` and the package's version are everybody's.
MAY_IMPORT = {
    "models": set(),
    "metrics": set(),
    "data": set(),
    "callbacks": {"models", "metrics", "data"},
    "trainer": {"models", "data", "callbacks"},
    "launch": {"models", "metrics", "data", "callbacks", "trainer"},
}


def imports(file):
    """Top-level names of ours that a module imports, and whether each is relative."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 2:
            yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("birthmark"):
            pytest.fail(f"{file}: imports inside the package are relative")


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_no_import_runs_upward(folder):
    files = sorted((ROOT / folder).glob("*.py"))
    assert files
    for file in files:
        ours = set(imports(file)) - {"errors", "__version__", folder}
        assert ours <= MAY_IMPORT[folder], file


def loaded_by(code):
    listing = f"import sys; {code}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_command_line_loads_no_framework_before_it_is_needed():
    modules = loaded_by("import birthmark.launch.cli, birthmark.launch.parsing as p; p.build_parser()")
    assert not modules & {"torch", "lightning", "datasets", "wandb", "transformers", "matplotlib", "scipy"}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_optional_libraries_are_loaded_only_where_they_are_used(folder):
    optional = {"datasets", "wandb", "transformers", "matplotlib", "deepspeed"}
    for file in sorted((ROOT / folder).glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert not {name.split(".")[0] for name in names} & optional, file


STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
RUNS = sorted(set((ROOT / "configs").rglob("*.yaml")) - set(STUDIES))


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.name)
def test_every_config_file_is_a_run(file):
    parser, _ = build_parser()
    parsed = parser.parse_args(["pretrain", f"--config={file}"])
    assert parsed.pretrain.model.d_model > 0


def runs_of_arms(study, out):
    planned = trials(study, out, resolve)
    assert {trial.arm for trial in planned} == set(study.arms)
    return planned


def runs_of_a_lineage(study, out):
    planned = plan(study, out, resolve)
    assert {trial.seed for trial in planned.bases} == set(study.init_seeds)
    assert len(planned.continued) == len(study.continuations) * len(study.init_seeds)
    return planned.bases


READ = {"arms": (read_study, runs_of_arms), "lineage": (read_lineage, runs_of_a_lineage)}


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.name)
def test_every_study_is_possible_at_every_scale(file, tmp_path):
    assert set(READ) == set(KINDS)
    read, runs = READ[kind_of(file)]
    study = read(file)
    for scale in (None, *study.scales):
        check_buildable(runs(study.at(scale), tmp_path))


def test_the_readme_begins_with_the_two_commands():
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("make ")]
    assert [line.split()[1] for line in lines[:2]] == ["pretrain", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in ("pretrain", "test", "check", "format", "clean"))

"""The rules of the house, held by a machine."""

import ast
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import birthmark
from birthmark.study.arms.file import read_arm_study
from birthmark.study.arms.trials import arm_trials
from birthmark.study.kinds import KINDS, kind_of
from birthmark.study.lineage.file import read_lineage_study
from birthmark.study.lineage.trials import lineage_trials
from birthmark.study.robustness.file import read_robustness_study
from birthmark.study.robustness.trials import robustness_trials
from birthmark.study.seeds.file import read_seeds_study
from birthmark.study.seeds.trials import seeds_trials
from birthmark.study.trials import check_buildable
from birthmark.trainer.config_file import read_config

ROOT = Path(birthmark.__file__).parent

#: The floors, from the ground up: a room imports from lower floors only. Rooms of one floor leave each other alone.
FLOORS = (
    ("errors", "files", "pace", "schema", "urls", "yaml_files"),
    ("metrics",),
    ("models", "data"),
    ("measure",),
    ("findings", "evaluation"),
    ("report",),
    ("callbacks",),
    ("trainer",),
    ("plan", "study", "audit"),
    ("api",),
    ("launch",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ROOMS = [room for room in FLOOR if (ROOT / room).is_dir()]
FILES = sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))


def name_of(file):
    """A module's dotted name without the package's."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file) for file in [*FILES, *(ROOT / f"{name}.py" for name in FLOORS[0])]}


def imports(file):
    """Modules of ours that a module imports: at its top, inside a function, or for a type checker alone."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 0:
            assert not (node.module or "").startswith("birthmark"), f"{file}: imports inside the package are relative"
            continue
        above = package[: len(package) - node.level + 1]
        base = ".".join([*above, *([node.module] if node.module else [])])
        # Type checkers are asked to pass over modules that they cannot find, which would hide a wrong name of ours.
        assert base in MODULES or not base, f"{file}: imports from {base}, which is no module of ours"
        for alias in node.names:
            name = f"{base}.{alias.name}".lstrip(".")
            yield name if name in MODULES else base


@pytest.mark.heavy
@pytest.mark.parametrize("room", ROOMS)
def test_no_import_runs_upward(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        rooms = {name.split(".")[0] for name in imports(file)} - {"", room}
        assert all(FLOOR[other] < FLOOR[room] for other in rooms), (file, rooms)


def test_no_imports_run_in_a_circle():
    graph = {name_of(file): {name for name in imports(file) if name} for file in FILES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_room_and_no_folder_is_too_large():
    lines = {room: sum(len(f.read_text().splitlines()) for f in (ROOT / room).rglob("*.py")) for room in ROOMS}
    assert {room: n for room, n in lines.items() if n > 0.2 * sum(lines.values())} == {}
    folders = {file.parent for file in FILES}
    crowded = {folder: len(found) for folder in folders if len(found := [*folder.glob("*.py")]) > 20}
    assert crowded == {}


#: Basenames that stand in several rooms and mean the same in each; commands are called what people type.
SAME_IDEA = {"__init__", "config", "table", "figure", "file", "results", "run", "trials"}


def test_a_basename_has_one_meaning():
    metrics = {file.stem for file in (ROOT / "metrics").glob("*.py")}
    places = defaultdict(set)
    for file in FILES:
        folder = file.parent.relative_to(ROOT).as_posix()
        section_of_a_metric = folder == "report/sections" and file.stem in metrics
        if not folder.startswith("launch/commands") and file.stem not in SAME_IDEA and not section_of_a_metric:
            places[file.stem].add(folder)
    assert {name: folders for name, folders in places.items() if len(folders) > 1} == {}


def loaded_by(code):
    listing = f"import sys; {code}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_command_line_loads_no_framework_before_it_is_needed():
    modules = loaded_by("import birthmark.launch.command_table as t; [t.command_parser(name) for name in t.COMMANDS]")
    assert not modules & {"torch", "lightning", "datasets", "wandb", "transformers", "matplotlib", "scipy"}


#: Text of the files that an exported model brings: nothing here imports them.
FOR_TRANSFORMERS = {"hub_config.py", "hub_model.py"}
#: Subclasses of matplotlib's classes: what draws imports them inside of functions (tests/report/test_run_page.py).
OF_MATPLOTLIB = {"light_axes.py", "measured_layout.py", "svg.py"}


@pytest.mark.parametrize("folder", ROOMS)
def test_optional_libraries_are_loaded_only_where_they_are_used(folder):
    optional = {"datasets", "wandb", "tensorboard", "transformers", "matplotlib", "deepspeed", "lm_eval"}
    for file in sorted((ROOT / folder).rglob("*.py")):
        if file.name in FOR_TRANSFORMERS | OF_MATPLOTLIB:
            continue
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert not {name.split(".")[0] for name in names} & optional, file


STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
RUNS = sorted(set((ROOT / "configs").rglob("*.yaml")) - set(STUDIES))


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.name)
def test_every_config_file_is_a_run(file):
    assert read_config(file).model.d_model > 0


def runs_of_arms(study, out):
    trials = arm_trials(study, out)
    assert {trial.arm for trial in trials} == set(study.arms)
    return trials


def runs_of_a_lineage(study, out):
    trials = lineage_trials(study, out)
    assert {trial.seed for trial in trials.bases} == set(study.init_seeds)
    assert len(trials.continued) == len(study.continuations) * len(study.init_seeds)
    return trials.bases


def runs_of_a_robustness(study, out):
    trials = robustness_trials(study, out)
    assert {trial.seed for trial in trials.bases} == set(study.init_seeds)
    return trials.bases


def runs_of_seeds(study, out):
    trials = seeds_trials(study, out)
    assert len(trials) == len(study.init_seeds) * len(study.data_seeds)
    return trials


READ = {
    "arms": (read_arm_study, runs_of_arms),
    "lineage": (read_lineage_study, runs_of_a_lineage),
    "robustness": (read_robustness_study, runs_of_a_robustness),
    "seeds": (read_seeds_study, runs_of_seeds),
}


@pytest.mark.heavy
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

"""The rules of the house, held by a machine."""

import ast
import dataclasses
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from measures import short_with_one_importer

import birthmark
from birthmark.data.config import DataConfig, SourceConfig
from birthmark.study.arms.trials import arm_trials, read_arm_study
from birthmark.study.lineage.trials import lineage_trials, read_lineage_study
from birthmark.study.table import KINDS, kind_of
from birthmark.study.trials import check_buildable
from birthmark.trainer.config_file import read_config

ROOT = Path(birthmark.__file__).parent

#: The floors, from the ground up: a room imports from lower floors only. Rooms of one floor leave each other alone.
FLOORS = (
    (
        "child_python",
        "errors",
        "files",
        "kernel_devices",
        "locks",
        "messages",
        "schema",
        "time_left",
        "urls",
        "yaml_files",
    ),
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


def test_no_room_is_too_large():
    lines = {room: sum(len(f.read_text().splitlines()) for f in (ROOT / room).rglob("*.py")) for room in ROOMS}
    assert {room: n for room, n in lines.items() if n > 0.2 * sum(lines.values())} == {}


def test_a_module_has_two_importers_or_sixty_lines():
    # An exported model needs its config in a file of its own.
    assert short_with_one_importer() == ["models/exchange/exported/hub_config.py"]


def loaded_by(code):
    listing = f"import sys; {code}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_command_line_loads_no_framework_before_it_is_needed():
    modules = loaded_by("import birthmark.launch.command_table as t; [t.command_parser(name) for name in t.COMMANDS]")
    assert not modules & {"torch", "lightning", "datasets", "wandb", "transformers", "matplotlib", "scipy"}


#: Text of the files that an exported model brings: nothing here imports them.
FOR_TRANSFORMERS = {"hub_config.py", "hub_model.py"}
#: A builder of datasets: corpora import it inside of functions (tests/data/test_row_corpora.py).
OF_DATASETS = {"text_columns.py"}


@pytest.mark.parametrize("folder", ROOMS)
def test_optional_libraries_are_loaded_only_where_they_are_used(folder):
    optional = {"datasets", "wandb", "tensorboard", "transformers", "matplotlib", "deepspeed", "lm_eval"}
    for file in sorted((ROOT / folder).rglob("*.py")):
        if file.name in FOR_TRANSFORMERS | OF_DATASETS:
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


READ = {KINDS["arms"]: (read_arm_study, runs_of_arms), KINDS["lineage"]: (read_lineage_study, runs_of_a_lineage)}


@pytest.mark.heavy
@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.name)
def test_every_study_is_possible_at_every_scale(file, tmp_path):
    assert set(READ) == set(KINDS.values())
    read, runs = READ[kind_of(file)]
    study = read(file)
    for scale in (None, *study.scales):
        check_buildable(runs(study.at(scale), tmp_path))


def test_the_readme_begins_with_the_two_commands():
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("make ")]
    assert [line.split()[1] for line in lines[:2]] == ["pretrain", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in ("pretrain", "test", "check", "format", "clean"))


# ---------------------------------------------------------------- trust: one function for each kind

#: All code that a user runs, with the modules at the top.
SHIPPED = [*FILES, *(ROOT / f"{name}.py" for name in FLOORS[0] if (ROOT / f"{name}.py").is_file())]
#: Modules that start programs; docs/security.md names these programs.
STARTERS = {
    "audit/pickled_weights.py", "data/workers.py", "launch/commands/launch.py", "launch/job_arrays.py",
    "models/c_library.py", "study/runner.py", "trainer/provenance.py",
}  # fmt: skip
#: Modules that name this Python and start none: files for a launcher, a line that shows it, a folder of programs.
NAMERS = {
    "child_python.py", "launch/commands/launch.py", "launch/job_arrays.py", "launch/readiness.py",
    "trainer/strategies/zero.py",
}  # fmt: skip
STARTS = {"subprocess", "multiprocessing", "pty"}
STARTING = {"system", "popen", "fork", "forkpty", "startfile", "ProcessPoolExecutor", "create_subprocess_exec"}
#: What holds names of files that others chose: keys of indexes and configs, fields of a listing.
KEYS_OF_OTHERS = {"weight_map", "filename", "rfilename", "auto_map"}


def used_in(file):
    """Names, attributes, imported modules and subscripts of a file."""
    names, modules, subscripts = set(), set(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
            whole = ast.unparse(node)
            names |= {whole} if whole in ("sys.executable",) or whole.startswith(("os.exec", "os.spawn")) else set()
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {(node.module or "").partition(".")[0]} if not node.level else set()
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            subscripts.add(node.slice.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".get") and node.args:
            subscripts |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    return names, modules, subscripts


@pytest.fixture(scope="module")
def uses():
    return {file.relative_to(ROOT).as_posix(): used_in(file) for file in SHIPPED}


def starts(names, modules):
    return bool(modules & STARTS or names & STARTING or any(name.startswith(("os.exec", "os.spawn")) for name in names))


def test_programs_are_started_in_few_places_and_a_python_by_one_function(uses):
    assert {file for file, (names, modules, _) in uses.items() if starts(names, modules)} == STARTERS
    assert {file for file, (names, _, _) in uses.items() if "sys.executable" in names} == NAMERS
    children = {file for file, (names, _, _) in uses.items() if "python_command" in names} - {"child_python.py"}
    # A sweep's file has the command line; its agent is started by the user.
    assert {file for file in children if "python_environment" not in uses[file][0]} == {"launch/job_arrays.py"}
    scripts = {file.name: file.read_text() for file in (ROOT / "launch").iterdir() if '$PYTHON"' in read_if_text(file)}
    assert set(scripts) == {"array.sbatch", "deepspeed.sh", "slurm.sbatch", "torchrun.sh"}
    for name, text in scripts.items():
        assert 0 < text.find("\nexport PYTHONSAFEPATH=1\n") < text.find('"$PYTHON" '), name


def read_if_text(file):
    return file.read_text() if file.suffix in (".sh", ".sbatch") and file.name != "find_python.sh" else ""


def test_names_that_others_chose_are_joined_by_one_function(uses):
    readers = {file for file, (_, modules, keys) in uses.items() if keys & KEYS_OF_OTHERS or "fsspec" in modules}
    readers |= {file for file, (names, _, _) in uses.items() if names & KEYS_OF_OTHERS - {"filename"}}
    readers -= {"models/exchange/weight_files.py"}  # writes an index
    assert {file for file in readers if "path_below" not in uses[file][0]} == set()
    assert len(readers) > 4
    assert not [file for file, (names, modules, _) in uses.items() if "tarfile" in modules or "extractall" in names]
    own = [file for file in SHIPPED if re.search(r"Path\((\w+)\)\.name != \1", file.read_text())]
    assert own == []


def test_urls_are_opened_where_their_credentials_are_hidden(uses):
    # These read the copies that are on this machine, or what the hub's library fetches.
    local_rows = {"data/row_corpora.py"}
    libraries = {"fsspec", "aiohttp", "requests", "httpx", "urllib3", "datasets"}
    clients = {file for file, (names, modules, _) in uses.items() if modules & libraries or "urlopen" in names}
    hiding = {"hide_credentials", "without_credentials"}
    assert {file for file in clients if not uses[file][0] & hiding} == local_rows
    url = "http://me:S3cr3t@host/a.txt?sig=S3cr3t"
    for kind in (DataConfig, SourceConfig):
        for field in dataclasses.fields(kind):
            for value in (url, ["b", url]):
                given = {"path": "a", field.name: value}
                assert "S3cr3t" not in repr(kind(**given)), field.name


def test_nobody_is_told_to_install_the_package_from_an_index_that_lacks_it():
    """From a folder (``./birthmark``) or an address (``birthmark @ git+…``) it installs; messages name libraries."""
    from_index = re.compile(r"pip install[^\n`,;]*?(?<![./\w])birthmark(?!\S* @ )")
    patterns = ("*.py", "*.md", "*.j2", "*.ipynb", "*.sh", "*.sbatch", "*.yaml", "Dockerfile")
    done = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    told = [
        f"{name}: {line.strip()[:90]}"
        for name in done.stdout.splitlines()
        if name not in ("CHANGELOG.md", "tests/test_house.py") and not name.startswith("research/")
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        if from_index.search(line)
    ]
    assert not told
    assert from_index.search("pip install 'birthmark[plots]'")
    assert not from_index.search("pip install './birthmark[plots]'")
    assert not from_index.search("pip install 'birthmark[plots] @ git+https://example.org/birthmark'")

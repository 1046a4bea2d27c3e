"""The wheel: built, installed in a fresh environment, and used outside of the repository."""

import json
import subprocess
import zipfile
from pathlib import Path

import birthmark

ROOT = Path(birthmark.__file__).resolve().parent


def test_the_wheel_holds_every_package_template_and_config_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    rooms = [f for f in ROOT.iterdir() if (f / "__init__.py").is_file() and f.name != "research"]
    expected = {
        file for room in rooms for file in room.rglob("*") if file.suffix in (".py", ".c", ".h", ".yaml", ".j2")
    }
    expected |= {ROOT / "py.typed", *ROOT.glob("*.py")} - {ROOT / "setup.py"}
    expected |= {*(ROOT / "launch").glob("*.s[hb]*"), ROOT / "launch/hostfile"}
    expected |= set((ROOT / "report/assets").iterdir())
    assert names == {f"birthmark/{file.relative_to(ROOT)}" for file in expected}
    assert not {name.split("/")[1] for name in names} & {"tests", "benchmarks", "research", "docs", "build"}


def test_a_shipped_config_trains_outside_of_the_repository(installed):
    small = ["--trainer.max_steps=2", "--trainer.checkpoint_every=2", "--log.wandb=off", "--snapshot.n_strangers=0"]
    shown = installed("pretrain", "--config", "sinks", *small)
    assert "report: runs/sinks/report.html" in shown
    run = installed.folder / "runs/sinks"
    assert (run / "report.html").is_file()
    assert sorted(folder.name for folder in (run / "snapshots").iterdir()) == ["step-00000000", "step-00000002"]
    where = [installed.python, "-c", "import birthmark; print(birthmark.__file__)"]
    done = subprocess.run(where, cwd=installed.folder, capture_output=True, text=True, env=installed.env, check=True)
    assert Path(done.stdout.strip()).is_relative_to(installed.folder)


def test_launch_files_find_the_environment_that_they_are_installed_in(installed):
    (file,) = (installed.folder / "venv/lib").glob("python*/site-packages/birthmark/launch/find_python.sh")
    clean = {name: value for name, value in installed.env.items() if name != "PATH"} | {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", f". {file}; echo $PYTHON"], env=clean, capture_output=True, text=True)
    assert Path(done.stdout.strip()).samefile(installed.python)
    installed("launch", "torchrun", "--write", "job.sh", "--config", "sinks")
    assert str(installed.python) in (installed.folder / "job.sh").read_text()


def test_configs_are_listed_and_found_outside_of_the_repository(installed):
    listed = json.loads(installed("configs", "--json"))
    assert {"demo", "models/llama-60m", "studies/sinks"} <= {config["name"] for config in listed}
    assert all(Path(config["file"]).is_relative_to(installed.folder) for config in listed)
    assert "did you mean demo?" in installed("pretrain", "--config", "dmo", status=2)

"""Faults planted in readers, each in the process of one case, and what the harness says of it.

``python planted_inputs.py ROOT`` prints a line for each: what was planted, and what was found.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import damage
import devices
from case import Case, Must
from cases import make_case
from inputs import Torture

_REPORT = ("report", "measured", "--json")
_DESCRIBE = ("describe", "run/config.yaml", "--json")


def _summary_of_lists(folder: Path) -> Must:
    file = folder / "measured" / "summary.json"
    content = damage.json.loads(file.read_text())
    del content["sha256"]
    content["bias"] = {name: [value] for name, value in content["bias"].items()}
    file.write_text(damage.json.dumps(content))
    return "refuse"


def _config_cut_off(folder: Path) -> Must:
    file = folder / "run" / "config.yaml"
    text = file.read_text()
    file.write_text(text[: text.index("\n  n_layers:") + 1])
    return "same"


def _pickle(folder: Path) -> Must:
    damage.pickled(folder / "measured" / "arrays.safetensors", damage.random.Random(0))
    return "refuse"


def replaced(where: str, value: Any) -> Callable[[], None]:
    """Make a function that puts a value in the place of ``module:name``, or of ``module:Class.name``."""

    def plant() -> None:
        module, _, name = where.partition(":")
        *owners, last = name.split(".")
        setattr(reduce(getattr, owners, import_module(f"birthmark.{module}")), last, value)

    return plant


def _fail(text: str) -> None:
    from birthmark.errors import RunError

    raise RunError("something is wrong")


def _finds_modules_in_the_folder() -> None:
    weights = import_module("birthmark.audit.pickled_weights")
    weights.python_command = lambda *words: [sys.executable, *map(str, words)]
    weights.python_environment = lambda *more: dict(os.environ)


def _asks_the_clock() -> None:
    records = import_module("birthmark.measure.records")
    bias = records.Snapshot.bias
    records.Snapshot.bias = property(lambda self: bias.fget(self) | {"sink_mass": time.time()})


#: What is planted in the process of a case, by name.
FAULTS: dict[str, Callable[[], object]] = {
    # A reader that checks nothing, that takes a config as it is, or opens a pickle.
    "no_schema": replaced("files:checked", lambda value, schema, where="": value),
    "no_seal": replaced("trainer.saved_config:check_saved_config", lambda file: None),
    "unpickles": replaced("measure.records:check_tensor_file", lambda file, *_: pickle.loads(Path(file).read_bytes())),
    # One that waits, breaks the interpreter, asks for more than it may have, has a mistake, or names nothing.
    "hangs": lambda: time.sleep(60),
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "allocates": replaced("files:parse_json", lambda text: bytearray(2 << 30)),
    "throws": replaced("files:parse_json", lambda text: {}["digest"]),
    "talks": replaced("files:parse_json", _fail),
    # One that leaves something where it should not; hashes a file before it looks how long it may be.
    "writes": lambda: Path("../watched/left").touch(),
    "reads_holes": replaced("measure.records:check_tensor_file", lambda *_: None),
    # A writer that takes the system's error for a fault of ours; a child that looks into the working folder first.
    "says_nothing_of_devices": replaced("files:write_failure", lambda path, error: RuntimeError(error)),
    "finds_modules_in_the_folder": _finds_modules_in_the_folder,
    # A reader of listings that joins names as they come, and one of servers without a bound.
    "follows_names": replaced("data.remote:path_below", lambda folder, key, fail, nested=False: folder / key),
    "hears_for_ever": replaced("data.remote:MOST_UNSTATED", 1 << 60),
    # A writer that leaves the library's mode; a reader that leaves a note, or whose answer depends on the time.
    "keeps_private": replaced(
        "models.exchange.pretrained:save_tensors", lambda save, tensors, path, **more: save(tensors, path, **more)
    ),
    "writes_where_it_reads": replaced(
        "measure.records:RunDir.read_birth", lambda run: (run.path / "note").write_text("x") and {}
    ),
    "asks_the_clock": _asks_the_clock,
}
#: Those that take as long as they may.
ENDLESS = ("hangs", "hears_for_ever", "reads_holes")


_MEASURED = ("measured", "arrays.safetensors", "summary.json")
_RUN = ("run", "corpus")


def _drawn(torture: Torture, kind: str, about: str) -> Case:
    """The first case of a kind that is about something."""
    cases = (make_case(0, number, torture.example, kind)[1] for number in range(20_000))
    return next(case for case in cases if case.about.startswith(about))


def _giant(folder: Path) -> Must:
    with (folder / "measured" / "arrays.safetensors").open("r+b") as file:
        file.truncate(1 << 34)
    return "refuse"


def _as_it_is(folder: Path) -> Must:
    return "any"


#: A case for each fault: its own, or the first one of a kind that is about something.
CASES = {
    "no_schema": Case("lists for numbers", ("measured",), _summary_of_lists, _REPORT, _MEASURED),
    "no_seal": Case("a config that is cut off", _RUN, _config_cut_off, _DESCRIBE, ("config.yaml",)),
    "unpickles": Case("a pickle", ("measured",), _pickle, _REPORT, _MEASURED),
    "reads_holes": Case("a hole of 16 GiB", ("measured",), _giant, _REPORT, _MEASURED),
}
CASES |= dict.fromkeys(
    ("hangs", "crashes", "allocates", "throws", "talks", "writes"),
    Case("nothing", ("measured",), _as_it_is, _REPORT, _MEASURED),
)
DRAWN = {
    "says_nothing_of_devices": ("device", "birth tiny.yaml --out new: device error after"),
    "finds_modules_in_the_folder": ("hostile_folder", "audit suite beside resource"),
    "follows_names": ("web", "a server: absolute"),
    "hears_for_ever": ("web", "a server: endless"),
    "keeps_private": ("modes", "export run new under umask 22"),
    "writes_where_it_reads": ("read_only", "report run --json"),
    "asks_the_clock": ("clock", "report measured --json, a clock at"),
}

if __name__ == "__main__":
    devices.preload()
    torture = Torture(Path(sys.argv[1]))
    for name, plant in FAULTS.items():
        case = CASES[name] if name in CASES else _drawn(torture, *DRAWN[name])
        torture.before, torture.wall = None, 60.0
        sound = torture.faults_of(case)
        torture.before, torture.wall = plant, 3.0 if name in ENDLESS else 60.0
        print(name, sound, torture.faults_of(case), sep="\t", flush=True)
        for left in ("left", "pickle", "code"):
            (torture.watched / left).unlink(missing_ok=True)
        torture.watch.changes()

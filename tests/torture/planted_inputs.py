"""Faults planted in readers, each in the process of one case, and what the harness says of it.

``python planted_inputs.py ROOT`` prints a line for each: what was planted, and what was found.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

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


def no_schema() -> None:
    """A reader that checks nothing."""
    import birthmark.files

    birthmark.files.checked = lambda value, schema, where="": value  # type: ignore[assignment]


def no_seal() -> None:
    """A reader that takes a config as it is."""
    import birthmark.trainer.saved_config

    birthmark.trainer.saved_config.check_saved_config = lambda file: None


def unpickles() -> None:
    """A reader that opens a pickle."""
    import birthmark.measure.records

    birthmark.measure.records.check_tensor_file = lambda file, *_: pickle.loads(Path(file).read_bytes())


def hangs() -> None:
    """A reader that waits."""
    time.sleep(60)


def crashes() -> None:
    """A reader that breaks the interpreter."""
    os.kill(os.getpid(), signal.SIGSEGV)


def allocates() -> None:
    """A reader that asks for more than it may have."""
    import birthmark.files

    birthmark.files.parse_json = lambda text: bytearray(2 << 30)


def throws() -> None:
    """A reader with a mistake in it."""
    import birthmark.files

    birthmark.files.parse_json = lambda text: {}["digest"]


def talks() -> None:
    """A reader whose message names nothing."""
    import birthmark.files
    from birthmark.errors import RunError

    def fail(text: str) -> None:
        raise RunError("something is wrong")

    birthmark.files.parse_json = fail  # type: ignore[assignment]


def writes() -> None:
    """A reader that leaves something where it should not."""
    Path("../watched/left").touch()


# ── those of devices, folders, servers, rights and clocks ────────────────────────────────────────────────────────────


def says_nothing_of_devices() -> None:
    """A writer that passes on the system's error."""
    import birthmark.files

    birthmark.files.write_failure = lambda path, error: error


def finds_modules_in_the_folder() -> None:
    """A child process that looks into the working folder first."""
    import birthmark.audit.pickled_weights as weights

    weights.python_command = lambda *words: [sys.executable, *map(str, words)]
    weights.python_environment = lambda *more: dict(os.environ)


def follows_names() -> None:
    """A reader of listings that joins names as they come."""
    import birthmark.data.remote as remote

    remote.path_below = lambda folder, key, fail, nested=False: folder / key


def hears_for_ever() -> None:
    """A reader of servers without a bound."""
    import birthmark.data.remote as remote

    remote.MOST_UNSTATED = 1 << 60


def reads_holes() -> None:
    """A reader that hashes a file before it looks how long it may be."""
    import birthmark.measure.records as records

    records.check_tensor_file = lambda *_: None


def keeps_private() -> None:
    """A writer that leaves the library's mode."""
    import birthmark.models.exchange.pretrained as pretrained

    pretrained.save_tensors = lambda save, tensors, path, **more: save(tensors, path, **more)


def writes_where_it_reads() -> None:
    """A reader that leaves a note in the folder that it reads."""
    import birthmark.measure.records as records

    records.RunDir.read_birth = lambda run: (run.path / "note").write_text("x") and {}  # type: ignore[method-assign]


def asks_the_clock() -> None:
    """A reader whose answer depends on the time."""
    import birthmark.measure.records as records

    summary = records.Snapshot.bias
    records.Snapshot.bias = property(lambda self: summary.fget(self) | {"sink_mass": time.time()})  # type: ignore


_MEASURED = ("measured", "arrays.safetensors", "summary.json")
_RUN = ("run", "corpus")


def _drawn(torture: Torture, kind: str, about: str) -> Case:
    """The first case of a kind that is about something."""
    cases = (make_case(0, number, torture.example, kind)[1] for number in range(20_000))
    return next(case for case in cases if case.about.startswith(about))


def _giant(case: Case) -> Case:
    def prepare(folder: Path) -> Must:
        with (folder / "measured" / "arrays.safetensors").open("r+b") as file:
            file.truncate(1 << 34)
        return "refuse"

    return replace(case, about="a hole of 16 GiB", prepare=prepare)


#: Fault, case.
PLANTED = (
    (no_schema, Case("lists for numbers", ("measured",), _summary_of_lists, _REPORT, _MEASURED)),
    (no_seal, Case("a config that is cut off", _RUN, _config_cut_off, _DESCRIBE, ("config.yaml",))),
    (unpickles, Case("a pickle", ("measured",), _pickle, _REPORT, _MEASURED)),
    (hangs, Case("nothing", ("measured",), lambda folder: "any", _REPORT, _MEASURED)),
    (crashes, Case("nothing", ("measured",), lambda folder: "any", _REPORT, _MEASURED)),
    (allocates, Case("nothing", ("measured",), lambda folder: "any", _REPORT, _MEASURED)),
    (throws, Case("nothing", ("measured",), lambda folder: "any", _REPORT, _MEASURED)),
    (talks, Case("nothing", ("measured",), lambda folder: "any", _REPORT, _MEASURED)),
    (writes, Case("nothing", ("measured",), lambda folder: "any", _REPORT, _MEASURED)),
)
#: Fault, kind of case, and what the case is about.
DRAWN = (
    (says_nothing_of_devices, "device", "birth tiny.yaml --out new: device error after"),
    (finds_modules_in_the_folder, "hostile_folder", "audit suite beside resource"),
    (follows_names, "web", "a server: absolute"),
    (hears_for_ever, "web", "a server: endless"),
    (keeps_private, "modes", "export run new under umask 22"),
    (writes_where_it_reads, "read_only", "report run --json"),
    (asks_the_clock, "clock", "report measured --json, a clock at"),
)

if __name__ == "__main__":
    devices.preload()
    torture = Torture(Path(sys.argv[1]))
    cases = [*PLANTED, *((plant, _drawn(torture, kind, about)) for plant, kind, about in DRAWN)]
    for plant, case in [*cases, (reads_holes, _giant(cases[0][1]))]:
        torture.before, torture.wall = None, 60.0
        sound = torture.faults_of(case)
        torture.before, torture.wall = plant, 3.0 if plant in (hangs, hears_for_ever, reads_holes) else 60.0
        print(plant.__name__, sound, torture.faults_of(case), sep="\t", flush=True)
        (torture.watched / "left").unlink(missing_ok=True)
        (torture.watched / "pickle").unlink(missing_ok=True)
        (torture.watched / "code").unlink(missing_ok=True)
        torture.watch.changes()

"""Faults planted in readers, each in the process of one case, and what the harness says of it.

``python planted_inputs.py ROOT`` prints a line for each: what was planted, and what was found.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from pathlib import Path

import damage
from case import Case, Must
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

    birthmark.trainer.saved_config.check_own_config = lambda file: None


def unpickles() -> None:
    """A reader that opens a pickle."""
    import birthmark.measure.records

    birthmark.measure.records.file_sha256 = lambda file: str(pickle.loads(Path(file).read_bytes()))


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


_MEASURED = ("measured", "arrays.safetensors", "summary.json")
_RUN = ("run", "corpus")
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

if __name__ == "__main__":
    torture = Torture(Path(sys.argv[1]))
    for plant, case in PLANTED:
        torture.before, torture.wall = None, 60.0
        sound = torture.faults_of(case)
        torture.before, torture.wall = plant, 3.0 if plant is hangs else 60.0
        print(plant.__name__, sound, torture.faults_of(case), sep="\t", flush=True)
        (torture.watched / "left").unlink(missing_ok=True)
        (torture.watched / "pickle").unlink(missing_ok=True)
        torture.watch.changes()

"""The tables of docs/security.md on what commands reach: ``python -m birthmark.launch.reference.security_page``.

A test runs the commands on hostile input and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...files import write_text
from .generated_tables import Tables, markdown_rows, regenerated

FILE = Path(__file__).parents[2] / "docs" / "security.md"

#: Places that commands write to, by the names that the table has for them.
PLACES: Mapping[str, str] = {
    "out": "what an option names: `--out`, `--write`, `--run_dir`, `--cache_dir`, the second word of `export`",
    "run": "the folder of the run that is trained or reported",
    "study": "the folder of the study: `studies/NAME`, or `--out`",
    "cache": "`data.cache_dir`, `data.stage_to`, and `$XDG_CACHE_HOME/birthmark` (`~/.cache/birthmark`)",
    "temporary": "the system's temporary folder, emptied at the end",
    "libraries": "the caches that torch, Hugging Face, matplotlib and W&B keep for all programs of the user",
    "working": "the working folder, where no `--out` says otherwise",
}

#: Programs that commands start, by the names that the table has for them.
PROGRAMS: Mapping[str, str] = {
    "python": "this Python with `-P`: the working folder is not on its path",
    "git": "to compare files with a commit, without the repository's configuration, hooks and filters",
    "compiler": "`$CC` (`gcc`) on files of this package, and what `torch.compile` or DeepSpeed build",
    "launcher": "`bash` or `sbatch` with a file of this package",
    "wandb": "W&B's own process, where `log.wandb` is not `off`",
}

#: Small tools of the system that libraries ask about the machine; any command may start them.
TOOLS = ("uname", "ldconfig", "lscpu", "nvidia-smi", "fc-list", "file", "gcc", "ld", "getconf")


@dataclass(frozen=True)
class Reach:
    """The reach of a command, beyond reading its input and printing."""

    writes: tuple[str, ...] = ()
    """Keys of `PLACES`."""
    starts: tuple[str, ...] = ()
    """Keys of `PROGRAMS`."""
    network: str = ""
    """Hosts that it connects to; none if empty."""
    code: str = ""
    """Code outside of this package and its libraries that it imports; none if empty."""


_HUB = "the hub, of a model that is no path"
_CORPUS = "the URLs and hub of `data`"
_OWN = "`module:Class` of the config"
_MODEL = Reach(
    ("out", "working", "cache", "libraries", "temporary"), (), _HUB, f"{_OWN}; the model's, by `--trust_remote_code`"
)
_TRAINS = Reach(
    ("run", "cache", "libraries", "temporary"),
    ("python", "git", "compiler", "wandb"),
    f"{_CORPUS}; W&B; the other ranks",
    _OWN,
)

#: By command.
REACH: Mapping[str, Reach] = {
    "demo": _TRAINS,
    "pretrain": _TRAINS,
    "adapt": _TRAINS,
    "ablate": Reach(("study", *_TRAINS.writes), (*_TRAINS.starts, "launcher"), _TRAINS.network, _OWN),
    "launch": Reach(("out", *_TRAINS.writes), (*_TRAINS.starts, "launcher"), _TRAINS.network, _OWN),
    "tokenise": Reach(("cache", "temporary", "libraries"), ("python",), _CORPUS),
    "data": Reach(("cache", "temporary", "libraries"), ("python",), _CORPUS),
    "report": Reach(("run", "out", "libraries"), (), "with `--watch` it listens on 127.0.0.1 alone"),
    "figure": Reach(("out", "working", "libraries")),
    "describe": Reach((), (), "", _OWN),
    "plan": Reach(("libraries", "temporary"), ("compiler",), "", _OWN),
    "birth": Reach(("out",), (), "", _OWN),
    "sample": Reach(("libraries",), (), _HUB, _OWN),
    "export": Reach(("out", "temporary"), (), f"{_HUB}; with `--push` the repository that it names"),
    "fingerprint": _MODEL,
    "identify": _MODEL,
    "snapshot": _MODEL,
    "compare": _MODEL,
    "intervene": _MODEL,
    "length": _MODEL,
    "quantise": _MODEL,
    "audit": Reach(("out", "temporary", "libraries"), ("python",), _HUB),
    "certify": Reach(("run", "out")),
    "verify": Reach(("temporary",), ("python",), _HUB),
    "configs": Reach(),
    "doctor": Reach(("libraries", "temporary"), ("compiler",)),
    "completion": Reach(),
}


def reach() -> str:
    """List what commands write, start, connect to and import: a row for those that do the same."""
    alike: dict[Reach, list[str]] = {}
    for name, one in REACH.items():
        alike.setdefault(one, []).append(f"`{name}`")
    rows = (
        [", ".join(names), _listed(one.writes), _listed(one.starts), one.network or "–", one.code or "–"]
        for one, names in alike.items()
    )
    return markdown_rows(["command", "writes to", "starts", "connects to", "runs code of"], rows)


def places() -> str:
    """List the places that commands write to."""
    return markdown_rows(["place", "is"], PLACES.items())


def programs() -> str:
    """List the programs that commands start."""
    return markdown_rows(["program", "is"], PROGRAMS.items())


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "–"


TABLES: Tables = {"reach": reach, "places": places, "programs": programs}

if __name__ == "__main__":
    write_text(FILE, regenerated(FILE.read_text(encoding="utf-8"), TABLES))

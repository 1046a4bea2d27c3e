"""Provenance of a run: libraries, code, machines. Recorded in its certificate and in W&B, never read back."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

from .. import __version__
from ..errors import RunError
from ..files import check_file, read_text
from .processes.launched_process import LaunchedProcess

_PACKAGE = Path(__file__).resolve().parent.parent


def versions() -> dict[str, str]:
    """Return the versions of the libraries that decide a run's numbers."""
    return {
        "birthmark": __version__,
        "torch": torch.__version__,
        "lightning": L.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def code(package: Path = _PACKAGE) -> dict[str, Any] | None:
    """Read the Git commit that this package runs from or, if it is installed, that of the working folder.

    Nothing that a repository configures is run: the commit is read from its files, and the comparison is made with a
    configuration of this module (:func:`_compare`).

    Returns:
        ``commit``, and as ``changed`` whether tracked files differ from it, None where Git cannot say; None outside of
        any repository, or without git.
    """
    if shutil.which("git") is None:
        return None
    for folder in (package, Path.cwd()):
        found = find_repository(folder)
        if found is None or (commit := found.commit()) is None:
            continue
        with _apart(found, commit) as git:
            # A virtual environment may lie in another project's repository, which then does not hold the package.
            if folder == package and not _said(git, "ls-files", "--", str(folder.relative_to(found.root))):
                continue
            return {"commit": commit, "changed": _compare(git)}
    return None


# ── Git without what a repository configures ─────────────────────────────────────────────────────────────────────────

#: Bytes of the largest file of a repository that is read as text, and of the largest index that is copied.
_MOST_REFS, _MOST_INDEX = 1 << 24, 1 << 30
#: Seconds that git may take.
_PATIENCE_S = 60
_COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_REF = re.compile(r"refs/(?!.*(?:\.\.|//))[\w./+@-]+")
_NO_CHANGE, _CHANGE = 0, 1


@dataclass(frozen=True)
class Repository:
    """A Git repository, read from its files; none of its code is run."""

    root: Path
    """Folder of its files."""
    folder: Path
    """Git's own folder: ``.git``, or that of a linked work tree or a submodule."""
    common: Path
    """The folder that all its work trees share."""

    def commit(self) -> str | None:
        """Read the commit of HEAD; None if there is none, or its storage is not supported."""
        try:
            head = _line_of(self.folder / "HEAD").removeprefix("ref: ")
            if _REF.fullmatch(head):
                head = self._commit_of(head)
        except RunError:
            return None
        return head if _COMMIT.fullmatch(head) else None

    def _commit_of(self, ref: str) -> str:
        for folder in (self.folder, self.common):
            if (folder / ref).is_file():
                return _line_of(folder / ref)
        lines = read_text(self.common / "packed-refs", _MOST_REFS).splitlines()
        return next((line.partition(" ")[0] for line in lines if line.endswith(f" {ref}")), "")


def find_repository(folder: Path) -> Repository | None:
    """Find the repository of a folder; None if there is none."""
    folder = folder.resolve()
    root = next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)
    if root is None:
        return None
    try:
        git = root / ".git"
        if not git.is_dir():
            git = (root / _line_of(git).removeprefix("gitdir: ")).resolve()
        common = git / "commondir"
        return Repository(root, git, (git / _line_of(common)).resolve() if common.is_file() else git)
    except RunError:
        return None


def _line_of(file: Path) -> str:
    return read_text(file, _MOST_REFS).strip()


@contextmanager
def _apart(repository: Repository, commit: str) -> Iterator[dict[str, str]]:
    """Yield an environment in which git reads a repository's objects, index and files, and none of its configuration.

    Monitors, hooks, filters and programs that show differences are named in a repository's configuration. Its
    ``.gitattributes`` can only refer to these names.
    """
    with tempfile.TemporaryDirectory(prefix="birthmark-git-") as scratch:
        git = Path(scratch)
        for name in ("objects/info", "refs"):
            (git / name).mkdir(parents=True)
        sha256 = "[extensions]\n\tobjectFormat = sha256\n" if len(commit) == 64 else ""
        (git / "config").write_text(f"[core]\n\trepositoryFormatVersion = {int(bool(sha256))}\n{sha256}")
        (git / "HEAD").write_text(f"{commit}\n")
        (git / "objects/info/alternates").write_text(f"{repository.common / 'objects'}\n")
        with suppress(RunError, OSError):
            check_file(repository.folder / "index", _MOST_INDEX)
            shutil.copyfile(repository.folder / "index", git / "index")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        yield kept | {
            "GIT_DIR": scratch,
            "GIT_WORK_TREE": str(repository.root),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_TERMINAL_PROMPT": "0",
        }


def _git(variables: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            env=dict(variables),
            cwd=variables["GIT_WORK_TREE"],
            timeout=_PATIENCE_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _said(variables: Mapping[str, str], *arguments: str) -> str:
    """Run git; return its output, empty if it fails."""
    done = _git(variables, *arguments)
    return "" if done is None or done.returncode else done.stdout


def _compare(variables: Mapping[str, str]) -> bool | None:
    """Compare tracked files with the commit. A submodule is left out: git would read its own configuration."""
    done = _git(variables, "diff", "--quiet", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all", "HEAD")
    status = None if done is None else done.returncode
    return status == _CHANGE if status in (_NO_CHANGE, _CHANGE) else None


def environment(device: torch.device, process: LaunchedProcess | None) -> dict[str, Any]:
    """Describe the machines of this start of a run: another start may have others."""
    on_gpu = device.type == "cuda"
    return {
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu ({platform.machine()})",
        "processes": process.world_size if process else 1,
        "nodes": process.n_nodes if process else 1,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }

"""What a run was made with: libraries, code, machines. Recorded in its certificate and in W&B, never read back."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

from .. import __version__
from .processes.launched_process import LaunchedProcess

_PACKAGE = Path(__file__).resolve().parent.parent


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    return {
        "birthmark": __version__,
        "torch": torch.__version__,
        "lightning": L.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def code(package: Path = _PACKAGE) -> dict[str, Any] | None:
    """Git commit of the repository that this package runs from or, where it was installed, of the working folder's,
    and whether tracked files differ from it; None outside of any, or without git."""
    if shutil.which("git") is None:
        return None
    for folder in (package, Path.cwd()):
        commit = _git(folder, "rev-parse", "HEAD")
        # A virtual environment may lie in another project's repository, which then does not hold the package.
        if commit is None or (folder == package and not _git(folder, "ls-files", ".")):
            continue
        return {"commit": commit, "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}
    return None


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says of a folder; None if it fails."""
    done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def environment(device: torch.device, process: LaunchedProcess | None) -> dict[str, Any]:
    """The machines of this start of a run: another start may have others."""
    on_gpu = device.type == "cuda"
    return {
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu ({platform.machine()})",
        "processes": process.world_size if process else 1,
        "nodes": process.n_nodes if process else 1,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }

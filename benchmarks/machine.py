"""The machine of a measurement: processor or card, driver, libraries, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("lightning", "transformers", "litgpt", "nano-gpt", "triton", "torchao", "numpy")


def processor() -> str:
    """Return the CPU's name."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def cpu_has_bf16() -> bool:
    """Say if the CPU has instructions for products of bf16 numbers."""
    file = Path("/proc/cpuinfo")
    return bool(re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", file.read_text())) if file.is_file() else False


def _said(*command: str) -> str:
    """Return the first line of a command's output; "" if there is no such command, or if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def commit() -> str:
    """Return the commit of the tree, with a ``+`` if files differ from it; without git, ``COMMIT`` names it."""
    known = _said("git", "rev-parse", "--short", "HEAD")
    if not known:
        return os.environ.get("COMMIT", "unknown")
    return known + ("+" if _said("git", "status", "--porcelain", "--untracked-files=no") else "")


def version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device | str) -> str:
    """Return the name of the card, or of the CPU."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else processor()


def describe(device: torch.device | str) -> dict[str, str]:
    """Return everything that a figure may depend on, and the date."""
    found = {"device": device_name(device)}
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["memory"] = f"{properties.total_memory / 2**30:.1f} GiB"
        query = "--query-gpu=driver_version,power.limit"
        found["driver, power limit"] = _said("nvidia-smi", query, "--format=csv,noheader")
        found["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        found["processor"] = processor()
    else:
        found["bf16 instructions"] = "yes" if cpu_has_bf16() else "no"
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    found |= {
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "main memory": f"{gib:.0f} GiB",
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: known for name in LIBRARIES if (known := version(name)) is not None},
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    return found


def write_page(file: Path, lines: list[str], load: float) -> None:
    """Write and print lines of Markdown, and below them the name of this CPU and how busy it was."""
    facts = describe("cpu") | {"load before": f"{load:.1f}"}
    text = "\n".join([*lines, "", ", ".join(f"{name}: {value}" for name, value in facts.items())]) + "\n"
    file.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def slug(name: str) -> str:
    """Return a name in the form of a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

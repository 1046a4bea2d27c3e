"""Launch files with what was given filled in: they then depend on no file beside them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..files import atomic_path


def fill_in(
    text: str,
    variables: Mapping[str, str],
    words: Sequence[str],
    sbatch: Mapping[str, str],
    *,
    first: Sequence[str] = (),
) -> str:
    """A launch file's text for one purpose.

    Args:
        text: of the launch file.
        variables: environment variables that it reads; what is in the environment when it is started wins.
        words: arguments that it is given, before those of its start.
        sbatch: options of SLURM's sbatch, without their dashes, in place of the file's own of these names.
        first: commands that it begins with.
    """
    lines = [*first, *(f'[ -n "${{{name}:-}}" ] || {name}={shlex.quote(value)}' for name, value in variables.items())]
    if words:
        lines.append(f'set -- {shlex.join(words)} "$@"')
    text = re.sub(r"^(#.*\n)?(\[.*\|\| )?\. .*/find_python\.sh\"\n", "", text, flags=re.MULTILINE)
    text = text.replace("set -euo pipefail\n", "set -euo pipefail\n\n" + "\n".join(lines) + "\n", 1)
    for name, value in sbatch.items():
        # sbatch takes the last line of an option: the file's own would win.
        text = re.sub(rf"^#SBATCH --{re.escape(name)}(=.*)?\n", "", text, flags=re.MULTILINE)
        text = text.replace("#SBATCH ", f"#SBATCH --{name}={_quoted(value)}\n#SBATCH ", 1)
    return text


def _quoted(value: str) -> str:
    """A value as sbatch reads it in a file: in quotes where it has a space."""
    return f'"{value}"' if re.search(r"\s", value) else value


def write_executable(path: Path, text: str) -> None:
    """Write a program atomically."""
    with atomic_path(path) as new:
        new.write_text(text, encoding="utf-8")
        new.chmod(0o755)

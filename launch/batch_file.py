"""Launch files with the user's values filled in: they depend on no file beside them."""

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
    """Fill the user's values into the text of a launch file.

    Args:
        text: text of the launch file.
        variables: environment variables that it reads; the environment of the start has precedence.
        words: arguments that it passes on, before those of its start.
        sbatch: options of SLURM's sbatch, without their dashes, in place of the file's own of these names.
        first: commands at its beginning.
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
    """Quote a value as sbatch reads it in a file: in quotation marks if it contains white space."""
    return f'"{value}"' if re.search(r"\s", value) else value


def write_executable(path: Path, text: str) -> None:
    """Write a program atomically."""
    with atomic_path(path) as new:
        new.write_text(text, encoding="utf-8")
        new.chmod(0o755)

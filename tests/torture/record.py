"""Notes of a torture: how much of each kind was tried, and what was found; kept in a file, from which it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


@dataclass
class Record:
    """Notes of one seed's inputs, or of its kills."""

    seed: int
    done: list[int] = field(default_factory=list)
    """Numbers of what was tried."""
    kinds: Counter[str] = field(default_factory=Counter)
    """How often each kind was tried."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    """Number, kind, what was done and what was wrong, of each that was not as it must be."""
    seconds: float = 0.0
    keep: Path | None = None
    """File that holds these notes, brought up to date every few seconds."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the file says beside them."""
    _at: float = field(default_factory=time.monotonic)

    def note(self, number: int, kind: str, done: str, wrong: list[str]) -> None:
        """Note one trial."""
        self.done.append(number)
        self.kinds[kind] += 1
        if wrong:
            self.findings.append({"number": number, "kind": kind, "done": done, "wrong": wrong})
        if wrong or time.monotonic() - self._at > 5:
            self.write()

    def write(self) -> None:
        """Bring the file up to date."""
        now = time.monotonic()
        self.seconds, self._at = self.seconds + now - self._at, now
        if self.keep is not None:
            new = self.keep.with_name(f".{self.keep.name}.new")
            new.write_text(json.dumps({**self.about, **self.as_json()}, indent=1) + "\n")
            new.replace(self.keep)

    def as_json(self) -> dict[str, Any]:
        """Return the notes for a file."""
        kinds = dict(sorted(self.kinds.items()))
        return {
            "seed": self.seed, "tried": len(self.done), "kinds": kinds, "findings": self.findings,
            "seconds": round(self.seconds), "done": self.done,
        }  # fmt: skip

    def in_words(self) -> str:
        """Return the numbers in one sentence."""
        kinds = ", ".join(f"{name} {n}" for name, n in sorted(self.kinds.items()))
        return f"{len(self.done)} cases of seed {self.seed} ({kinds}), {len(self.findings)} findings"


def opened(file: Path | None, seed: int, about: Mapping[str, Any]) -> Record:
    """Begin notes in a file, or go on with those that it holds of the same seed; without a file they are not kept."""
    begun = Record(seed, keep=file, about=about)
    if file is None or not file.exists():
        return begun
    held = json.loads(file.read_text())
    if held["seed"] != seed or any(held.get(name) != value for name, value in about.items() if name != "date"):
        raise SystemExit(f"{file}: notes of another seed, part or commit; name another file with --out")
    begun.done, begun.findings, begun.seconds = held["done"], held["findings"], held["seconds"]
    begun.kinds.update(held["kinds"])
    return begun


def circumstances(part: tuple[int, int]) -> dict[str, Any]:
    """Return the date, the commit with a mark of changes, the part, and the processors of this machine."""
    git = ["git", "-C", str(Path(__file__).parent)]
    said = [
        subprocess.run([*git, *words], capture_output=True, text=True, check=False).stdout.strip()
        for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    ]
    commit = said[0] + ("+" if said[1] else "")
    date = datetime.now(UTC).date().isoformat()
    return {"date": date, "commit": commit or "unknown", "part": list(part), "processors": os.cpu_count()}

"""Damaged and hostile inputs: every one is refused in a sentence, or does what the undamaged one does."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path

from case import Case
from cases import make_case
from example import command, load_everything, make_example, rehearse
from sandbox import WALL_SECONDS, Outcome, Watch, be_cheap_to_fork, faults, in_memory, run_forked

#: What differs between two calls that do the same.
_TIMES = re.compile(r'("seconds": |"time": |took |in )[0-9.e+-]+|\d+ tokens/s')


@dataclass
class Torture:
    """Runs cases in folders below ``root``."""

    root: Path
    wall: float = WALL_SECONDS
    before: Callable[[], object] | None = None
    """Called in the process of each case before its command: where faults are planted."""
    outcomes: dict[tuple[str, ...], Outcome] = field(default_factory=dict)
    """What commands say of the undamaged example."""
    parts: dict[str, list[tuple[str, bytes | None, int]]] = field(default_factory=dict)
    """Of the example, what was copied before: each file's or folder's name, content and time in ns."""

    def __post_init__(self) -> None:
        load_everything()
        self.root.mkdir(parents=True, exist_ok=True)
        self.example, self.watched, self.case = (self.root / name for name in ("example", "watched", "case"))
        if not self.example.exists():
            make_example(self.example)
            self.watched.mkdir()
            shutil.copyfile(self.example / "theirs" / "model.safetensors", self.watched / "canary.safetensors")
        rehearse(self.example)
        be_cheap_to_fork()
        self.watch = Watch((self.example, self.watched))

    def _copy(self, parts: tuple[str, ...]) -> None:
        """Make the case's folder anew, with these parts of the example. They are read once, and written for each."""
        shutil.rmtree(self.case, ignore_errors=True)
        self.case.mkdir()
        for part in parts:
            if part not in self.parts:
                self.parts[part] = list(_contents(self.example / part, part))
            for name, content, modified_ns in self.parts[part]:
                place = f"{self.case}/{name}"
                if content is None:
                    Path(place).mkdir()
                else:
                    with Path(place).open("wb", buffering=0) as file:
                        file.write(content)
                    os.utime(place, ns=(modified_ns, modified_ns))

    def _run(self, arguments: tuple[str, ...], planted: bool) -> Outcome:
        do = command(arguments)

        def with_fault() -> int:
            if planted and self.before is not None:
                self.before()
            return do()

        return run_forked(with_fault, self.case, self.watch, self.wall)

    def _undamaged(self, case: Case) -> Outcome:
        key = (*case.arguments, *case.parts)
        if key not in self.outcomes:
            self._copy(case.parts)
            self.outcomes[key] = self._run(case.arguments, planted=False)
        return self.outcomes[key]

    def faults_of(self, case: Case) -> list[str]:
        """What is wrong with how the command takes the input; empty if nothing is."""
        self._copy(case.parts)
        must = case.prepare(self.case)
        outcome = self._run(case.arguments, planted=True)
        found = faults(outcome, case.names)
        if outcome.status == 0 and must == "refuse":
            found.append("silent: taken")
        elif outcome.status == 0 and must == "same" and _said(outcome) != _said(self._undamaged(case)):
            found.append("silent: taken, and another result")
        if found and outcome.errors.strip():
            found.append(f"said: {' '.join(outcome.errors.split())[:300]}")
        return found


def _contents(place: Path, name: str) -> Iterator[tuple[str, bytes | None, int]]:
    """A file, or a folder with all below it: names from ``name`` on, contents (None of a folder), times in ns."""
    yield name, None if place.is_dir() else place.read_bytes(), place.stat().st_mtime_ns
    for below in sorted(place.iterdir()) if place.is_dir() else ():
        yield from _contents(below, f"{name}/{below.name}")


def _said(outcome: Outcome) -> str:
    return _TIMES.sub("", outcome.output)


def show(seed: int, number: int, case: Case, found: list[str]) -> str:
    """A failure, and how to see it again."""
    return f"case {seed}:{number}  {case.about}\n  birthmark {' '.join(case.arguments)[:200]}\n  " + "\n  ".join(found)


def main(minutes: float, seed: int) -> int:
    """Torture for so long; prints failures and returns their number."""
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(dir=in_memory()) as root:
        return run_cases(Path(root), seed, takewhile(lambda number: time.monotonic() < end, count()))


def run_cases(root: Path, seed: int, numbers: Iterable[int]) -> int:
    """Cases of ``seed`` on the example in ``root``, made if need be; prints failures and returns their number."""
    torture, start, done = Torture(root), time.monotonic(), 0
    kinds: Counter[str] = Counter()
    for number in numbers:
        case = make_case(seed, number, torture.example)
        done += 1
        if found := torture.faults_of(case):
            kinds[found[0].partition(":")[0]] += 1
            print(show(seed, number, case, found), flush=True)
    seconds = time.monotonic() - start
    print(f"inputs: {done} cases of seed {seed} in {seconds:.0f} s, {kinds.total()} failures {dict(kinds) or ''}")
    return kinds.total()


if __name__ == "__main__":
    # python inputs.py ROOT SEED FIRST LAST
    seed, first, last = map(int, sys.argv[2:])
    sys.exit(bool(run_cases(Path(sys.argv[1]), seed, range(first, last))))

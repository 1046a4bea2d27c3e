"""Damaged and hostile inputs: every one is refused in a sentence, or does what the undamaged one does."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path

from cases import Case, make_case
from example import command, load_everything, make_example
from sandbox import WALL_SECONDS, Outcome, faults, run_forked

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

    def __post_init__(self) -> None:
        load_everything()
        self.root.mkdir(parents=True, exist_ok=True)
        self.example, self.watched, self.case = (self.root / name for name in ("example", "watched", "case"))
        if not self.example.exists():
            make_example(self.example)
            self.watched.mkdir()
            shutil.copyfile(self.example / "theirs" / "model.safetensors", self.watched / "canary.safetensors")

    def _copy(self, parts: tuple[str, ...]) -> None:
        shutil.rmtree(self.case, ignore_errors=True)
        self.case.mkdir()
        for part in parts:
            source = self.example / part
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, self.case / part)

    def _run(self, arguments: tuple[str, ...], planted: bool) -> Outcome:
        do = command(arguments)

        def with_fault() -> int:
            if planted and self.before is not None:
                self.before()
            return do()

        return run_forked(with_fault, self.case, (self.example, self.watched), self.wall)

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


def _said(outcome: Outcome) -> str:
    return _TIMES.sub("", outcome.output)


def show(seed: int, number: int, case: Case, found: list[str]) -> str:
    """A failure, and how to see it again."""
    return f"case {seed}:{number}  {case.about}\n  birthmark {' '.join(case.arguments)[:200]}\n  " + "\n  ".join(found)


def main(minutes: float, seed: int) -> int:
    """Torture for so long; prints failures and returns their number."""
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as root:
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

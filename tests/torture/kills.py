"""Runs that are struck at random moments, resumed until they end, and compared with one that was left alone.

Each trial is decided by the seed and its number. Trials of one strategy share the run that was left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import damage
import devices
from forked_ranks import Rank, import_once, start_ranks, wait
from record import Record

#: Ranks of each strategy that is tried.
STRATEGIES = {"single": 1, "ddp": 2, "fsdp2": 2, "zero1": 2, "zero3": 2}

#: No run of this size takes longer, on the slowest machine.
LIMIT_S = 240.0

MAX_STEPS, CHECKPOINT_EVERY = 12, 4

CONFIG = f"""
init_seed: 3
model: {{d_model: 16, n_layers: 2, n_heads: 2, vocab_size: 24, max_seq_len: 12}}
data: {{path: backcopy, data_seed: 5}}
optim: {{lr: 0.01, warmup_steps: 2, grad_clip: 0.5}}
trainer: {{max_steps: {MAX_STEPS}, micro_batch_size: 2, global_batch_size: 4, checkpoint_every: {CHECKPOINT_EVERY},
  log_every: 1, val_sequences: 6, device: cpu, strategy: STRATEGY}}
snapshot: {{n_sequences: 10, seq_len: 8, batch_size: 4, top_k: 5}}
log: {{wandb: "off"}}
"""

#: What differs between two runs that are the same: times, what is made of them, and the seal of a file that has one.
_VOLATILE = re.compile(r"seconds|train/.*_s|train/data_wait|train/slowest_rank|mfu|.*/mfu|.*memory.*|sha256")

#: What Python prints, and goes on, where a Ctrl-C falls into code that cannot raise.
_UNRAISABLE = re.compile(r"Exception ignored in:.*?\nKeyboardInterrupt:? *\n", re.DOTALL)

#: A run that ends well, is stopped by a signal, or fails with a sentence of ours has none of these in its output.
_INTERNAL = re.compile(r"Traceback|birthmark: internal error|(Error|Exception):|Segmentation|core dumped")


class TrialError(Exception):
    """What a trial found."""


# ---------------------------------------------------------------- what a run left behind


def _plain(value: object) -> object:
    """JSON without what is volatile."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if not _VOLATILE.fullmatch(k)}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def results(run: Path) -> dict[str, object]:
    """Everything that two equal runs have in common: name of a file, of a step of the log → its content."""
    found: dict[str, object] = {}
    for file in sorted(run.glob("*/step-*/*")):
        if file.suffix == ".json":
            found[str(file.relative_to(run))] = _plain(json.loads(file.read_text()))
        elif file.suffix == ".safetensors":
            found[str(file.relative_to(run))] = hashlib.sha256(file.read_bytes()).hexdigest()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name != "step" and not _VOLATILE.fullmatch(name):
                key = f"metrics.jsonl step {record['step']} {name}"
                if key in found:
                    raise TrialError(f"twice: {key}")
                found[key] = value
    certificate = json.loads((run / "birth.json").read_text())
    found["birth.json"] = {k: certificate[k] for k in ("digest", "init_seed", "n_params", "data", "parameters")}
    return found


def compare(run: Path, whole: dict[str, object]) -> None:
    """TrialError if the run lacks something, has something else, or has left something over."""
    found = results(run)
    if lost := sorted(name for name in whole if name not in found):
        raise TrialError(f"lost: {', '.join(lost[:5])}")
    if other := sorted(name for name in whole if found[name] != whole[name]):
        raise TrialError(f"differs: {', '.join(other[:5])}")
    stops = {int(folder.name[5:]) for folder in run.glob("checkpoints/step-*")}
    for name in found.keys() - whole.keys():
        step = re.search(r"step[- ](\d+)", name)
        if step is None or int(step[1]) not in stops:
            raise TrialError(f"left over: {name}")
    # Locks are held by the processes that have them open, and stay.
    if hidden := [
        str(p.relative_to(run)) for p in run.rglob(".*") if not (p.parent == run and p.name.endswith(".lock"))
    ]:
        raise TrialError(f"left over: {', '.join(hidden[:5])}")
    for name in ("report.html", "metrics.csv"):
        if not (run / name).is_file():
            raise TrialError(f"lost: {name}")


# ---------------------------------------------------------------- one run


@dataclass
class Victim:
    """A run in a folder of its own, started as often as it takes."""

    folder: Path
    strategy: str
    starts: int = 0
    prepare: Callable[[], None] = field(default=lambda: None)
    """Called in each process before it starts."""
    ranks: list[Rank] = field(default_factory=list)
    """Those of the last start."""

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @property
    def n_ranks(self) -> int:
        """Its processes."""
        return STRATEGIES[self.strategy]

    def log(self) -> str:
        """Its training log so far."""
        file = self.run / "metrics.jsonl"
        return file.read_text() if file.is_file() else ""

    def start(self) -> list[Rank]:
        """Start it, or go on where it has begun, as a person would who reads the messages."""
        config = self.folder / "config.yaml"
        if not config.is_file():
            config.write_text(CONFIG.replace("STRATEGY", self.strategy))
        # Without a birth certificate there is nothing to go on with.
        begun = (self.run / "birth.json").is_file()
        how = [f"--resume={self.run}"] if begun else [f"--config={config}", f"--run_dir={self.run}"]
        self.starts += 1
        output = self.folder / f"start-{self.starts}"
        self.ranks = start_ranks(self.n_ranks, ["pretrain", *how], output, self.prepare)
        return self.ranks

    def output(self) -> str:
        """What the last start printed."""
        return "".join(f.read_text(errors="replace") for f in sorted((self.folder / f"start-{self.starts}").iterdir()))

    def wait(self, meanwhile: Callable[[float], None] = lambda elapsed: None) -> str | None:
        """Wait until the last start is over: what was wrong about its end, or about what it printed."""
        wrong = wait(self.ranks, LIMIT_S, meanwhile)
        text = _UNRAISABLE.sub("", self.output())
        if match := _INTERNAL.search(text):
            wrong = wrong or f"internal error: {text[match.start() :].splitlines()[0][:200]}"
        if "birthmark: " not in text and any((status or 0) > 0 for status in self.statuses):
            wrong = wrong or f"{self.ended()} without a word"
        return wrong

    def must_tell(self, meanwhile: Callable[[float], None] = lambda elapsed: None) -> None:
        """Wait until the last start is over; TrialError if its end, or what it printed, was wrong."""
        if wrong := self.wait(meanwhile):
            raise TrialError(wrong)

    @property
    def statuses(self) -> list[int | None]:
        """Exit statuses of the last start's ranks."""
        return [rank.status for rank in self.ranks]

    def ended(self) -> str:
        """How the last start ended."""
        return f"exit status {' '.join(map(str, self.statuses))}"

    def must_end_well(self, meanwhile: Callable[[float], None] = lambda elapsed: None) -> None:
        """Wait until the last start is over; TrialError if it failed."""
        wrong = self.wait(meanwhile)
        if wrong or any(self.statuses):
            last = self.output().strip().splitlines()[-1:]
            raise TrialError(f"{wrong or self.ended()}: {' '.join(last)[:200]}")

    def finish(self, whole: dict[str, object]) -> None:
        """Go on until the end, undisturbed, and compare. What says that it has ended is compared as it is."""
        if any(self.statuses) or "stopped by" in self.output():
            self.start()
            self.must_end_well()
        compare(self.run, whole)


# ---------------------------------------------------------------- what strikes


@dataclass(frozen=True)
class Durations:
    """How long a run takes that nothing strikes, in seconds since its start."""

    trained: float
    """Until its last checkpoint."""
    ended: float
    """Until its report is there."""

    def moment(self, rng: random.Random) -> float:
        """When to strike: mostly while it trains, else while the report is drawn, or just too late."""
        return rng.uniform(0, self.trained) if rng.random() < 0.8 else rng.uniform(self.trained, 1.05 * self.ended)


#: Strikes a run; yields what it does, before it does it.
Fault: TypeAlias = "Callable[[Victim, random.Random, Durations], Iterator[str]]"


@dataclass(frozen=True)
class Blow:
    """A signal on its way."""

    at_s: float
    """Seconds since the start."""
    number: signal.Signals
    ranks: list[int]


def _strike(victim: Victim, blows: list[Blow]) -> Callable[[float], None]:
    """What sends the blows that are due to the victim's last start."""
    pending = list(blows)

    def meanwhile(elapsed: float) -> None:
        while pending and elapsed >= pending[0].at_s:
            blow = pending.pop(0)
            for i in blow.ranks:
                victim.ranks[i].send(blow.number)

    return meanwhile


def signals(victim: Victim, rng: random.Random, durations: Durations) -> Iterator[str]:
    """One to three times: SIGKILL, SIGTERM or SIGINT to one rank or to all."""
    for _ in range(rng.randint(1, 3)):
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        everybody = list(range(victim.n_ranks))
        blow = Blow(durations.moment(rng), number, rng.choice([[i] for i in everybody] + [everybody]))
        yield f"{number.name} to {blow.ranks} at {blow.at_s:.2f} s"
        victim.start()
        victim.must_tell(_strike(victim, [blow]))


def stopped_twice(victim: Victim, rng: random.Random, durations: Durations) -> Iterator[str]:
    """SIGTERM twice, or SIGINT and SIGTERM, as launchers send them: one stop, with a checkpoint where training runs."""
    everybody, at_s = list(range(victim.n_ranks)), durations.moment(rng)
    first = rng.choice([signal.SIGTERM, signal.SIGINT])
    yield f"{first.name} and SIGTERM at {at_s:.2f} s"
    victim.start()
    trained = False

    def look(elapsed: float) -> None:
        nonlocal trained
        if elapsed < at_s:
            trained = "train/loss" in victim.log()
        strike(elapsed)

    strike = _strike(victim, [Blow(at_s, first, everybody), Blow(at_s + 0.2, signal.SIGTERM, everybody)])
    victim.must_tell(look)
    if trained and not any(victim.run.glob("checkpoints/step-*")):
        raise TrialError(f"{victim.ended()}, no checkpoint")


def paused(victim: Victim, rng: random.Random, durations: Durations) -> Iterator[str]:
    """A rank stands still for a while."""
    at_s, seconds, whom = durations.moment(rng), rng.uniform(0.1, 3.0), [rng.randrange(victim.n_ranks)]
    yield f"rank {whom[0]} paused at {at_s:.2f} s for {seconds:.1f} s"
    victim.start()
    blows = [Blow(at_s, signal.SIGSTOP, whom), Blow(at_s + seconds, signal.SIGCONT, whom)]
    victim.must_end_well(_strike(victim, blows))


def clock_jumps(victim: Victim, rng: random.Random, durations: Durations) -> Iterator[str]:
    """The wall clock jumps, back or ahead, in all ranks alike."""
    at_s, jump_s, real = durations.moment(rng), rng.choice([-1, 1]) * 10 ** rng.uniform(0, 8), time.time
    yield f"clock jumps by {jump_s:.0f} s at {at_s:.2f} s"
    start = real()

    def jumping() -> float:
        now = real()
        return now + jump_s if now - start > at_s else now

    def prepare() -> None:
        before()
        time.time = jumping

    before, victim.prepare = victim.prepare, prepare
    victim.start()
    victim.must_end_well()
    victim.prepare = before


def two_writers(victim: Victim, rng: random.Random, durations: Durations) -> Iterator[str]:
    """A second process that goes on with the same run, which is refused or finds it done."""
    at_s, second = durations.moment(rng), Victim(victim.folder, "single", starts=100)
    yield f"second writer at {at_s:.2f} s"
    _beside(victim, at_s, second, second.start)


def read_meanwhile(victim: Victim, rng: random.Random, durations: Durations) -> Iterator[str]:
    """`birthmark report` while training writes."""
    at_s, reader = durations.moment(rng), Victim(victim.folder, "single", starts=100)
    yield f"report at {at_s:.2f} s"

    def read() -> list[Rank]:
        page = victim.folder / "page.html"
        reader.ranks = start_ranks(1, ["report", str(victim.run), f"--out={page}"], victim.folder / "start-100")
        return reader.ranks

    _beside(victim, at_s, reader, read)


def _beside(victim: Victim, at_s: float, other: Victim, start: Callable[[], list[Rank]]) -> None:
    """Run the victim, which must end well, and from ``at_s`` on another process beside it, which may fail in words."""
    victim.start()

    def meanwhile(elapsed: float) -> None:
        if not other.ranks and elapsed >= at_s:
            start()

    victim.must_end_well(meanwhile)
    if other.ranks and (wrong := other.wait()):
        raise TrialError(f"the process beside it: {wrong}")


def _mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", *options.split(), str(folder)], check=True, capture_output=True)


def disk_full(victim: Victim, rng: random.Random, durations: Durations) -> Iterator[str]:
    """A disk that fills up somewhere on the way; later there is room."""
    kib = int(2 ** rng.uniform(4, 10.5))
    yield f"disk of {kib} KiB"
    victim.run.mkdir()
    _mount(victim.run, f"-t tmpfs -o size={kib}k tmpfs")
    victim.start()
    wrong = victim.wait()
    _mount(victim.run, "-o remount,size=64m")
    if any(victim.statuses) and "no space left" not in victim.output():
        wrong = wrong or f"{victim.ended()}: {victim.output().strip().splitlines()[-1:]}"
    if wrong:
        raise TrialError(wrong)


def read_only(victim: Victim, rng: random.Random, durations: Durations) -> Iterator[str]:
    """A folder that cannot be written from some moment on; later it can."""
    at_s, done = durations.moment(rng), False
    yield f"read-only at {at_s:.2f} s"
    victim.run.mkdir()
    _mount(victim.run, "-t tmpfs -o size=64m tmpfs")
    victim.start()

    def meanwhile(elapsed: float) -> None:
        nonlocal done
        if not done and elapsed >= at_s:
            # A file that is open for writing keeps the kernel from it: then at the next look.
            done = subprocess.run(["mount", "-o", "remount,ro", victim.run], capture_output=True).returncode == 0

    wrong = victim.wait(meanwhile)
    _mount(victim.run, "-o remount,rw")
    if wrong:
        raise TrialError(wrong)


def device_fails(victim: Victim, rng: random.Random, durations: Durations) -> Iterator[str]:
    """A quota, a limit of file sizes or a broken device under the run; later it takes everything."""
    after, reason = int(2 ** rng.uniform(8, 20)), rng.choice([*devices.REASONS, "limit"])
    yield f"{reason} after {after} bytes"
    before = victim.prepare

    def prepare() -> None:
        before()
        (devices.limits_files(after) if reason == "limit" else devices.fails(reason, after, victim.run))()

    victim.prepare = prepare
    victim.start()
    wrong = victim.wait()
    victim.prepare = before
    # One line for a person, with the file.
    if any(victim.statuses) and not re.search(r"birthmark: .*run/|run_dir|run:", victim.output()):
        wrong = wrong or f"{victim.ended()}: {victim.output().strip().splitlines()[-1:]}"
    if wrong:
        raise TrialError(wrong)


def damaged_between(victim: Victim, rng: random.Random, durations: Durations) -> Iterator[str]:
    """Killed between its second checkpoint and its end; before it goes on, a file of the newest one is damaged.

    It must say so by name; when that folder is deleted, as the message asks, the one before is taken.
    """
    yield "SIGKILL after the second checkpoint"
    victim.start()
    second, struck = victim.run / f"checkpoints/step-{2 * CHECKPOINT_EVERY:08d}", False

    def strike(elapsed: float) -> None:
        nonlocal struck
        if not struck and (second / "state.json").is_file():
            struck = True
            for rank in victim.ranks:
                rank.send(signal.SIGKILL)

    victim.must_tell(strike)
    kept = {f.name: f.read_bytes() for f in second.with_name(f"step-{CHECKPOINT_EVERY:08d}").iterdir()}
    newest = max(victim.run.glob("checkpoints/step-*"))
    file = rng.choice(sorted(newest.iterdir()))
    way = rng.choice([damage.flip_bit, damage.truncate, damage.garbage, damage.empty, damage.missing, damage.pickled])
    way(file, rng)
    yield f"{way.__name__} {newest.name}/{file.name}"
    victim.start()
    victim.must_tell()
    if not any(victim.statuses) and newest.name != f"step-{MAX_STEPS:08d}":
        raise TrialError(f"silent: goes on from {newest.name}, whose {file.name} is damaged")
    if any(victim.statuses) and newest.name not in victim.output():
        raise TrialError(f"{victim.ended()}, and does not name {newest.name}")
    shutil.rmtree(newest)
    victim.start()
    victim.must_end_well()
    before = second.with_name(f"step-{CHECKPOINT_EVERY:08d}")
    if newest.name != before.name and kept != {f.name: f.read_bytes() for f in before.iterdir()}:
        raise TrialError(f"differs: {before.name}, from which it went on")


#: What is tried, by how often.
FAULTS: dict[Fault, float] = {signals: 12, stopped_twice: 3, paused: 1, clock_jumps: 1, two_writers: 1}
FAULTS |= {read_meanwhile: 1, disk_full: 2, read_only: 1, device_fails: 2, damaged_between: 3}


# ---------------------------------------------------------------- trials


def possible_faults() -> Mapping[Fault, float]:
    """All faults, but for those that need a disk of their own where this process may not mount one."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _mount(Path(folder), "-t tmpfs -o size=16k tmpfs")
        except (OSError, subprocess.CalledProcessError):
            print("kills: no right to mount a small disk: disk_full and read_only are left out", flush=True)
            return {fault: often for fault, often in FAULTS.items() if fault not in (disk_full, read_only)}
        subprocess.run(["umount", folder], check=True)
    return FAULTS


@dataclass
class Trials:
    """All trials of one seed, with the runs that they are compared with."""

    seed: int
    folder: Path
    strategies: Sequence[str] = tuple(STRATEGIES)
    faults: Mapping[Fault, float] = field(default_factory=lambda: possible_faults())
    plant: Callable[[], None] = lambda: None
    """Called in every process of a trial before it starts."""
    whole: dict[str, tuple[dict[str, object], Durations]] = field(default_factory=dict)
    """Of each strategy: what the run left alone has, and how long it took."""

    def left_alone(
        self, strategy: str, prepare: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, object], Durations]:
        """The run of a strategy that nothing strikes."""
        if strategy not in self.whole:
            victim = Victim(self.folder / f"whole-{strategy}", strategy, prepare=prepare)
            victim.folder.mkdir(parents=True)
            trained_s, start = 0.0, time.monotonic()

            def look(elapsed: float) -> None:
                nonlocal trained_s
                if not (victim.run / f"checkpoints/step-{MAX_STEPS:08d}").is_dir():
                    trained_s = elapsed

            victim.start()
            victim.must_end_well(look)
            self.whole[strategy] = results(victim.run), Durations(trained_s, time.monotonic() - start)
        return self.whole[strategy]

    def trial(self, number: int) -> tuple[str, str | None]:
        """Trial ``number``: what was done, and what was wrong; None where nothing was."""
        rng = random.Random(f"{self.seed}/{number}")
        strategy = rng.choice(self.strategies)
        fault = rng.choices(list(self.faults), list(self.faults.values()))[0]
        whole, durations = self.left_alone(strategy)
        victim = Victim(self.folder / f"trial-{number}", strategy, prepare=self.plant)
        victim.folder.mkdir(parents=True)
        done, wrong = [], None
        try:
            for words in fault(victim, rng, durations):
                done.append(words)
            victim.finish(whole)
        except TrialError as found:
            wrong = str(found)
        finally:
            if os.path.ismount(victim.run):
                subprocess.run(["umount", "--lazy", str(victim.run)], check=True)
        if wrong is None:
            shutil.rmtree(victim.folder)
        return f"{strategy} {fault.__name__}: {', '.join(done)}", wrong


def run_trials(
    seed: int, numbers: Iterable[int], record: Record | None = None, strategies: Sequence[str] = tuple(STRATEGIES)
) -> Record:
    """Run trials of these numbers, print each and note it. Folders of those that failed stay."""
    import_once(deepspeed=any(strategy.startswith("zero") for strategy in strategies))
    folder, kept = Path(tempfile.mkdtemp(prefix="kills-")), record or Record(seed)
    trials, failed = Trials(seed, folder, strategies), 0
    for number in numbers:
        name, wrong = trials.trial(number)
        failed += wrong is not None
        print(f"kills: seed {seed} trial {number}: {name}: {wrong or 'as if left alone'}", flush=True)
        kept.note(number, name.partition(":")[0], name, [wrong] if wrong else [])
    print(f"kills: {len(kept.done)} trials, {len(kept.findings)} failed" + (f"; see {folder}" if failed else ""))
    if not failed:
        shutil.rmtree(folder)
    return kept


if __name__ == "__main__":
    # python kills.py SEED N STRATEGY...
    devices.preload()
    n, named = int(sys.argv[2]), tuple(sys.argv[3:]) or tuple(STRATEGIES)
    sys.exit(bool(run_trials(int(sys.argv[1]), range(n), strategies=named).findings))

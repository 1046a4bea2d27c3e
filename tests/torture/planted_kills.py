"""Faults that are put into a run on purpose: `kills.py` must find each. Prints what it found.

Started by test_kills.py with the name of one.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import devices
import kills
from forked_ranks import import_once
from planted_inputs import replaced

_PATIENCE_S = 60.0


def _at_step(step: int, act: Callable[[Path], None]) -> None:
    """In a run's process: call ``act`` with the run's folder when it has logged a step."""
    from birthmark.callbacks import loggers

    append = loggers.append_metrics

    def acting(path: Path, at: int, metrics: object) -> None:
        append(path, at, metrics)  # type: ignore[arg-type]
        if at == step:
            act(path.parent)

    loggers.append_metrics = acting


def _stands(run: Path, step: int) -> None:
    """Wait until a checkpoint is there."""
    end = time.monotonic() + _PATIENCE_S
    while not (run / f"checkpoints/step-{step:08d}/state.json").is_file() and time.monotonic() < end:
        time.sleep(0.01)


def _killed_at_6(victim: kills.Victim, rng: random.Random, durations: kills.Durations) -> Iterator[str]:
    """SIGKILL between two checkpoints."""

    def die(run: Path) -> None:
        _stands(run, 4)
        os.kill(os.getpid(), signal.SIGKILL)

    yield from _start(victim, lambda: _at_step(6, die))


def _stopped_twice_at_6(victim: kills.Victim, rng: random.Random, durations: kills.Durations) -> Iterator[str]:
    """Two SIGTERMs between two checkpoints."""

    def stop(run: Path) -> None:
        _stands(run, 4)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    yield from _start(victim, lambda: _at_step(6, stop))
    if not (victim.run / "checkpoints/step-00000007").is_dir():
        raise kills.TrialError("no checkpoint")


def _killed_while_measuring(victim: kills.Victim, rng: random.Random, durations: kills.Durations) -> Iterator[str]:
    """SIGTERM, so that the run stops where a snapshot is due anyway; then SIGKILL while that is taken."""

    def strike() -> None:
        from birthmark.callbacks.snapshot import BiasSnapshot

        measure = BiasSnapshot.on_milestone

        def dying(self: BiasSnapshot, trainer: object, module: object, step: int) -> None:
            if step == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            measure(self, trainer, module, step)  # type: ignore[arg-type]

        BiasSnapshot.on_milestone = dying  # type: ignore[method-assign, assignment]
        _at_step(7, lambda run: os.kill(os.getpid(), signal.SIGTERM))

    yield from _start(victim, strike)


def _killed_at_the_end(victim: kills.Victim, rng: random.Random, durations: kills.Durations) -> Iterator[str]:
    """SIGKILL when training is over and the table of metrics is due."""

    def strike() -> None:
        from birthmark.trainer import run

        run.write_metrics_csv = lambda run: os.kill(os.getpid(), signal.SIGKILL)

    yield from _start(victim, strike)


def _left_alone(victim: kills.Victim, rng: random.Random, durations: kills.Durations) -> Iterator[str]:
    """Nothing strikes."""
    yield from _start(victim, lambda: None)


class _First(random.Random):
    """Draws the first way, the last file, and a small number of bytes."""

    def choice(self, found):  # type: ignore[no-untyped-def]
        return found[-1] if isinstance(found[0], Path) else found[0]

    def uniform(self, a: float, b: float) -> float:
        return 12.0


def _damaged_between(victim: kills.Victim, rng: random.Random, durations: kills.Durations) -> Iterator[str]:
    """A bit of the newest checkpoint's tensors flips between a kill and its resume."""
    victim.prepare = _without_pictures(victim.prepare)
    yield from kills.damaged_between(victim, _First(1), durations)


def _quota_of_4_kib(victim: kills.Victim, rng: random.Random, durations: kills.Durations) -> Iterator[str]:
    """The device takes 4 KiB of the run."""
    victim.prepare = _without_pictures(victim.prepare)
    yield from kills.device_fails(victim, _First(1), durations)


def _without_pictures(plant: Callable[[], None]) -> Callable[[], None]:
    """The same, in a process that draws no report: that takes most of such a run's time."""

    def prepare() -> None:
        from birthmark.report import run_page

        run_page.build_pages = lambda runs, page: page.touch()  # type: ignore[assignment]
        plant()

    return prepare


def _start(victim: kills.Victim, strike: Callable[[], None]) -> Iterator[str]:
    plant = victim.prepare

    def prepare() -> None:
        _without_pictures(plant)()
        strike()

    yield "the first start"
    victim.prepare = prepare
    victim.start()
    victim.must_tell()
    victim.prepare = _without_pictures(plant)


# ---------------------------------------------------------------- plants, called in each process before it starts


def write_fails_unheard() -> None:
    """The second checkpoint cannot be written, and the exception is eaten."""
    from birthmark.trainer.checkpoints import writer

    write, finish = writer._Write._write_part, writer.BackgroundWriter.finish

    def failing(self: writer._Write) -> object:
        if self.step == 8:
            raise OSError(28, "No space left on device")
        return write(self)

    def eaten(self: writer.BackgroundWriter) -> None:
        try:
            finish(self)
        except Exception as error:
            print(f"eaten: {error}")

    writer._Write._write_part = failing  # type: ignore[method-assign, assignment]
    writer.BackgroundWriter.finish = eaten  # type: ignore[method-assign]


def data_begin_anew() -> None:
    """A resumed run is fed from the first step on again."""
    from birthmark.trainer.loop import training_data

    batches = training_data.MicroBatches

    def anew(*arguments: object, **more: object) -> object:
        return batches(*arguments, **(more | {"first_step": 0}))  # type: ignore[arg-type]

    training_data.MicroBatches = anew  # type: ignore[assignment, misc]


def second_signal_is_at_once() -> None:
    """Any second signal ends the run without a checkpoint."""
    from birthmark.callbacks import stop

    handle = stop.StopOnSignal._handle

    def abrupt(self: stop.StopOnSignal, number: int, frame: object) -> None:
        if self._own is not None:
            raise KeyboardInterrupt
        handle(self, number, frame)  # type: ignore[arg-type]

    stop.StopOnSignal._handle = abrupt  # type: ignore[method-assign, assignment]


def rank_hangs() -> None:
    """A process that ends neither by itself nor by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)


#: What is planted, by name.
PLANTS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    # A resumed run does not drop the log's lines of steps that come again.
    "log_repeats_itself": replaced("trainer.run_folder:truncate_metrics", lambda path, last_step: []),
    "write_fails_unheard": write_fails_unheard,
    "data_begin_anew": data_begin_anew,
    "second_signal_is_at_once": second_signal_is_at_once,
    # What a write needed on the way is not taken away.
    "scratch_stays": replaced("files:shutil.rmtree", lambda *arguments, **more: None),
    # Something of ours breaks.
    "internal_error": lambda: _at_step(6, lambda run: len(None)),  # type: ignore[arg-type]
    "rank_hangs": rank_hangs,
    # A checkpoint is taken as it is.
    "verifies_nothing": replaced("trainer.checkpoints.stored_tensors:CheckpointFolder.verify", lambda *_, **more: None),
    # A writer takes the system's error for a fault of ours.
    "says_nothing_of_devices": replaced("files:write_failure", lambda path, error: RuntimeError(error)),
}
#: What strikes the run, by what is planted in it.
_TRIALS: dict[str, list[kills.Fault]] = {name: [_left_alone] for name in PLANTS} | {
    "nothing": [
        *(_killed_at_6, _stopped_twice_at_6, _killed_while_measuring, _killed_at_the_end),
        *(_damaged_between, _quota_of_4_kib),
    ],
    "log_repeats_itself": [_killed_at_6],
    "data_begin_anew": [_killed_at_6],
    "second_signal_is_at_once": [_stopped_twice_at_6],
    "verifies_nothing": [_damaged_between],
    "says_nothing_of_devices": [_quota_of_4_kib],
}


def main() -> None:
    """Try all plants against one run that was left alone."""
    devices.preload()
    import_once(deepspeed=False)
    with tempfile.TemporaryDirectory() as folder:
        trials = kills.Trials(0, Path(folder), ["single"])
        trials.left_alone("single", prepare=_without_pictures(PLANTS["nothing"]))
        for number, (name, fault) in enumerate((plant, fault) for plant in PLANTS for fault in _TRIALS[plant]):
            trials.plant, trials.faults = PLANTS[name], {fault: 1.0}
            # Only what hangs comes near the limit.
            kills.LIMIT_S = 10.0 if name == "rank_hangs" else 240.0
            print(f"{name} {fault.__name__}: {trials.trial(number)[1]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""What is left of something long, and the lines that say so where there is no terminal."""

import io

import pytest
from rich.console import Console

from birthmark import time_left
from birthmark.measure.records import RunDir
from birthmark.report import terminal
from birthmark.time_left import Pace, duration
from birthmark.trainer.run import pretrain


@pytest.fixture
def clock(monkeypatch):
    """``clock(seconds)``: time that passes."""
    now = [1000.0]
    monkeypatch.setattr(time_left.time, "monotonic", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_what_is_left_follows_from_what_is_done_since_the_start(clock):
    going_on = Pace(100, done=40)
    assert going_on.seconds_left(40) is None
    clock(10)
    assert going_on.seconds_left(45) == pytest.approx(110)  # 2 s each, 55 to do
    clock(10)
    assert going_on.seconds_left(100) == going_on.seconds_left(120) == 0


def test_a_line_is_due_by_time_and_not_after_another(clock):
    lines = Pace(10)
    clock(time_left.LINES_S - 1)
    assert not lines.is_due()
    clock(1)
    assert (lines.is_due(), lines.is_due()) == (True, False)
    clock(time_left.LINES_S - 1)
    lines.said()
    clock(1)
    assert not lines.is_due()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (89, "89 s"), (91, "2 min"), (3600, "1 h 0 min"), (12000, "3 h 20 min"), (200000, "2 days 7 h")],
)
def test_times_in_words(seconds, words):
    assert duration(seconds) == words


def test_a_bar_is_lines_on_standard_error_without_a_terminal_and_nothing_where_json_is_asked_for(clock, capsys):
    for quiet in (False, True):
        with terminal.bar("births", 4, quiet=quiet) as advance:
            for _ in range(4):
                clock(20)
                advance(1)
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines() == ([] if quiet else ["births: 2 of 4, about 40 s left"])


def test_a_bar_names_the_work_behind_the_last(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(terminal, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=100))
    with terminal.bar("checkpoints", 2, quiet=False, then="judging") as advance:
        advance(1)
        before = screen.getvalue()
        advance(1)
    assert "judging" not in before
    assert "judging" in screen.getvalue()


def test_a_run_without_a_terminal_says_now_and_then_what_is_left(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(time_left, "LINES_S", 0.0)
    said = {}
    for is_terminal in (False, True):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, color_system=None, width=200)
        pretrain(
            tiny({"trainer.max_steps": 5, "trainer.checkpoint_every": 4}),
            RunDir(tmp_path / str(is_terminal)),
            console=console,
        )
        said[is_terminal] = [line for line in console.file.getvalue().splitlines() if " of 5  loss" in line]
    assert [line.split()[1] for line in said[False]] == ["2", "3"]  # 1 compiles; 4 and 5 are milestones
    assert all(line.endswith(" left") for line in said[False])
    assert said[True] == []

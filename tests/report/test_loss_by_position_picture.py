"""The picture of losses by position says which model a panel is of, and shows each arm's own losses."""

import numpy as np

from birthmark.measure.loss_by_position import Arm, LengthResult
from birthmark.report.pictures.single_commands import draw_loss_by_position


def test_titles_end_with_what_differs():
    names = [f"runs/of_the_study_of_long_sequences/{arm}/seed-0/checkpoints/final" for arm in ("plain", "headnorm")]
    losses_NT = np.linspace(1, 2, 3 * 32).reshape(3, 32)
    found = [LengthResult(name, 8, None, [Arm(0, losses_NT), Arm(1, losses_NT + i)]) for i, name in enumerate(names)]
    titles = [axes.get_title(loc="left") for axes in draw_loss_by_position(found).axes]
    # Of 30 and 33 characters the last 27.
    assert titles == ["…in/seed-0/checkpoints/final", "…rm/seed-0/checkpoints/final"]
    short = draw_loss_by_position([LengthResult("runs/plain", 8, None, found[0].arms)])
    assert [axes.get_title(loc="left") for axes in short.axes] == ["plain"]


def test_a_point_is_the_mean_over_its_positions():
    losses_NT = np.arange(2 * 400, dtype=float).reshape(2, 400)
    result = LengthResult("model", 100, None, [Arm(0, losses_NT), Arm(4, losses_NT + 1)])
    (axes,) = draw_loss_by_position([result]).axes
    # Drawn on the way: the end of the prefix, then four keys gone, then every key on top.
    _, gone, every = axes.lines
    np.testing.assert_allclose(gone.get_ydata(), every.get_ydata() + 1)
    # Losses that rise by 1 a position: a mean over consecutive ones is the loss at their middle.
    np.testing.assert_allclose(every.get_ydata(), losses_NT.mean(0)[0] + every.get_xdata() - 1)

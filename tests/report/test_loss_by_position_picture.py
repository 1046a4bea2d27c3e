"""The picture of losses by position says which model a panel is of, and shows each arm's own losses."""

import numpy as np

from birthmark.measure.loss_by_position import Arm, LengthResult
from birthmark.report.pictures.single_commands import length_panel, write_length


def test_titles_end_with_what_differs(tmp_path):
    names = [f"runs/of_the_study_of_long_sequences/{arm}/seed-0/checkpoints/final" for arm in ("plain", "headnorm")]
    losses_NT = np.linspace(1, 2, 3 * 32).reshape(3, 32)
    found = [LengthResult(name, 8, None, [Arm(0, losses_NT), Arm(1, losses_NT + i)]) for i, name in enumerate(names)]
    titles = dict.fromkeys(series.facet for series in length_panel(found).series)
    # Of 30 and 33 characters the last 27.
    assert list(titles) == ["…in/seed-0/checkpoints/final", "…rm/seed-0/checkpoints/final"]
    short = length_panel([LengthResult("runs/plain", 8, None, found[0].arms)])
    assert {series.facet for series in short.series} == {"plain"}
    write_length(found, tmp_path / "length.png")
    assert (tmp_path / "length.png").read_bytes().startswith(b"\x89PNG")


def test_a_point_is_the_mean_over_its_positions():
    losses_NT = np.arange(2 * 400, dtype=float).reshape(2, 400)
    result = LengthResult("model", 100, None, [Arm(0, losses_NT), Arm(4, losses_NT + 1)])
    # In this order: the end of the prefix, then four keys gone, then every key on top.
    border, gone, every = length_panel([result]).series
    assert border.axes["position"] == [99.5, 99.5]
    np.testing.assert_allclose(gone.values, every.values + 1)
    # Losses that rise by 1 a position: a mean over consecutive ones is the loss at their middle.
    np.testing.assert_allclose(every.values, losses_NT.mean(0)[0] + np.array(every.axes["position"]))
    # A prefix-LM predicts nothing within its prefix.
    losses_NT[:, :2] = np.nan
    border, _ = length_panel([LengthResult("model", 100, None, [Arm(0, losses_NT)])]).series
    np.testing.assert_allclose(border.values, [202, 599])

"""A study of seeds: its file, the analysis of variance against slow formulas, and results of runs on disk."""

import csv
import dataclasses
from itertools import product

import numpy as np
import pytest
import yaml
from scipy import stats

from birthmark.errors import UsageError
from birthmark.launch.cli import main
from birthmark.measure.metrics_log import append_metrics
from birthmark.research.seeds.results import (
    mean_squares,
    read_seeds_results,
    read_seeds_study,
    seeds_trials,
    variance_shares,
)
from birthmark.research.seeds.run import outcome, seeds_figure, table_of


@pytest.fixture
def write(tiny, tmp_path):
    """``write(**fields)``: a study's file, its base beside it."""
    base = dataclasses.asdict(tiny())
    del base["name"], base["run_dir"]
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))

    def write(**fields):
        file = tmp_path / "seeds.yaml"
        file.write_text(yaml.safe_dump({"kind": "birthmark.research.seeds.run:SEEDS", "base": "base.yaml", **fields}))
        return file

    return write


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_birth_is_crossed_with_every_order_of_the_data(write, tmp_path):
    study = read_seeds_study(write(init_seeds=2, data_seeds=[7, 3, 5], scales={"big": {"init_seeds": [4, 9]}}))
    assert (study.init_seeds, study.data_seeds) == ((0, 1), (7, 3, 5))
    assert (study.at("big").init_seeds, study.at("big").data_seeds) == ((4, 9), (7, 3, 5))
    trials = seeds_trials(study, tmp_path / "out")
    found = [(t.config.init_seed, t.config.data.data_seed, t.label) for t in trials]
    assert found == [(i, d, f"data-{d}/seed-{i}") for i, d in product((0, 1), (7, 3, 5))]
    # Nothing else differs.
    like_first = {
        repr(dataclasses.replace(
            t.config, init_seed=0, name="", run_dir="", log=trials[0].config.log,
            data=dataclasses.replace(t.config.data, data_seed=0),
        ))
        for t in trials
    }  # fmt: skip
    assert len(like_first) == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"init_seeds": 1}, "init_seeds is 1: give at least 2"),
        ({"data_seeds": [3]}, "data_seeds is [3]: give at least 2"),
        ({"data_seeds": 0}, "data_seeds is 0: give a list"),
        ({"data_seeds": "four"}, "data_seeds is 'four': give a list"),
        ({"data_seed": 4}, "data_seed: no such field; did you mean data_seeds?"),
        ({"scales": {"big": {"init_seeds": 1}}}, "scales.big.init_seeds is 1: give at least 2"),
        ({"base": "no.yaml"}, "base is 'no.yaml': no file"),
    ],
)
def test_a_wrong_file_names_the_field(write, fields, expected):
    file = write(**fields)
    with pytest.raises(UsageError) as error:
        read_seeds_study(file)
    assert str(error.value).startswith(f"{file}: {expected}")


def test_what_no_study_of_seeds_has_is_one_line(write, tmp_path, capsys):
    file = write()
    for arguments, expected in (
        (["--arms=a"], "a study of seeds has none"),
        (["--set", "data.data_seed=3"], "--set data.data_seed: the study sets it"),
        (["--summary"], "no finished run of"),
    ):
        assert main(["ablate", str(file), f"--out={tmp_path / 'out'}", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line


# ── the variance ─────────────────────────────────────────────────────────────────────────────────────────────────────


def simulated(rng, n, m, init, data, rest):
    """A table of these variances, off zero as losses are."""
    return 3.0 + rng.normal(0, init**0.5, (n, 1)) + rng.normal(0, data**0.5, (1, m)) + rng.normal(0, rest**0.5, (n, m))


def residual_squares(values, *factors):
    """Sum of squares that a least-squares fit of these factors leaves."""
    n, m = values.shape
    rows = []
    for i, j in product(range(n), range(m)):
        row = [1.0]
        row += [float(i == k) for k in range(n)] if "init" in factors else []
        row += [float(j == k) for k in range(m)] if "data" in factors else []
        rows.append(row)
    design, y = np.array(rows), values.ravel()
    return float(((y - design @ np.linalg.lstsq(design, y, rcond=None)[0]) ** 2).sum())


def test_mean_squares_are_those_of_fits_one_factor_at_a_time():
    values = simulated(np.random.default_rng(0), 4, 3, 1.0, 0.5, 0.2)
    found = mean_squares(values)
    both = residual_squares(values, "init", "data")
    assert found.init == pytest.approx((residual_squares(values, "data") - both) / 3, rel=1e-9)
    assert found.data == pytest.approx((residual_squares(values, "init") - both) / 2, rel=1e-9)
    assert found.rest == pytest.approx(both / 6, rel=1e-9)
    # One factor alone, as scipy has it.
    alone = stats.f_oneway(*values)
    within = residual_squares(values, "init") / 8
    assert found.init / within == pytest.approx(alone.statistic, rel=1e-9)
    for bad in (values[:1], values[:, :1], np.where(values > 3, np.nan, values)):
        with pytest.raises(ValueError, match="needs two of each"):
            mean_squares(bad)


def test_shares_are_the_moments_and_p_is_the_f_test():
    values = simulated(np.random.default_rng(1), 5, 4, 1.0, 0.5, 0.2)
    squares, found = mean_squares(values), variance_shares(values)
    init, data = (squares.init - squares.rest) / 4, (squares.data - squares.rest) / 5
    total = init + data + squares.rest
    assert [s.value for s in found[:3]] == pytest.approx([init / total, data / total, squares.rest / total])
    assert sum(s.value for s in found[:3]) == pytest.approx(1)
    assert found.p_init == pytest.approx(stats.f.sf(squares.init / squares.rest, 4, 12))
    assert found.p_data == pytest.approx(stats.f.sf(squares.data / squares.rest, 3, 12))
    # Rows for columns: the seeds change places; units and zero do not count.
    turned, scaled = variance_shares(values.T), variance_shares(1e3 * values - 7)
    assert turned.init.value == pytest.approx(found.data.value)
    assert [x for s in scaled[:3] for x in s] == pytest.approx([x for s in found[:3] for x in s], abs=1e-9)
    assert variance_shares(np.full((3, 3), 0.1) + np.zeros((3, 3))) is None
    # One favourite of ten stays in one birth, whatever the data: means round, and rounding has no effect.
    found = variance_shares(np.repeat([[0.0], [0.1], [0.0], [0.0]], 4, axis=1))
    assert [s.value for s in found[:3]] == [1, 0, 0]
    assert (found.p_init, found.p_data) == (0, 1)


def test_the_interval_of_a_ratio_is_the_exact_one():
    """Without the data's part a share is a function of init / rest, whose interval by the F distribution is exact."""
    rng = np.random.default_rng(2)
    values = simulated(rng, 6, 5, 1.0, 0.0, 0.3)
    # Columns of one mean: no effect of the data at all, so that its pivot stays near 0.
    values = values - values.mean(0, keepdims=True) + values.mean()
    squares = mean_squares(values)
    found = variance_shares(values, draws=200_000)
    ratio = squares.init / squares.rest
    low, high = ((ratio / stats.f.ppf(q, 5, 20) - 1) / 5 for q in (0.975, 0.025))
    assert found.init.low == pytest.approx(low / (1 + low), abs=0.01)
    assert found.init.high == pytest.approx(high / (1 + high), abs=0.01)


def test_intervals_cover_the_shares_as_often_as_they_say():
    rng, n_sets = np.random.default_rng(3), 300
    for truth in ((0.6, 0.3, 0.1), (0.1, 0.2, 0.7), (0.0, 0.5, 0.5)):
        inside = np.zeros(3)
        for _ in range(n_sets):
            found = variance_shares(simulated(rng, 4, 4, *truth), draws=1000)
            inside += [share.low <= t <= share.high for share, t in zip(found[:3], truth, strict=True)]
        # 95 % less three standard errors; the intervals are known to be a little wide.
        assert (inside / n_sets > 0.95 - 3 * (0.95 * 0.05 / n_sets) ** 0.5).all(), (truth, inside / n_sets)


# ── the results ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_figures_are_read_from_the_ends_of_finished_runs(write, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("birthmark.research.seeds.run.draw_seeds", lambda study, results, out: [])
    file = write(init_seeds=3, data_seeds=2)
    study = read_seeds_study(file)
    trials = seeds_trials(study, tmp_path / "out")
    values = simulated(np.random.default_rng(4), 3, 2, 1.0, 1.0, 0.01)
    monkeypatch.setattr("birthmark.study.trials.Trial.finished", property(lambda self: self.run.metrics.is_file()))
    monkeypatch.setattr("birthmark.research.seeds.run.run_as_asked", lambda *_: [])
    for trial, value in zip(trials[:-1], values.ravel(), strict=False):
        trial.run.path.mkdir(parents=True)
        append_metrics(trial.run.metrics, 6, {"val/loss": float(value)})
    (result,) = read_seeds_results(study, trials)
    assert (result.name, result.n_runs, result.shares) == ("val_loss", 5, None)
    assert "1 runs are not finished" in outcome([result])[0]
    assert table_of([result]).rows[0][3:] == ["–"] * 5
    trials[-1].run.path.mkdir(parents=True)
    append_metrics(trials[-1].run.metrics, 6, {"val/loss": float(values[-1, -1])})
    assert main(["ablate", str(file), f"--out={tmp_path / 'out'}"]) == 0
    (result,) = read_seeds_results(study, trials)
    np.testing.assert_array_equal(result.values_NM, values)
    rows = list(csv.DictReader((tmp_path / "out" / "table.csv").open()))
    assert [(int(r["init_seed"]), int(r["data_seed"]), float(r["val_loss"])) for r in rows] == [
        (i, d, values[i, d]) for i, d in product(range(3), range(2))
    ]
    loss, share = f"{values.mean():.3g} ± {values.std(ddof=1):.3g}", f"{100 * result.shares.init.value:.0f}"
    assert f"| final loss | 6/6 | {loss} | {share} (" in (tmp_path / "out" / "table.md").read_text()
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Whose doing is the variance?" in page
    assert f"{values[2, 1]:.4g}" in page
    figure = seeds_figure(study, [result])
    assert [axes.get_title(loc="left") for axes in figure.axes[:1]] == ["final loss"]

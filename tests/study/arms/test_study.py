"""A study of arms: its file, what is refused before any run, and the results of runs on disk."""

import csv
import dataclasses
import shutil
from functools import partial

import numpy as np
import pytest
import yaml

from birthmark.errors import RunError, UsageError
from birthmark.files import write_json, write_text
from birthmark.launch.cli import main
from birthmark.measure.metrics_log import append_metrics
from birthmark.measure.records import Snapshot
from birthmark.metrics.quantity import Quantity
from birthmark.study.arms.figure import families, study_figure
from birthmark.study.arms.page import arms_page, markdown, notes, table_of, write_csv
from birthmark.study.arms.page import outcome as outcome_of
from birthmark.study.arms.results import ARRAYS, read_results, spread
from birthmark.study.arms.trials import arm_trials, read_arm_study
from birthmark.study.trials import check_stored, next_move
from birthmark.trainer.saved_config import write_config


@pytest.fixture
def write(study_file, tmp_path):
    """`study_file` in the test's own folder."""
    return partial(study_file, tmp_path)


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────

BAD = {
    "no arms": ({"arms": None}, "arms is missing"),
    "no base": ({"base": None}, "base is missing"),
    "an empty list of arms": ({"arms": {}}, "arms is {}: name at least one"),
    "a base that is not there": ({"base": "no.yaml"}, "base is 'no.yaml': no file"),
    "a misspelt field": ({"init_seed": [0]}, "init_seed: no such field; did you mean init_seeds?"),
    "a seed that is a word": ({"init_seeds": ["one"]}, "init_seeds is ['one']: give a list of different whole"),
    "a seed twice": ({"init_seeds": [1, 1]}, "init_seeds is [1, 1]"),
    "no seeds": ({"init_seeds": []}, "init_seeds is []"),
    "a negative seed": ({"init_seeds": [-1]}, "init_seeds is [-1]"),
    "an arm that is no group": ({"arms": {"plain": 3}}, "arms.plain is 3: write fields"),
    "a name that is no folder": ({"arms": {"../plain": {}}}, "a name in arms is '../plain'"),
    "a name that is a number": ({"arms": {1: {}}}, "a name in arms is 1"),
    "nested fields": ({"arms": {"a": {"model": {"d_model": 8}}}}, "arms.a.model is {'d_model': 8}: write one dotted"),
    "a seed in an arm": ({"arms": {"a": {"init_seed": 3}}}, "arms.a.init_seed is 3: the study sets it"),
    "a family of strangers": ({"families": {"f": ["plan"]}}, "families.f is 'plan': no such arm"),
    "a family of objects": ({"families": {"f": [{"a": 1}]}}, "families.f is {'a': 1}: no such arm"),
    "an unknown field of a scale": ({"scales": {"big": {"bose": "x"}}}, "scales.big.bose: no such field; did you mean"),
    "a base of a scale": ({"scales": {"big": {"base": "x"}}}, "scales.big.base is 'x': no file"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_study_names_file_and_field(case, write):
    fields, expected = BAD[case]
    file = write(**fields)
    with pytest.raises(UsageError) as error:
        read_arm_study(file)
    assert str(error.value).startswith(f"{file}: {expected}")
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_study_says_so(tmp_path):
    file = tmp_path / "study.yaml"
    cases = {"[1]": r"the file is \[1\]", "{": "not YAML", "": "the file is null"}
    for text, expected in (cases | {"arms: {a: {}, a: {}}": r"a stands twice \(line 1 and below\)"}).items():
        file.write_text(text)
        with pytest.raises(UsageError, match=rf"study\.yaml.*{expected}"):
            read_arm_study(file)


def test_a_scale_is_another_base_for_the_same_arms(write, tmp_path):
    file = write(scales={"big": {"base": "big.yaml", "init_seeds": [7]}, "same": {}})
    (tmp_path / "big.yaml").write_text((tmp_path / "base.yaml").read_text().replace("d_model: 16", "d_model: 32"))
    study = read_arm_study(file)
    big, same = study.at("big"), study.at("same")
    assert (big.name, big.init_seeds, big.arms) == ("tiny-big", (7,), study.arms)
    assert (same.base, same.init_seeds) == (study.base, (0, 1))
    assert {trial.config.model.d_model for trial in arm_trials(big, tmp_path)} == {32}
    with pytest.raises(UsageError, match=r"--scale huge: .* has big, same"):
        study.at("huge")


def test_arms_are_chosen_by_name_in_the_order_of_the_file(write):
    study = read_arm_study(write())
    assert list(study.only(["headnorm", "plain"]).arms) == ["plain", "headnorm"]
    with pytest.raises(UsageError, match="--arms headnrom: no such arm; did you mean headnorm"):
        study.only(["headnrom"])


def outcome(capsys, *arguments):
    """Exit status and the lines on standard error."""
    status = main(list(arguments))
    return status, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model.attention.agregation": "plain"}, "did you mean model.attention.aggregation"),
        ({"model.n_heads": 3}, "model.d_model 16 is not divisible by model.n_heads 3"),
        ({"model.attention.aggregation": "magic"}, "model.attention.aggregation is 'magic': give plain"),
        ({"trainer.max_steps": "many"}, "trainer.max_steps: 'many' is not a whole number"),
        ({"trainer.max_steps": None}, "trainer.max_steps is null: give a value"),
    ],
)
def test_an_impossible_arm_is_refused_before_any_run(fields, expected, write, arms, tmp_path, capsys):
    file = write(arms=arms | {"odd": fields})
    status, lines = outcome(capsys, "ablate", str(file), f"--out={tmp_path / 'out'}")
    assert (status, len(lines)) == (2, 1)
    assert f"{file}: arms.odd: " in lines[0]
    assert expected in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--jobs=0"], "--jobs 0: give at least 1"),
        (["--scale=big"], "--scale big"),
        (["--arms=plian"], "did you mean plain"),
        (["--summary"], "no run of"),
        (["--set", "trainer.max_steps"], "write FIELD=VALUE"),
        (["--set", "init_seed=3"], "--set init_seed=3: the study sets it for every run, leave it out"),
        (["--set", "config=x.yaml"], "--set config=x.yaml: config: no such field"),
        (["--set", "model=3"], "model is '3'; write fields"),
        (["--set", "trainer.max_stepz=3"], "--set trainer.max_stepz=3: trainer.max_stepz: no such field; did you mean"),
    ],
)
def test_a_wrong_request_is_one_line_and_status_2(arguments, expected, write, tmp_path, capsys):
    status, lines = outcome(capsys, "ablate", str(write()), f"--out={tmp_path / 'out'}", *arguments)
    assert (status, len(lines)) == (2, 1)
    assert expected in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_study_of_the_package_is_found_by_name(tmp_path, capsys):
    status, lines = outcome(capsys, "ablate", "sinks", "--arms=plian", f"--out={tmp_path / 'out'}")
    assert status == 2
    assert "did you mean plain" in lines[0]
    status, lines = outcome(capsys, "ablate", "sinkz")
    assert (status, len(lines)) == (2, 1)
    assert "did you mean studies/sinks?" in lines[0]


def test_arms_of_one_config_share_their_runs_and_the_arm_wins_over_set(write, tmp_path):
    arms = {"plain": {}, "short": {"trainer.max_steps": 2}, "said": {"model.positions": "rope"}}
    study = read_arm_study(write(arms=arms))
    trials = arm_trials(study, tmp_path, {"trainer.max_steps": 4})
    assert [trial.label for trial in trials[:3]] == ["plain/seed-0", "short/seed-0", "plain/seed-0"]
    assert [trial.config.trainer.max_steps for trial in trials[:3]] == [4, 2, 4]
    assert [trial.seed for trial in trials] == [0, 0, 0, 1, 1, 1]
    assert [trial.config.name for trial in trials[:3]] == ["tiny-plain-0", "tiny-short-0", "tiny-said-0"]
    assert {trial.config.run_dir for trial in trials} == {
        str(tmp_path / arm / seed) for arm in ("plain", "short") for seed in ("seed-0", "seed-1")
    }


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def planned(write, tmp_path, **fields):
    study = read_arm_study(write(**fields))
    return study, arm_trials(study, tmp_path / "out")


def write_run(trial, steps=(0, 3, 6), *, checkpoint=True, sink=0.5, text=True, variance=(), normalised=None):
    """A run on disk as far as a study reads it."""
    run = trial.run
    write_text(run.config, yaml.safe_dump(dataclasses.asdict(trial.config)))
    write_json(run.birth, {"digest": "0" * 64, "init_seed": 0, "n_params": 1})
    for step in steps:
        bias = {"sink_mass": sink / 2, "sink_mass_max": sink, "sink_uniform": 0.1}
        summary = {"step": step, "bias": bias}
        if text:
            extra = {} if normalised is None else {"sink_mass_normalised": normalised}
            summary["bias_text"] = {"sink_mass": sink, "sink_mass_max": sink} | extra
        arrays = {name: np.array(variance) + step for name in ARRAYS if len(variance)}
        Snapshot(summary, arrays).write(run.snapshot(step))
        append_metrics(run.metrics, step, {"val/loss": 3.0 - step / 10})
    if checkpoint:
        run.checkpoint(steps[-1]).mkdir(parents=True)


def test_what_is_missing_is_a_dash_and_never_zero(write, tmp_path):
    study, trials = planned(write, tmp_path)
    for trial in trials:
        write_run(trial, text=False)
    results = read_results(study, trials)
    lines = markdown(study, results).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == [
        "plain", "2/2", "6", "–", "–", "0.250 ± 0.000 (0.250–0.250)", "2.400 ± 0.000 (2.400–2.400)", "–", "–",
    ]  # fmt: skip
    write_csv(results, tmp_path / "table.csv")
    row = next(csv.DictReader((tmp_path / "table.csv").open()))
    assert (row["sink_mass_mean"], row["sink_mass_n"], row["trigger_loss_mean"]) == ("", "0", "")
    # The picture has sinks on random tokens where none were measured on text, and the loss that there is.
    sinks, losses, _ = study_figure(study, results).subfigs[1].axes
    assert [label.get_text() for label in sinks.get_yticklabels()] == [result.arm for result in results]
    assert (points(sinks), points(losses)) == ([0.25, 0.25], [2.4, 2.4])
    task = spread([1.5])
    results[1] = dataclasses.replace(results[1], figures=results[1].figures | {"trigger_loss": task})
    losses = study_figure(study, results).subfigs[1].axes[1]
    assert (points(losses), [(text.get_position()[1], text.get_text()) for text in losses.texts]) == ([1.5], [(0, "–")])


def points(axes):
    """What the markers of a panel stand at."""
    return [pytest.approx(line.get_xdata()[0]) for line in axes.lines if line.get_marker() != "None"]


def test_a_sink_at_another_key_has_columns_and_one_at_the_first_has_none(write, tmp_path):
    study, trials = planned(write, tmp_path)
    for trial in trials:
        write_run(trial)
    results = read_results(study, trials)
    assert "sink at key" not in markdown(study, results)
    for trial in trials[:2]:  # both arms, one seed
        end = Snapshot.read(trial.run.snapshot(6))
        importance = np.full((2, 2, 12), 0.1)
        # Two heads of four; the last keys have few queries, and do not count.
        importance[0, :, 4], importance[..., 11] = 0.9, 1.0
        Snapshot(end.summary, {**end.arrays, "text.importance": importance}).write(trial.run.snapshot(6))
    result = read_results(study, trials)[0]
    assert result.figures["sink_key"] == spread([4])
    assert result.figures["sink_key_importance"].mean == pytest.approx(0.5)
    titles, cells = (line.split("|") for line in markdown(study, [result]).splitlines()[:3:2])
    assert dict(zip(map(str.strip, titles), map(str.strip, cells), strict=True))["sink at key"] == "4, 1 of 2"


def test_variance_has_a_figure_per_block_at_birth_and_at_the_end(write, tmp_path):
    study, trials = planned(write, tmp_path, init_seeds=[0])
    for trial in trials:
        write_run(trial, variance=(100.0, 2.0), normalised=0.25)
    result = read_results(study, trials)[0]
    assert [layer.mean for layer in result.layers("birth")] == [100, 2]
    assert [layer.mean for layer in result.layers("end")] == [106, 8]
    assert result.figures["variance_discrepancy_end.2"].mean == 8
    # Where rows do not sum to 1, the picture shows shares of their sums.
    assert result.sink.mean == 0.25
    text = markdown(study, [result])
    assert "| 100, 2 | 106, 8 |" in text
    assert "sink mass (share of the row)" in text.splitlines()[0]
    study_figure(study, [result])


def test_outliers_have_columns_where_they_were_measured_and_the_time_of_a_step_is_on_the_page_alone(write, tmp_path):
    study, trials = planned(write, tmp_path)
    for trial in trials:
        write_run(trial)
    plain = read_results(study, trials)
    assert not {"largest_value", "kurtosis"} & {column.key for column in table_of(study, plain).columns}
    assert "∞-norm" not in notes(study, plain)
    assert plain[0].step_s.n == 0
    for seed, trial in enumerate(trial for trial in trials if trial.arm == plain[0].arm):
        end = Snapshot.read(trial.run.snapshot(6))
        end.summary["bias_text"] |= {"residual_inf_norm": 1500.0 + seed, "residual_kurtosis": 4.0 + seed}
        shutil.rmtree(trial.run.snapshot(6))
        end.write(trial.run.snapshot(6))
        for step, seconds in ((2, 9.0), (4, 0.02), (5, 0.01 + 0.02 * seed)):
            append_metrics(trial.run.metrics, step, {"train/step_p50_s": seconds})
    results = read_results(study, trials)
    table = table_of(study, results)
    titles = [column.line for column in table.columns]
    cells = dict(zip(titles, table.rows[0], strict=True))
    assert cells["∞-norm, residual stream"] == "1,500 ± 0.71 (1,500–1,501)"
    assert cells["kurtosis, residual stream"] == "4.50 ± 0.71 (4.00–5.00)"
    assert results[0].step_s == spread([0.02, 0.03])
    assert "step" not in "".join(titles[3:])
    assert "∞-norm" in notes(study, results)
    page = arms_page(study, results, trials, tmp_path / "out")
    assert "25 (20–30)" in page
    assert "ms a step" in page


def test_a_metric_of_the_user_is_a_column_like_any_other(write, tmp_path):
    study, trials = planned(write, tmp_path)
    declared = Quantity("spikes", label="spikes", definition="Number of spikes.").to_json()
    for number, trial in enumerate(trials):
        write_run(trial)
        for folder in trial.run.snapshot_folders():
            snapshot = Snapshot.read(folder)
            snapshot.summary["quantities"] = [declared]
            snapshot.summary["bias"]["spikes"] = 7.0 + number
            snapshot.write(folder)
    results = read_results(study, trials)
    table = table_of(study, results)
    titles = [column.line for column in table.columns]
    assert titles.count("spikes") == 1
    assert table.rows[0][titles.index("spikes")] == "8.000 ± 1.414 (7.000–9.000)"
    write_csv(results, tmp_path / "table.csv")
    assert "spikes_mean" in (tmp_path / "table.csv").read_text().splitlines()[0]


def test_unfinished_runs_stand_back_behind_finished_ones(write, tmp_path):
    study, trials = planned(write, tmp_path)
    by_label = {trial.label: trial for trial in trials}
    write_run(by_label["plain/seed-0"], (0, 3), sink=0.2)
    write_run(by_label["plain/seed-1"], (0, 3, 6), checkpoint=False, sink=0.4)
    for trial in by_label.values():
        if trial.started:  # lines of training behind the last snapshot that both have
            append_metrics(trial.run.metrics, 5, {"train/loss": 2.6})
    (plain,) = read_results(study, trials)
    assert (plain.n_runs, plain.step, plain.is_finished) == (2, 3, False)
    assert plain.sink.mean == pytest.approx(0.3)
    assert plain.figures["val_loss"].mean == pytest.approx(2.7)
    # Without the corpus' entropy a loss is compared with that of birth.
    assert plain.figures["val_loss_birth"] == spread([3.0, 3.0])
    assert plain.learned("val_loss")
    by_label["plain/seed-1"].run.checkpoint(6).mkdir(parents=True)
    (plain,) = read_results(study, trials)
    assert (plain.n_runs, plain.step, plain.sink.mean, plain.is_finished) == (1, 6, 0.4, True)


def test_an_arm_whose_documents_see_themselves_alone_is_judged_by_their_first_tokens(write, tmp_path):
    study, trials = planned(write, tmp_path, init_seeds=[0])
    for trial in trials:
        write_run(trial, sink=0.01)
    apart = trials[0].run
    for step in (0, 3, 6):
        snapshot = Snapshot.read(apart.snapshot(step))
        snapshot.summary["model"] = {"attention": {"documents": True}}
        snapshot.summary["bias_text"] |= {"document_sink_mass": 0.1 * step, "document_sink_uniform": 0.15}
        Snapshot(snapshot.summary, snapshot.arrays).write(apart.snapshot(step))
    results = read_results(study, trials)
    assert [(r.sink.mean, r.uniform, r.of_documents) for r in results] == [
        (pytest.approx(0.6), 0.15, True),
        (0.01, 0.1, False),
    ]
    np.testing.assert_allclose(results[0].sinks, [[0, 0.3, 0.6]])
    said = outcome_of(study, results)
    assert said[0] == f"With a sink in every seed: {results[0].arm}."
    assert "on the first position (of a document where documents see themselves alone) at the end" in said[-1]
    assert "(uniform attention: 0.100; on a document's first token 0.150)" in notes(study, results)
    assert "(uniform attention: on a document's first token 0.150)" in notes(study, results[:1])
    assert "document_sink_mass_normalised" not in [column.key for column in table_of(study, results).columns]
    # Where rows do not sum to 1, the judged share stands in the table.
    snapshot = Snapshot.read(apart.snapshot(6))
    snapshot.summary["bias_text"]["document_sink_mass_normalised"] = 0.25
    Snapshot(snapshot.summary, snapshot.arrays).write(apart.snapshot(6))
    raw, *_ = read_results(study, trials)
    assert raw.sink.mean == raw.figures["document_sink_mass_normalised"].mean == 0.25
    assert "document_sink_mass_normalised" in [column.key for column in table_of(study, [raw]).columns]
    # The figure has the level of each kind.
    sinks = study_figure(study, results).subfigs[1].axes[0]
    levels = {line.get_xdata()[0] for line in sinks.lines if len(line.get_xdata()) == 2}
    assert {0.1, 0.15} <= levels


def test_the_next_move_of_a_run(write, tmp_path):
    _, trials = planned(write, tmp_path)
    new, born, done, odd = trials[:4]
    assert next_move(new) == "start"
    # A run that died before its birth was certain left its config.
    write_config(new.config, new.run.config)
    (new.run.path / ".lock").touch()
    check_stored(new)
    assert next_move(new) == "start"
    write_run(born, (0,), checkpoint=False)
    write_run(done)
    assert (next_move(born), next_move(done)) == ("resume", "skip")
    born.run.birth.write_text("{")
    with pytest.raises(RunError, match=r"birth\.json"):
        next_move(born)
    odd.run.path.mkdir(parents=True)
    (odd.run.path / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"seed-1: holds thesis.tex, but no birth.json"):
        check_stored(odd)


def test_a_field_that_came_later_has_its_default_in_an_older_run(write, tmp_path):
    _, (trial, *_) = planned(write, tmp_path)
    write_run(trial)
    stored = yaml.safe_load(trial.run.config.read_text())
    del stored["model"]["attention"]["window"], stored["optim"]["eps"]
    write_text(trial.run.config, yaml.safe_dump(stored))
    check_stored(trial)
    stored["model"]["attention"]["window"] = 4
    write_text(trial.run.config, yaml.safe_dump(stored))
    with pytest.raises(UsageError, match=r"model.attention.window 4 there, None here"):
        check_stored(trial)


def test_seeds_and_arms_fall_together_where_they_are_logged(write, tmp_path):
    _, trials = planned(write, tmp_path)
    groups = {trial.config.log.group for trial in trials if trial.arm == "plain"}
    assert groups == {trial.config.name.removesuffix(f"-{trial.seed}") for trial in trials if trial.arm == "plain"}
    assert len({trial.config.log.group for trial in trials}) == len({trial.arm for trial in trials})
    assert {trial.config.log.tags[-1] for trial in trials} == {trial.arm for trial in trials}
    assert len({trial.config.log.tags[0] for trial in trials}) == 1
    # A run from before there were groups, or that was logged elsewhere, is this run all the same.
    write_run(trials[0])
    stored = yaml.safe_load(trials[0].run.config.read_text())
    stored["log"] = {"wandb": "online", "project": "elsewhere"}
    write_text(trials[0].run.config, yaml.safe_dump(stored))
    check_stored(trials[0])


def test_a_spread_is_over_the_seeds_that_have_a_figure():
    assert spread([1.0, 3.0, float("nan")]) == (2.0, pytest.approx(2**0.5), 1.0, 3.0, 2)
    assert spread([5.0])[0::4] == (5.0, 1)
    assert np.isnan(spread([5.0]).sd)
    assert np.isnan(spread([]).mean)


@pytest.mark.parametrize(
    ("named", "panels"),
    [
        ({"two": ["arm0", "arm1"]}, {"two": [2], "other arms": [4, 3]}),
        ({"seven": [f"arm{i}" for i in range(7)]}, {"seven": [4, 3], "other arms": [2]}),
    ],
    ids=["a small family", "a family of more arms than colours"],
)
def test_no_panel_has_more_arms_than_colours(named, panels, write, tmp_path):
    names = ["plain", *(f"arm{i}" for i in range(9))]
    arms = {name: {"model.attention.window": i + 1} if i else {} for i, name in enumerate(names)}
    study, trials = planned(write, tmp_path, init_seeds=[0], arms=arms, families=named)
    for trial in trials:
        write_run(trial)
    grouped = families(study, read_results(study, trials))
    assert [result.arm for family in grouped for result in family.arms] == names[1:]
    assert [(family.title, len(family.arms)) for family in grouped] == [(t, n) for t in panels for n in panels[t]]

"""Groups of seeds, fields that differ, and paired differences, beside scipy's own test of pairs."""

import pytest
from scipy import stats

from birthmark.errors import UsageError
from birthmark.findings.compared_runs import compare_configs, paired_differences
from birthmark.findings.history import RunHistory
from birthmark.findings.nothing_here import nothing_here
from birthmark.measure.records import RunDir, Snapshot


def history(path, index, name, seed, mlp, mass):
    summary = {"step": 9, "bias": {"sink_mass": mass, "sink_mass_max": mass, "sink_uniform": 0.05, "sink_rate": 0.0}}
    config = f"name: {name}\nrun_dir: {name}\ninit_seed: {seed}\nmodel: {{mlp: {mlp}, d: 4}}\nlog: {{wandb: 'off'}}\n"
    metrics, snapshots = {9: {"val/loss": 1.0 + mass}}, [Snapshot(summary, {})]
    return RunHistory(index, name, RunDir(path / name), {"init_seed": seed}, config, metrics, snapshots, [])


@pytest.fixture
def runs(tmp_path):
    rows = [("a", 0, "gelu", 0.1), ("a-1", 1, "gelu", 0.2)]
    rows += [("b", 0, "relu", 0.5), ("b-1", 1, "relu", 0.4), ("b-2", 2, "relu", 0.7)]
    return [history(tmp_path, i, *row) for i, row in enumerate(rows)]


def test_seeds_of_one_config_are_a_group_and_names_are_no_difference(runs):
    found = compare_configs(runs)
    assert found.groups == ["a", "a", "b", "b", "b"]
    assert found.several_seeds == {"a", "b"}
    assert found.fields == ["init_seed", "model.mlp"]
    assert found.values[3] == ["1", "relu"]
    assert compare_configs(runs[:1]).fields == []


def test_differences_are_those_of_pairs_of_one_seed(runs):
    ((first, second, differences),) = paired_differences(runs, compare_configs(runs).groups)
    assert (first, second) == ("a", "b")
    mass = next(d for d in differences if d.quantity.name == "sink_mass")
    expected = stats.ttest_rel([0.5, 0.4], [0.1, 0.2]).confidence_interval(0.95)
    assert mass.n_pairs == 2  # seed 2 has no partner
    assert mass.mean == pytest.approx(0.3)
    assert mass.interval == pytest.approx((expected.low, expected.high))
    ((*_, one),) = paired_differences([runs[0], runs[2]], ["a", "b"])
    assert {(d.n_pairs, d.interval) for d in one} == {(1, None)}
    assert paired_differences([runs[0], runs[4]], ["a", "b"]) == []


def test_a_damaged_config_is_named(runs, tmp_path):
    broken = RunHistory(5, "c", RunDir(tmp_path / "c"), {}, "model: {", {}, [], [])
    with pytest.raises(UsageError, match=r"c/config\.yaml"):
        compare_configs([*runs, broken])


def test_a_section_is_folded_only_where_it_never_left_its_control(tmp_path):
    quiet, loud = (history(tmp_path, 0, "x", 0, "gelu", mass) for mass in (0.06, 0.2))
    assert nothing_here([quiet], "sink") == "no head above .060; uniform attention gives .050"
    assert nothing_here([quiet, loud], "sink") == ""
    assert nothing_here([history(tmp_path, 0, "x", 0, "gelu", float("nan"))], "sink") == ""
    assert nothing_here([quiet], "direction") == ""

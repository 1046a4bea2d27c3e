"""The average of the weights: the slow formula over all weights of a run, to the bit when it goes on, and by name."""

import pytest
import torch
from quiet_runs import logged, run, same_weights, up_to, weights

from birthmark.errors import UsageError
from birthmark.findings.run_history import read_runs
from birthmark.launch.cli import main
from birthmark.report.charts.run_panels import panels_of_runs
from birthmark.report.sections.section import Section
from birthmark.report.sections.seed_mark import _direction_over_training
from birthmark.report.sections.training import _loss_over_training
from birthmark.report.sections.training_view import TrainingView
from birthmark.trainer.by_name.model_names import open_source_with_birth
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO
from birthmark.trainer.config import OptimConfig

DECAY = 0.9


@pytest.fixture(scope="module")
def config(tiny):
    return tiny({"optim.ema": DECAY, "trainer.checkpoint_every": 1, "trainer.max_steps": 5})


@pytest.fixture(scope="module")
def averaged(config, tmp_path_factory):
    return run(config, tmp_path_factory.mktemp("ema") / "run")


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    """The same run without an average."""
    config = tiny({"trainer.checkpoint_every": 1, "trainer.max_steps": 5})
    return run(config, tmp_path_factory.mktemp("plain") / "run")


def average(run, step):
    return FolderCheckpointIO().load_checkpoint(run.checkpoint(step))["average"]["weights"]


def test_the_average_is_the_slow_formula_over_the_weights_after_every_step(averaged):
    for step in range(1, 6):
        shares = [DECAY ** (step - i) for i in range(1, step + 1)]
        after = [weights(averaged, i) for i in range(1, step + 1)]
        for name, found in average(averaged, step).items():
            slow = sum(share * w[f"model.{name}"].double() for share, w in zip(shares, after, strict=True))
            torch.testing.assert_close(found.double(), slow / sum(shares), rtol=0, atol=1e-6)


def test_the_average_changes_no_bit_of_training_and_is_measured_beside_it(averaged, plain):
    assert same_weights(averaged, plain, 5)
    for key in ("train/loss", "val/loss", "bias/alignment"):
        assert logged(averaged, key) == logged(plain, key)
    # After one step the average is the weights.
    for key in ("val/loss", "bias/alignment", "bias/sink_mass"):
        assert logged(averaged, f"ema/{key}").keys() == {1, 2, 3, 4, 5}
        assert logged(averaged, f"ema/{key}")[1] == logged(averaged, key)[1]
        assert logged(averaged, f"ema/{key}")[5] != logged(averaged, key)[5]


def test_pages_show_it_beside_the_trained_weights(averaged):
    (history,) = read_runs([averaged])
    panels = {panel.id: panel for found in panels_of_runs([history], history.start).values() for panel in found}
    view, section = TrainingView([history]), Section("", "", "")
    _loss_over_training(view, section)
    _direction_over_training(view, section)
    for panel, key, legend in (
        ("loss-live", "val/loss", "validation, averaged weights"),
        ("alignment", "bias/alignment", "averaged weights"),
        ("sink-mass", "bias/sink_mass", "averaged weights"),
    ):
        (series,) = [series for series in panels[panel].series if series.name == legend]
        assert dict(zip(series.axes["step"], series.values.tolist(), strict=True)) == logged(averaged, f"ema/{key}")
    assert len(section.pictures) >= 2


def test_a_run_goes_on_with_its_average_to_the_bit_and_keeps_its_decay(averaged, config, tiny, tmp_path):
    parts = up_to(2, averaged, tmp_path / "parts")
    with pytest.raises(UsageError, match=r"keeps its optim\.ema"):
        run(tiny({"optim.ema": 0.5, "trainer.checkpoint_every": 1}), parts.path, resume=True)
    run(config, parts.path, resume=True)
    a, b = average(averaged, 5), average(parts, 5)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert logged(parts, "ema/val/loss") == logged(averaged, "ema/val/loss")


def test_averages_are_models_by_name_and_are_exported(averaged, tmp_path):
    source = open_source_with_birth(f"{averaged.path}@4@ema")
    assert source.step == 4
    loaded = source.load().state_dict()
    assert all(torch.equal(loaded[name], found) for name, found in average(averaged, 4).items())
    mean = open_source_with_birth(f"{averaged.path}@4@mean3").load().state_dict()
    for name in average(averaged, 4):
        total = sum(weights(averaged, i)[f"model.{name}"].double() for i in (2, 3, 4))
        assert torch.equal(mean[name], (total / 3).float())
    assert main(["export", f"{averaged.path}@ema", str(tmp_path / "out")]) == 0
    assert "the moving average of the weights" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("@0@ema", "step 0 is the birth, and has no average"),
        ("@3@mean4", "has 3 checkpoints up to step 3; give @mean3"),
        ("@9@ema", "no checkpoint of step 9"),
    ],
)
def test_averages_that_do_not_exist_are_named(averaged, name, expected):
    with pytest.raises(UsageError, match=expected):
        open_source_with_birth(f"{averaged.path}{name}").load()


def test_a_run_without_an_average_has_none_to_open(plain):
    with pytest.raises(UsageError, match=r"step-00000005: has no averaged weights, .* leave @ema out"):
        open_source_with_birth(f"{plain.path}@ema").load()


@pytest.mark.parametrize("ema", [0.0, 1.0, -1.0, float("nan")])
def test_a_decay_outside_0_to_1_is_refused(ema):
    assert [line for line in OptimConfig(ema=ema).problems() if line.startswith(f"optim.ema is {ema}: give")]

"""Steps whose loss or gradient is not finite: skipped, counted, and never saved."""

import math
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from poisoned_losses import poisoned
from quiet_runs import leaves, logged, run

from birthmark.errors import RunError
from birthmark.measure.records import RunDir
from birthmark.models.birth import born
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO
from birthmark.trainer.loop.steps import StepGuard, UpdateSkippedError
from birthmark.trainer.lr_schedule import LearningRate
from birthmark.trainer.module import PretrainModule


def test_nothing_is_saved_of_weights_whose_validation_loss_is_not_finite(tiny, tmp_path, monkeypatch):
    passes = iter(range(10**6))
    # Three passes over six sequences a validation: that of step 4 is the third, after birth and step 2.
    monkeypatch.setattr(
        "birthmark.trainer.run_callbacks.next_token_losses",
        lambda model, batch_BT, borders: batch_BT[:, 1:] * (math.inf if next(passes) >= 6 else 1.0),
    )
    with pytest.raises(RunError, match=r"val/loss is inf after step 4, though all weights are finite"):
        run(tiny({"snapshot.enabled": False}), tmp_path / "run")
    assert [folder.name for folder in RunDir(tmp_path / "run").checkpoints()] == ["step-00000002"]


@pytest.mark.parametrize("measured", [True, False])
def test_a_model_that_is_born_with_such_a_loss_names_what_it_began_with(tiny, tmp_path, monkeypatch, measured):
    """No rate of learning has done it: none was used."""
    if not measured:
        monkeypatch.setattr("birthmark.trainer.run_callbacks.next_token_losses", lambda model, b, borders: b[:, 1:] / 0)
    fields = {"snapshot.enabled": measured} | (
        {"model.init.kind": "normal", "model.init.std": 1e30} if measured else {}
    )
    with pytest.raises(RunError, match=r"look at model\.init") as raised:
        run(tiny({"snapshot.enabled": measured} | fields), tmp_path / "run")
    assert "optim.lr" not in str(raised.value)


@pytest.mark.parametrize("most", [0, 10])
def test_a_loss_that_is_not_a_number_ends_the_run_and_spares_the_checkpoints(tiny, tmp_path, most):
    fields = {"optim.lr": 1e30, "optim.grad_clip": 0.0, "trainer.max_steps": 40, "trainer.max_skipped": most}
    with pytest.raises(RunError, match=r"((loss|gradient norm) is (nan|inf) at step \d|whose square).*optim\.lr"):
        run(tiny(fields), tmp_path / "run")
    done = RunDir(tmp_path / "run")
    for folder in done.checkpoints():
        state = FolderCheckpointIO().load_checkpoint(folder)["state_dict"]
        assert all(value.isfinite().all() for value in state.values()), folder
    assert all(np.isfinite(s.arrays["mean_prob"]).all() for s in done.snapshots())


def asynchronously(monkeypatch):
    """As on a device that nobody waits for at every step."""
    see, hold = PretrainModule.see_gradient_norm, StepGuard.hold

    def see_in_time(self, norm):
        with monkeypatch.context() as patch:
            patch.setattr(PretrainModule, "device", SimpleNamespace(type="accelerator"))
            see(self, norm)

    monkeypatch.setattr(PretrainModule, "see_gradient_norm", see_in_time)
    monkeypatch.setattr(StepGuard, "hold", lambda *args, wait: hold(*args, wait=False))


def poison_losses(monkeypatch, *steps):
    """The loss of these steps' second micro-batch is NaN."""
    step = poisoned(lambda module, index: module.global_step + 1 in steps and index % 2)
    monkeypatch.setattr(PretrainModule, "training_step", step)


def poisoned_loss(monkeypatch):
    """The loss of step 5 is NaN, on a device that nobody waits for at every step."""
    asynchronously(monkeypatch)
    poison_losses(monkeypatch, 5)
    return r"loss is nan at step 5 \(.*optim\.lr"


def poisoned_weight(monkeypatch):
    """A weight is infinite after the update of step 6, of which no loss tells before step 7."""
    step, taken = torch.optim.AdamW.step, []

    def spoil_at_6(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        taken.append(None)
        if len(taken) == 6:
            self.param_groups[0]["params"][0].data[0, 0] = math.inf
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil_at_6)
    return r"embed\.weight is not finite after step 6"


def test_a_process_without_a_row_of_any_tensor_finds_no_weight_to_refuse(tiny, monkeypatch):
    """As where FSDP2 shards tensors over more processes than the longest has rows."""
    config, nothing = tiny(), SimpleNamespace(local=torch.empty(0))
    module = PretrainModule(born(config.model, 0), config.optim, config.trainer)
    monkeypatch.setattr("birthmark.trainer.module.shard_of", lambda parameter: nothing)
    module.check_finite(weights=True)


@pytest.mark.parametrize("poison", [poisoned_loss, poisoned_weight])
def test_what_is_not_finite_between_two_lines_of_the_log_is_never_saved(tiny, tmp_path, monkeypatch, poison):
    message = poison(monkeypatch)
    fields = {
        **{"trainer.log_every": 100, "trainer.checkpoint_every": 3, "trainer.keep_last": 1, "trainer.max_steps": 20},
        "trainer.max_skipped": 0,
    }
    with pytest.raises(RunError, match=message):
        run(tiny({**fields, "snapshot.enabled": False}), tmp_path / "run")
    (kept,) = RunDir(tmp_path / "run").checkpoints()
    assert kept.name == "step-00000003"
    state = FolderCheckpointIO().load_checkpoint(kept)["state_dict"]
    assert all(value.isfinite().all() for value in state.values())


ESTIMATED = {"model.attention.aggregation": "calibrated", "model.attention.calibration.correlation": "estimated"}


@pytest.mark.parametrize(
    ("optimizer", "way"), [("adamw", "waits"), ("adamw", "asynchronous"), ("muon", "asynchronous")]
)
def test_a_skipped_step_moves_nothing_but_the_data_and_the_schedule(tiny, tmp_path, monkeypatch, optimizer, way):
    """Against checkpoints around it; and a run that goes on from before or after it is the one that had no pause. Every
    optimizer: test_a_skipped_step_moves_nothing_of_any_optimizer in tests/trainer/test_optimizers.py."""
    fields = {"optim.name": optimizer, "trainer.checkpoint_every": 1, "snapshot.enabled": False, **ESTIMATED}
    if way == "asynchronous":
        asynchronously(monkeypatch)
    poison_losses(monkeypatch, 1, 4)
    done = run(tiny(fields), tmp_path / "run")
    states = {step: FolderCheckpointIO().load_checkpoint(done.checkpoint(step)) for step in range(1, 7)}

    def moved(a, b):
        ours, theirs = (s["state_dict"] | leaves(s["optimizer_states"][0]["state"]) for s in (states[a], states[b]))
        assert ours.keys() == theirs.keys()
        return {name for name in ours if not torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name]))}

    assert any("n_batches" in name for name in states[3]["state_dict"])
    assert not states[1]["optimizer_states"][0]["state"]
    assert not moved(3, 4)
    groups = [[{**g, "lr": 0} for g in states[step]["optimizer_states"][0]["param_groups"]] for step in (3, 4)]
    assert groups[0] == groups[1]
    assert len(moved(4, 5)) >= len(states[4]["state_dict"])
    assert logged(done, "train/skipped_steps") == {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2}
    assert [step for step, loss in logged(done, "train/loss").items() if loss is None or math.isnan(loss)] == [1, 4]
    config = tiny(fields).optim
    assert logged(done, "train/lr") == {
        step: config.lr * LearningRate(config, 6, lambda step: step).share(step - 1) for step in range(1, 7)
    }
    for step in (4, 5, 6):
        shutil.rmtree(done.checkpoint(step))
    run(tiny(fields), done.path, resume=True)
    again = FolderCheckpointIO().load_checkpoint(done.checkpoint(6))
    assert all(torch.equal(again["state_dict"][k], v) for k, v in states[6]["state_dict"].items())
    assert logged(done, "train/skipped_steps")[6] == 2


@pytest.mark.parametrize(("norm", "moved"), [(1.0, True), (math.inf, False)])
def test_buffers_that_were_exchanged_after_the_guard_was_made_are_put_back(norm, moved):
    """As a model's are that is moved to its device."""
    model = torch.nn.BatchNorm1d(3)
    guard = StepGuard(model)
    model._apply(torch.clone)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    guard.begin()
    model(torch.randn(8, 3))
    guard.judge(torch.tensor(norm))
    guard.settle()
    assert all(torch.equal(buffer, before[name]) != moved for name, buffer in model.named_buffers())


def test_buffers_are_put_back_without_a_wait_for_the_device():
    """The meta device stands for one: what is copied from there to the host raises."""
    model = torch.nn.BatchNorm1d(3)
    guard = StepGuard(model)
    model.to("meta")
    guard.begin()
    guard.judge(torch.tensor(math.inf, device="meta"))
    guard.settle()


def test_state_that_lies_elsewhere_is_not_copied_with_all_weights():
    """Of it the device would be waited for after the update; so it is before."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = SimpleNamespace(state={weight: {"step": torch.zeros((), device="meta")}})
    guard = StepGuard(torch.nn.Linear(1, 1))
    with pytest.raises(UpdateSkippedError):
        guard.hold(optimizer, [weight], torch.tensor(math.inf), wait=False)
    guard.hold(optimizer, [weight], torch.tensor(1.0), wait=False)
    weight.data += 1
    guard.settle()
    assert weight.tolist() == [1, 1]


def test_more_skipped_steps_than_allowed_end_the_run_with_one_line(tiny, tmp_path, monkeypatch):
    poison_losses(monkeypatch, 2, 3, 5)
    with pytest.raises(
        RunError, match=r"^3 steps were skipped, and trainer\.max_skipped is 2; the first: loss is nan at"
    ):
        run(tiny({"trainer.max_skipped": 2, "snapshot.enabled": False}), tmp_path / "run")
    assert [c.name for c in RunDir(tmp_path / "run").checkpoints()] == ["step-00000002", "step-00000004"]


def test_the_rate_counts_what_an_asynchronous_device_still_has_to_compute(tiny, tmp_path, monkeypatch):
    """A stand-in that takes 100 ms for each micro-batch, and returns from the call at once."""
    train, seconds, waits = PretrainModule.training_step, 0.1, []
    with ThreadPoolExecutor(1) as device:

        def queue(self, batch, index):
            device.submit(time.sleep, seconds)
            return train(self, batch, index)

        def wait(_):
            waits.append(device.submit(int).result())

        monkeypatch.setattr(PretrainModule, "training_step", queue)
        monkeypatch.setattr("birthmark.trainer.run_callbacks.synchronize", wait)
        fields = {"trainer.log_every": 2, "trainer.checkpoint_every": 3, "trainer.max_steps": 6}
        done = run(tiny({**fields, "snapshot.enabled": False}), tmp_path / "run")
    rates = logged(done, "train/tokens_per_s")
    assert list(rates) == [2, 4, 6]
    assert all(rate <= 4 * 12 / (2 * seconds) for rate in rates.values())
    # Only at the end of every second step is it known how long the device takes.
    for step in rates:
        both = 2 * logged(done, "train/step_p50_s")[step]
        assert both == pytest.approx(2 * 4 * 12 / rates[step], rel=0.2)
    assert len(waits) == 4  # steps 2, 3, 4 and 6: no other step waits

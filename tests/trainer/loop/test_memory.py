"""Python's collector rests while a run trains, and is as before afterwards."""

import gc
import inspect
from types import SimpleNamespace

import pytest
import torch

from birthmark.trainer.loop import profiling
from birthmark.trainer.loop.profiling import CleanUp, collector_at_rest

CPU = torch.device("cpu")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_within_and_is_as_before_after_an_error(enabled):
    frozen = inspect.unwrap(gc.get_freeze_count)
    before = gc.isenabled(), frozen()

    def interrupted():
        with collector_at_rest(CPU):
            assert not gc.isenabled()
            assert frozen() > before[1]
            raise KeyboardInterrupt

    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert gc.isenabled() == enabled
        assert (frozen() > 0) == (before[1] > 0)
    finally:
        (gc.enable if before[0] else gc.disable)()


def test_garbage_is_collected_at_fixed_steps_and_caches_are_emptied_after_milestones(monkeypatch):
    steps, emptied = {}, []
    monkeypatch.setattr(profiling.gc, "collect", lambda generation=2: steps.setdefault(trainer.global_step, generation))
    monkeypatch.setattr(profiling.torch.cuda, "empty_cache", lambda: emptied.append(trainer.global_step))
    trainer = SimpleNamespace(global_step=0, max_steps=260, should_stop=False, accumulate_grad_batches=1)
    clean_up = CleanUp(120, torch.device("cuda"))
    clean_up.on_train_start(trainer, None)
    for step in range(1, 261):
        trainer.global_step = step
        clean_up.on_train_batch_end(trainer, None, None, None, step - 1)
    assert steps == {0: 2, 50: 1, 100: 1, 120: 2, 150: 1, 200: 1, 240: 2, 250: 1, 260: 2}
    assert emptied == [0, 120, 240, 260]

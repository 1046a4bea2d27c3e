"""A run that several commands read."""

import pytest

from birthmark.measure.records import RunDir
from birthmark.trainer.run import pretrain


@pytest.fixture(scope="session")
def run_of_two_checkpoints(tmp_path_factory, tiny, no_page):
    """A tiny run with a checkpoint after 2 and after 4 steps, without snapshots."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    with no_page():
        pretrain(tiny({"run_dir": str(path), "trainer.max_steps": 4, "snapshot.enabled": False}), RunDir(path))
    return RunDir(path)

"""A run that several commands read."""

import pytest
from quiet_runs import run


@pytest.fixture(scope="session")
def run_of_two_checkpoints(tmp_path_factory, tiny):
    """A tiny run with a checkpoint after 2 and after 4 steps, without snapshots."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    return run(tiny({"run_dir": str(path), "trainer.max_steps": 4, "snapshot.enabled": False}), path)

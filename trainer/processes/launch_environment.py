"""Processes of a run for Lightning, whatever launched them."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment

from .launched_process import LaunchedProcess


class LauncherEnvironment(ClusterEnvironment):
    """Environment from the launcher's facts (``launched_process.py``); Lightning itself knows only torchrun's
    variables.
    """

    def __init__(self, process: LaunchedProcess) -> None:
        super().__init__()
        self.process = process

    @property
    def creates_processes_externally(self) -> bool:
        """Always True: the processes exist already."""
        return True

    @property
    def main_address(self) -> str:
        """Host of rank 0."""
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """Port of rank 0."""
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        """Return False: the environment is passed explicitly."""
        return False

    def world_size(self) -> int:
        """Return the number of processes of the run."""
        return self.process.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the size is fixed."""

    def global_rank(self) -> int:
        """Return this process's rank among all."""
        return self.process.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is fixed."""

    def local_rank(self) -> int:
        """Return this process's rank on its node."""
        return self.process.local_rank

    def node_rank(self) -> int:
        """Return the number of its node."""
        return self.process.rank // self.process.local_world_size

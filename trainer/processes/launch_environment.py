"""The processes of a run as Lightning asks for them, whatever launched them."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment

from .launched_process import LaunchedProcess


class LauncherEnvironment(ClusterEnvironment):
    """What the launcher has said (``launched_process.py``); Lightning by itself knows torchrun's variables only."""

    def __init__(self, process: LaunchedProcess) -> None:
        super().__init__()
        self.process = process

    @property
    def creates_processes_externally(self) -> bool:
        """They are there already."""
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
        """Never by itself: it is given."""
        return False

    def world_size(self) -> int:
        """Return the number of processes of the run."""
        return self.process.world_size

    def set_world_size(self, size: int) -> None:
        """Nothing: it is known."""

    def global_rank(self) -> int:
        """This process among all."""
        return self.process.rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing: it is known."""

    def local_rank(self) -> int:
        """This process among those of its node."""
        return self.process.local_rank

    def node_rank(self) -> int:
        """Its node among all."""
        return self.process.rank // self.process.local_world_size

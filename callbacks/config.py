"""Config of a run's logs beside its own directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LoggerName = Literal["wandb", "tensorboard", "csv"]


@dataclass(frozen=True)
class LogConfig:
    """Settings of a run's logs beside its own directory."""

    loggers: list[LoggerName] = field(default_factory=lambda: ["wandb"])
    """Loggers, any of ``wandb``; ``tensorboard``, into the run's folder tensorboard; ``csv``, which keeps metrics.csv
    up to date (otherwise it is written when the run ends).
    """

    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    """Mode of the logger ``wandb``: ``auto`` is online where the user is logged in, offline where not, off where wandb
    is not installed. ``WANDB_MODE`` wins over it, but for ``off`` (docs/run-directory.md).
    """

    project: str = "birthmark"
    """W&B project; ``WANDB_PROJECT`` wins."""

    group: str = ""
    """W&B group, of the runs that differ in the seed alone; by default the run's name without its seed.
    ``WANDB_RUN_GROUP`` wins."""

    tags: list[str] = field(default_factory=list)
    """W&B tags; ``WANDB_TAGS`` wins."""

    def problems(self) -> list[str]:
        """List everything that makes this config impossible, one line each, with the remedy."""
        lists: dict[str, list[str]] = {"loggers": [*self.loggers], "tags": self.tags}
        return [
            f"log.{name} has {value!r} twice: give it once"
            for name, values in lists.items()
            for value in dict.fromkeys(values)
            if values.count(value) > 1
        ]

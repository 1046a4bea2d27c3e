"""Where a run is logged besides its own directory, as a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LogConfig:
    """Where a run is logged besides its own directory."""

    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    """Weights & Biases: ``auto`` is online where the user is logged in, offline where not, off where wandb is not
    installed."""

    project: str = "birthmark"
    """W&B project."""

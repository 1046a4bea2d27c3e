"""Where figures go: metrics.jsonl always, Weights & Biases where the user wants it. Names are the same in both."""

from __future__ import annotations

import importlib.util
import math
import netrc
import os
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from ..errors import RunError, UsageError
from ..measure.records import RunDir, Snapshot, append_metrics
from .config import LogConfig

#: How long W&B is given to start, in seconds.
_PATIENCE_S = 180


class JsonLinesLogger(Logger):
    """Appends every call's metrics as one line to a run's ``metrics.jsonl``."""

    def __init__(self, run: RunDir) -> None:
        super().__init__()
        self.run = run

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.run.path.name

    @property
    def version(self) -> str:
        """A run has its name alone."""
        return ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one line."""
        assert step is not None
        append_metrics(self.run.metrics, step, metrics)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Config stands in ``config.yaml``."""


def _logged_in_to_wandb() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return file.is_file() and netrc.netrc(file).authenticators("api.wandb.ai") is not None


def wandb_mode(config: LogConfig) -> str:
    """``online``, ``offline`` or ``off``, with ``auto`` resolved.

    Raises:
        UsageError: W&B was asked for and is not installed.
    """
    installed = importlib.util.find_spec("wandb") is not None
    if config.wandb == "auto":
        return ("online" if _logged_in_to_wandb() else "offline") if installed else "off"
    if config.wandb != "off" and not installed:
        raise UsageError(f"log.wandb is {config.wandb} but wandb is missing: pip install 'birthmark[wandb]'")
    return config.wandb


def wandb_logger(config: LogConfig, run: RunDir, run_id: str, record: dict[str, Any]) -> Logger | None:
    """A Lightning W&B logger for the run, or None where W&B is off. ``record`` goes into the W&B run's config.

    Raises:
        RunError: W&B did not start.
    """
    mode = wandb_mode(config)
    if mode == "off":
        return None
    import wandb

    try:
        experiment = wandb.init(
            project=config.project,
            name=run.path.name,
            id=run_id,
            resume="allow",
            dir=run.path,
            mode="online" if mode == "online" else "offline",
            config=record,
            # Its own process may take long to come up on a busy node.
            settings=wandb.Settings(silent=True, console="off", x_service_wait=_PATIENCE_S, init_timeout=_PATIENCE_S),
        )
    except (wandb.Error, TimeoutError, OSError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RunError(f"log.wandb {mode}: W&B did not start ({reason}); try again, or give --log.wandb off") from error
    # As Lightning does for a run that it starts itself: steps of training are the horizontal axis.
    experiment.define_metric("trainer/global_step")
    experiment.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=experiment)


def close_loggers(loggers: Iterable[Logger], failed: bool) -> None:
    """End the W&B run, so that it can be opened again, in this process or under the same W&B service."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=int(failed))


def chart_groups(snapshot: Snapshot) -> dict[str, float]:
    """The scalars again as W&B groups charts: ``SECTION/NAME``, beside it ``SECTION/NAME (CONTROL)``.

    W&B makes a group of what stands before the slash and sorts it by name. Those of the text probe are called
    ``NAME on text``.
    """
    found: dict[str, float] = {}
    for group, suffix in (("bias", ""), ("bias_text", " on text")):
        scalars = snapshot.summary.get(group) or {}
        for name, quantity in snapshot.quantities.items():
            if quantity.section and (value := scalars.get(name)) is not None:
                key = f"{quantity.section}/{name}{suffix}"
                found[key] = value
                if math.isfinite(level := quantity.level(snapshot.summary, group)):
                    found[f"{key} ({quantity.control_label or 'control'})"] = level
    return found


def log_snapshot(loggers: Iterable[Logger], snapshot: Snapshot) -> None:
    """Show a snapshot in W&B, where that is among the loggers: its scalars as charts in groups, its ranked tokens and
    what it has of every head as tables, and sink mass as a picture."""
    for logger in loggers:
        if not isinstance(logger, WandbLogger):
            continue
        import wandb

        top = snapshot.summary["top_tokens"]
        mass_LH = snapshot.arrays["sink_mass"]
        objects: dict[str, Any] = {
            "bias/preferred_tokens": wandb.Table(columns=list(top[0]), data=[list(t.values()) for t in top]),
            "bias/sink_heatmap": wandb.Image(
                (mass_LH.clip(0, 1) * 255).astype("uint8").repeat(24, axis=0).repeat(24, axis=1),
                caption=f"step {snapshot.step}: rows are layers from 1, columns heads; white is 1",
            ),
        }
        for name, quantity in snapshot.quantities.items():
            column = quantity.over_training
            if quantity.axes == ("layer", "head") and quantity.scalar and column is not None and not column.page_only:
                if (array_LH := snapshot.arrays.get(name)) is None:
                    continue
                heads = [[layer, h, float(x)] for layer, row in enumerate(array_LH, 1) for h, x in enumerate(row)]
                objects[f"bias/{name}_by_head"] = wandb.Table(columns=["layer", "head", name], data=heads)
        logger.experiment.log(objects | chart_groups(snapshot) | {"trainer/global_step": snapshot.step})

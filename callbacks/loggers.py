"""Where figures go: metrics.jsonl always, Weights & Biases where the user wants it. Names are the same in both."""

from __future__ import annotations

import importlib.util
import netrc
import os
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

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
        """Runs are told apart by their name alone."""
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
    from lightning.pytorch.loggers import WandbLogger

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
    return WandbLogger(experiment=experiment)


def close_loggers(loggers: Iterable[Logger], failed: bool) -> None:
    """End the W&B run, so that whoever goes on with it, in this process or under the same W&B service, can open it."""
    from lightning.pytorch.loggers import WandbLogger

    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=int(failed))


def log_snapshot(loggers: Iterable[Logger], snapshot: Snapshot) -> None:
    """Show a snapshot's ranked tokens and layer × head sink mass as W&B objects, where W&B is among the loggers."""
    from lightning.pytorch.loggers import WandbLogger

    for logger in loggers:
        if not isinstance(logger, WandbLogger):
            continue
        import wandb

        top = snapshot.summary["top_tokens"]
        mass_LH = snapshot.arrays["sink_mass"]
        heads = [[layer + 1, head, float(m)] for layer, row in enumerate(mass_LH) for head, m in enumerate(row)]
        objects: dict[str, Any] = {
            "bias/preferred_tokens": wandb.Table(columns=list(top[0]), data=[list(t.values()) for t in top]),
            "bias/sink_mass_by_head": wandb.Table(columns=["layer", "head", "sink_mass"], data=heads),
            "bias/sink_heatmap": wandb.Image(
                (mass_LH.clip(0, 1) * 255).astype("uint8").repeat(24, axis=0).repeat(24, axis=1),
                caption=f"step {snapshot.step}: rows are layers from 1, columns heads; white is 1",
            ),
        }
        logger.experiment.log(objects | {"trainer/global_step": snapshot.step})

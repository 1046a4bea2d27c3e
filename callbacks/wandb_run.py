"""The W&B run of a run: how it starts, the content of its rows and of its end (docs/run-directory.md)."""

from __future__ import annotations

import glob
import importlib.util
import math
import netrc
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired
from urllib.parse import urlsplit

import numpy as np
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import TypedDict

from ..errors import RunError, UsageError
from ..files import read_json, write_json
from ..findings.chain_links import peaks_by_block
from ..findings.run_history import PROBES, arrays_of, measured_probes
from ..findings.verdict import Group
from ..measure.records import RunDir, Snapshot
from ..messages import one_line
from ..metrics.quantities import by_block, shown_name
from ..metrics.quantity import AXES
from ..report.pictures.panels import evenly_spaced
from .config import LogConfig

# ---------------------------------------------------------------- snapshots as loggers with pictures show them

#: Resolution of pictures: 1,000 pixels across.
_WIDTH = 5.0
_DPI = 200
#: Ends of the colour scale: the first that no head exceeds, so that a model without a sink is not all dark.
_TOPS = (0.1, 0.2, 0.5, 1.0)

TOKEN_COLUMNS = ("step", "rank", "id", "text", "p", "argmax_share", "rank_at_birth")
"""Columns of the table of preferred tokens."""


def chart_groups(snapshot: Snapshot) -> dict[str, float]:
    """Return the scalars under names that loggers group into charts: ``SECTION/NAME``, beside it ``SECTION/NAME
    (CONTROL)``.

    Loggers group by the part before the slash and sort by name. Scalars of the text probe are called ``NAME on text``.
    A scalar that hides blocks has its value in the block where it stands out beside it, and that block's number.
    """
    found: dict[str, float] = {}
    groups: tuple[tuple[Group, str], ...] = (("bias", ""), ("bias_text", " on text"))
    for group, suffix in groups:
        scalars = snapshot.summary.get(group) or {}
        peaks = peaks_by_block(snapshot, group)
        for name, quantity in snapshot.quantities.items():
            if quantity.section and (value := scalars.get(name)) is not None:
                key = f"{quantity.section}/{name}{suffix}"
                found[key] = value
                if name in peaks:
                    found[f"{key} (where it stands out)"], found[f"{key} (block of that)"] = peaks[name]
                if math.isfinite(level := quantity.level(snapshot.summary, group)):
                    found[f"{key} ({quantity.control_label or 'control'})"] = level
    return found


def block_curves(snapshot: Snapshot) -> dict[str, float]:
    """Return ``by block NAME/LAYER`` for every probe: a group of charts for each quantity, a curve for each block.

    Layer 0 is the embeddings.
    """
    found: dict[str, float] = {}
    for prefix in measured_probes(snapshot):
        arrays, suffix = arrays_of(snapshot, prefix), f" on {PROBES[prefix]}" if prefix else ""
        for quantity, column in by_block(snapshot.quantities.values()):
            if (array := arrays.get(quantity.array)) is None:
                continue
            name = f"by block {column.key or quantity.name}{suffix}"
            first = snapshot.quantities[quantity.array].axes[0]
            values = enumerate(quantity.blocks(array), AXES[first].first)
            found |= {f"{name}/{layer:02}": float(value) for layer, value in values if math.isfinite(value)}
    return found


def token_rows(snapshots: Sequence[Snapshot], ranks: int | None = None) -> list[list[Any]]:
    """List the rows of `TOKEN_COLUMNS`: the preferred tokens of every snapshot, or the first ``ranks`` of them, step by
    step.
    """
    return [
        [snapshot.step, *(token.get(name) for name in TOKEN_COLUMNS[1:])]
        for snapshot in snapshots
        for token in (snapshot.summary.get("top_tokens") or [])[:ranks]
    ]


def head_tables(snapshot: Snapshot) -> dict[str, list[list[Any]]]:
    """Return, for each quantity with a number for every head and a scalar, rows of (layer, head, value)."""
    found = {}
    for name, quantity in snapshot.quantities.items():
        array_LH, column = snapshot.arrays.get(name), quantity.over_training
        of_heads = quantity.axes == ("layer", "head") and quantity.scalar
        if array_LH is not None and of_heads and column is not None and not column.page_only:
            found[name] = [[layer, h, float(x)] for layer, row in enumerate(array_LH, 1) for h, x in enumerate(row)]
    return found


def by_blocks(rows: list[list[Any]], most: int) -> dict[str, list[list[Any]]]:
    """Divide the rows of a `head_tables` among tables of at most ``most`` rows, by the ends of their names: "" if all
    fit into one.
    """
    if len(rows) <= most:
        return {"": rows}
    n_heads = sum(layer == 1 for layer, *_ in rows)
    size = max(most // n_heads, 1) * n_heads
    parts = [rows[first : first + size] for first in range(0, len(rows), size)]
    return {f"_blocks_{part[0][0]}_to_{part[-1][0]}": part for part in parts}


def sink_map(snapshot: Snapshot) -> np.ndarray | None:
    """Draw sink mass by block and head, a panel for each probe, as a picture: bytes ``[height, width, 3]``.

    None without heads, or without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from ..report.charts.specs import HeatmapPanel, Series
    from ..report.figure import pixels_of

    arrays_by_probe = {PROBES[prefix]: arrays_of(snapshot, prefix) for prefix in measured_probes(snapshot)}
    masses = {probe: arrays.get(shown_name("sink_mass", arrays)) for probe, arrays in arrays_by_probe.items()}
    maps = [
        Series(mass, {"layer": range(1, len(mass) + 1), "head": range(mass.shape[1])}, 0, f"{name} probe")
        for name, mass in masses.items()
        if mass is not None
    ]
    if not maps:
        return None
    most = max(float(np.nanmax(series.values, initial=0)) for series in maps)
    top = next((top for top in _TOPS if most <= top), 1.0)
    unit = f"sink mass, step {snapshot.step:,}"
    return pixels_of(HeatmapPanel("sink", "", maps, limits=(0.0, top), unit=unit), _WIDTH, _DPI)


# ---------------------------------------------------------------- the run

#: Time, in seconds, that W&B gets to start.
_PATIENCE_S = 180
#: The horizontal axes: optimizer steps as Lightning calls them, and tokens trained on.
_STEPS, _TOKENS = "trainer/global_step", "train/tokens"
Mode = Literal["online", "offline", "shared", "off"]
#: Values of WANDB_MODE, W&B's older names included → mode of the log.
_MODES: dict[str, Mode] = {
    "online": "online",
    "run": "online",
    "shared": "shared",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "off",
}
#: Argument of `wandb.init` → the variable that wins over what we give. wandb alone would let the argument win.
_VARIABLES = {
    "entity": "WANDB_ENTITY",
    "project": "WANDB_PROJECT",
    "id": "WANDB_RUN_ID",
    "name": "WANDB_NAME",
    "group": "WANDB_RUN_GROUP",
    "job_type": "WANDB_JOB_TYPE",
    "tags": "WANDB_TAGS",
    "dir": "WANDB_DIR",
    "resume": "WANDB_RESUME",
}


@dataclass(frozen=True)
class Identity:
    """Identity of a run in W&B."""

    id: str
    """Id of the run, everywhere."""
    name: str
    group: str
    """Group of the runs that differ only in the seed."""
    job_type: str


class _Stored(TypedDict):
    """``wandb.json`` of a run: the W&B run that a resumed run continues."""

    id: str
    project: NotRequired[str | None]
    entity: NotRequired[str | None]
    url: NotRequired[str | None]


def _logged_in_to_wandb() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return file.is_file() and netrc.netrc(file).authenticators(host) is not None


def _disabled() -> bool:
    # Variable that other trainers read too; wandb itself no longer does.
    return os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on")


def wandb_mode(config: LogConfig) -> Mode:
    """Return ``online``, ``offline``, ``shared`` or ``off``, with ``auto`` and the environment resolved.

    Raises:
        UsageError: W&B was asked for and is not installed, or WANDB_MODE is invalid.
    """
    if "wandb" not in config.loggers or config.wandb == "off" or _disabled():
        return "off"
    if (wanted := os.environ.get("WANDB_MODE") or "online") not in _MODES:
        raise UsageError(f"WANDB_MODE is {one_line(wanted)}: give online, offline or disabled")
    if importlib.util.find_spec("wandb") is None:
        if config.wandb == "auto":
            return "off"
        raise UsageError(f"log.wandb is {config.wandb} but wandb is missing: pip install wandb")
    if os.environ.get("WANDB_MODE"):
        return _MODES[wanted]
    if config.wandb == "auto":
        return "online" if _logged_in_to_wandb() else "offline"
    return config.wandb


class WandbRun(WandbLogger):
    """Lightning's logger of a W&B run, each row of which has the step and the tokens trained on.

    W&B works in a process of its own, which may be killed, or fail; then the run goes on without it.

    Args:
        experiment: the W&B run.
        mode: mode of the log.
        run: the run.
        tokens_after: function from a number of steps to the tokens that they train on.
        say: called with a line when W&B's process is gone.
    """

    def __init__(
        self, experiment: Any, mode: Mode, run: RunDir, tokens_after: Callable[[int], int],
        say: Callable[[str], object],
    ) -> None:  # fmt: skip
        super().__init__(experiment=experiment)
        self.run, self.tokens_after, self.say = run, tokens_after, say
        self.url: str | None = None if mode == "offline" else experiment.url
        self._is_lost = False

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log one row."""
        assert step is not None
        log = super().log_metrics
        self._send(lambda: log({**metrics, _TOKENS: self.tokens_after(step)}, step))

    def _send(self, action: Callable[[], object]) -> None:
        """Run an action of W&B, unless its process is gone."""
        if self._is_lost:
            return
        import wandb
        from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

        gone = (ConnectionError, HandleAbandonedError, MailboxClosedError)
        try:
            action()
        except gone as error:
            self._is_lost = True
            self.say(
                f"W&B: its process is gone ({one_line(error) or type(error).__name__}); the run goes on and logs to "
                f"{self.run.metrics}; a resumed run starts W&B again"
            )
            # Forgets the process: the library would ask it to end when this one does, and fail.
            with suppress(*gone):
                wandb.teardown()

    @property
    def where(self) -> str:
        """URL of the run, or the command that sends it later, with all of its starts."""
        if self.url:
            return self.url
        last = Path(self.experiment.dir).parent
        # Each start has a folder, named after its time and the id.
        starts = {last, *last.parent.glob(f"offline-run-????????_??????-{glob.escape(self.experiment.id)}")}
        return f"offline, send it with: wandb sync {shlex.join(map(str, sorted(starts)))}"

    def alert(self, text: str) -> None:
        """Send the user a message, according to the user's settings in W&B."""
        title = f"{self.experiment.name} failed"[:63]
        self._send(lambda: self.experiment.alert(title, text, level="ERROR", wait_duration=0))

    def end_in_fault(self, text: str) -> None:
        """Say why the process is about to end, and end the W&B run; for a process that cannot continue."""
        self.alert(text)
        self._send(lambda: self.experiment.finish(exit_code=1))

    def close(self, error: BaseException | None) -> None:
        """Add the run's files to the W&B run, and end it.

        It can be opened again, in this process or under the same W&B service.

        Args:
            error: the failure of the run.
        """
        try:
            if error is None:
                self._log_end()
            elif not isinstance(error, KeyboardInterrupt):
                self.alert(one_line(error, 1000))
            self._log_files(self.run.report if error is None else None)
        finally:
            self._send(lambda: self.experiment.finish(exit_code=int(error is not None)))

    def _log_end(self) -> None:
        import wandb

        objects: dict[str, Any] = {}
        if rows := self._tokens_that_fit(wandb.Table.MAX_ROWS):
            objects["bias/preferred_tokens_over_steps"] = wandb.Table(columns=list(TOKEN_COLUMNS), data=rows)
        if self.run.report.is_file():
            objects["report"] = wandb.Html(str(self.run.report), inject=False)
        if objects:
            self._send(lambda: self.experiment.log(objects))

    def _tokens_that_fit(self, most: int) -> list[list[Any]]:
        """List the preferred tokens of all snapshots in at most ``most`` rows: W&B drops those behind them, the newest.

        Snapshots give way, evenly, before ranks.
        """
        every = self.run.snapshots(arrays_later=True)
        n_ranks = max((len(snapshot.summary.get("top_tokens") or []) for snapshot in every), default=0)
        if not n_ranks:
            return []
        shown = [every[i] for i in evenly_spaced(len(every), max(most // n_ranks, 2))]
        ranks = min(n_ranks, most // len(shown))
        if len(shown) < len(every) or ranks < n_ranks:
            self.say(
                f"W&B: a table has {most:,} rows at most; preferred_tokens_over_steps has {len(shown):,} of "
                f"{len(every):,} snapshots, {ranks:,} of {n_ranks:,} tokens of each; {self.run.path / 'snapshots'} "
                "has all"
            )
        return token_rows(shown, ranks)

    def _log_files(self, report: Path | None) -> None:
        """Log config, birth certificate and, if they exist, the table of metrics and the report, as an artifact."""
        import wandb

        artifact = wandb.Artifact(f"birthmark-{self.experiment.id}", type="birthmark")
        for file in (self.run.config, self.run.birth, self.run.metrics_csv, report):
            if file is not None and file.is_file():
                artifact.add_file(str(file))
        self._send(lambda: self.experiment.log_artifact(artifact))


def wandb_run(
    config: LogConfig, run: RunDir, identity: Identity, record: dict[str, Any], tokens_after: Callable[[int], int],
    say: Callable[[str], object] = print,
) -> WandbRun | None:  # fmt: skip
    """Start or resume the W&B run of ``run``; None if W&B is off.

    Args:
        config: settings of the logs.
        run: the run.
        identity: names of the run, unless environment variables override them.
        record: values for the W&B run's config.
        tokens_after: function from a number of steps to the tokens that they train on.
        say: called with a line if W&B's process ends before the run.

    Raises:
        UsageError: see :func:`wandb_mode`.
        RunError: W&B did not start.
    """
    mode = wandb_mode(config)
    if mode == "off":
        return None
    import wandb

    # The W&B run that it began in, also where a sweep or a variable named it.
    stored = {"id": identity.id, "project": config.project}
    if run.wandb.is_file():
        stored |= {name: value for name, value in read_json(run.wandb, _Stored).items() if value and name != "url"}
    of_run: dict[str, Any] = {
        **stored,
        "name": identity.name,
        "group": config.group or identity.group,
        "job_type": identity.job_type,
        "tags": config.tags,
        "dir": str(run.path),
        "resume": "allow",
    }
    of_environment: dict[str, Any] = {name: os.environ.get(variable) for name, variable in _VARIABLES.items()}
    given = of_run | {name: value for name, value in of_environment.items() if value}
    if of_environment["tags"]:
        given["tags"] = [tag for tag in of_environment["tags"].split(",") if tag]
    try:
        experiment = wandb.init(
            **given,
            mode=mode,
            config=record,
            settings=wandb.Settings(
                silent=True,
                console="off",
                # The process that W&B starts may take long to come up on a busy node.
                x_service_wait=_PATIENCE_S,
                init_timeout=_PATIENCE_S,
                # W&B would run git, which runs what the repository configures. The record has the commit.
                disable_git=True,
            ),
        )
    except (wandb.Error, TimeoutError, OSError) as error:
        reason = one_line(error) or type(error).__name__
        raise RunError(f"log.wandb {mode}: W&B did not start ({reason}); try again, or give --log.wandb off") from error
    logger = WandbRun(experiment, mode, run, tokens_after, say)
    place = {name: getattr(experiment, name) or None for name in ("id", "project", "entity")}
    write_json(run.wandb, place | {"url": logger.url})
    # Steps are the horizontal axis, as Lightning has it; every row has the tokens too, which a panel can take instead.
    for axis in (_STEPS, _TOKENS):
        experiment.define_metric(axis)
    experiment.define_metric("*", step_metric=_STEPS, step_sync=True)
    return logger

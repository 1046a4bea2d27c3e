"""What `birthmark plan` does: tell whether a run fits, what it takes, and which way of training it takes least."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich import box
from rich.console import Console
from rich.table import Table

from ...errors import UsageError
from ...plan.planner import Cluster, Plan, Planner, best, way
from ...report.terminal import bar, print_json
from ...study.trials import common_flags
from ...trainer import initial_weights as start
from ...trainer.config import RunConfig
from ...trainer.config_file import resolve
from ...trainer.strategies.table import STRATEGIES
from ...trainer.throughput import GPUS

#: Parts of memory, and of a step, in the words of a person.
_WORDS = {
    "first forward": "the first forward pass",
    "first backward": "the first backward pass",
    "later forward": "a later forward pass",
    "later backward": "a later backward pass",
    "update": "the optimizer's update",
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered weights",
    "activations": "activations",
}


@dataclass(frozen=True)
class Budget:
    """What the whole run takes."""

    tokens: float
    tokens_per_second: float
    days: float
    gpu_hours: float
    cost: float


def budget(plan: Plan, config: RunConfig, cluster: Cluster, tokens: float, price: float) -> Budget | None:
    """Time and money for so many tokens, all sending hidden; None where the time of a step is not known."""
    if plan.step_seconds is None:
        return None
    speed = config.trainer.global_batch_size * config.model.max_seq_len / plan.step_seconds
    hours = tokens / speed / 3600
    return Budget(tokens, speed, hours / 24, hours * cluster.n_gpus, hours * cluster.n_gpus * price)


def _si(number: float, unit: str = "") -> str:
    """Four digits with a decimal prefix."""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(number) >= 10**power:
            return f"{number / 10**power:.4g} {prefix}{unit}"
    return f"{number:.4g} {unit}".rstrip()


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:,.2f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f} s"


def _memory(plan: Plan, cluster: Cluster, console: Console) -> None:
    batches = "micro-batches" if plan.accumulate > 1 else "micro-batch"
    table = Table("one process", "GB", "", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for part, n_bytes in plan.parts.items():
        table.add_row(_WORDS[part], _gb(n_bytes), "reckoned" if part in plan.reckoned else "")
    table.add_row("[bold]peak", f"[bold]{_gb(plan.peak)}", f"in {_WORDS[plan.phase]}")
    told = f"{'fits' if plan.fits else 'does not fit'}: {_gb(cluster.memory)} GB are for tensors"
    console.print(
        f"{plan.strategy}, micro-batch {plan.micro_batch_size}, {plan.accumulate} {batches} a step, activation "
        f"checkpointing {plan.activation_checkpointing}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table)
    console.print(f"[bold]{told}", highlight=False)
    if plan.host_per_node:
        console.print(f"offloaded, on each machine  {_gb(plan.host_per_node)} GB (reckoned)", highlight=False)


def _work(
    plan: Plan, config: RunConfig, cluster: Cluster, spent: Budget | None, price: float, console: Console
) -> None:
    again = f", {_si(plan.flops_again, 'FLOP')} again for checkpointing" if plan.flops_again else ""
    rate = "" if cluster.sends is None else f": {_seconds(plan.sending_seconds)} at {_si(cluster.sends, 'B/s')}"
    reckoned = " (reckoned)" if "sent" in plan.reckoned else ""
    lines = [
        f"a process sends  {_si(plan.sent, 'B')} a step{reckoned}{rate}",
        f"a step computes  {_si(plan.flops, 'FLOP')}{again}",
    ]
    if spent is None:
        why = "on CPU" if cluster.gpu == "cpu" else f"of {config.trainer.precision}"
        lines.append(f"a step takes     unknown: no peak {why} is known here")
    else:
        peak = _si(GPUS[cluster.gpu].bf16, "FLOP/s")
        lines += [
            f"a step takes     {_seconds(plan.step_seconds)} at {100 * cluster.mfu:g} % of {peak} each, if all sending "
            f"is hidden; {_seconds((plan.step_seconds or 0) + (plan.sending_seconds or 0))} if none is",
            f"all of it        {_si(spent.tokens)} tokens at {_si(spent.tokens_per_second)} a second: "
            f"{spent.days:,.1f} days, {spent.gpu_hours:,.0f} GPU hours, {spent.cost:,.0f} at {price:g} an hour",
        ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _suggestions(plans: list[Plan], console: Console) -> None:
    chosen = best(plans)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("strategy", "checkpointing"):
        table.add_column(title)
    for title in ("micro-batch", "peak GB", "computing", "sending"):
        table.add_column(title, justify="right")
    table.add_column("")
    for plan in plans:
        said = "[bold]best" if plan is chosen else "" if plan.fits else "does not fit"
        table.add_row(
            plan.strategy,
            plan.activation_checkpointing,
            str(plan.micro_batch_size),
            _gb(plan.peak),
            _seconds(plan.step_seconds),
            _seconds(plan.sending_seconds),
            said,
            style="" if plan.fits else "dim",
        )
    console.print("\nOther ways, each with the largest micro-batch that fits:", highlight=False)
    console.print(table)
    if chosen is None:
        console.print("none fits: more GPUs, larger ones, or offloading (docs/cluster.md)", highlight=False)


def asked(parsed: Namespace) -> RunConfig:
    """The run that the command line asks about."""
    config = start.adopted(resolve(Path(parsed.config), common_flags(parsed["set"])))
    if parsed.strategy is None or parsed.strategy == config.trainer.strategy:
        return config
    if parsed.strategy not in STRATEGIES:
        raise UsageError(f"--strategy {parsed.strategy}: give {', '.join(STRATEGIES)}")
    trainer = way(config.trainer, parsed.strategy, config.trainer.activation_checkpointing)
    return dataclasses.replace(config, trainer=trainer)


def plan_run(parsed: Namespace) -> int:
    """Plan one run.

    Raises:
        UsageError: a config, or an option, that is impossible.
    """
    for name in ("tokens", "price"):
        if parsed[name] is not None and not parsed[name] >= 0:
            raise UsageError(f"--{name} {parsed[name]:g}: give at least 0")
    bandwidth = None if parsed.bandwidth is None else parsed.bandwidth * 1e9
    cluster = Cluster(parsed.n_gpus, parsed.gpu, parsed.gpus_per_node, parsed.usable, parsed.mfu, bandwidth)
    config = asked(parsed)
    planner = Planner(config, cluster)
    # On CPU every micro-batch would be a rehearsal of its own.
    ways = [] if parsed.alone or cluster.gpu == "cpu" else planner.ways()
    with bar("rehearsing steps", planner.n_rehearsals([config.trainer, *ways]), quiet=parsed.json) as advance:
        planner.rehearsed = lambda: advance(1)
        plan, impossible = None, ""
        try:
            plan = planner.plan()
        except UsageError as error:
            impossible = str(error)
        others = [found for found in map(planner.largest, ways) if found is not None]
    if plan is None and not others:
        raise UsageError(impossible)
    batch = config.trainer.global_batch_size * config.model.max_seq_len
    tokens = parsed.tokens if parsed.tokens is not None else config.trainer.max_steps * batch
    spent = None if plan is None else budget(plan, config, cluster, tokens, parsed.price)
    if parsed.json:
        chosen = best(others)
        told: dict[str, Any] = {
            "n_params": planner.n_params,
            "cluster": dataclasses.asdict(cluster) | {"memory": cluster.memory, "sends": cluster.sends},
            "plan": None if plan is None else dataclasses.asdict(plan),
            "impossible": impossible or None,
            "budget": None if spent is None else dataclasses.asdict(spent),
            "others": [dataclasses.asdict(other) for other in others],
            "best": None if chosen is None else others.index(chosen),
        }
        print_json(told)
        return 0
    console = Console()
    where = f"{cluster.n_gpus} × {cluster.gpu}" + (" (processes on this machine)" if cluster.gpu == "cpu" else "")
    title = f"[bold]{parsed.config}[/bold]  {planner.n_params:,} parameters on {where}"
    console.print(title, highlight=False, soft_wrap=True)
    if plan is None:
        console.print(f"as it is, impossible: {impossible}", highlight=False, soft_wrap=True, markup=False)
    else:
        _memory(plan, cluster, console)
        _work(plan, config, cluster, spent, parsed.price, console)
        if config.trainer.compile != "no":
            console.print("planned as without trainer.compile, which takes less memory", highlight=False)
    if others:
        _suggestions(others, console)
    return 0

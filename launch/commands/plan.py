"""What `birthmark plan` does: show whether a run fits, what it takes, and which alternative takes least."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich.console import Console

from ...errors import UsageError
from ...plan.cluster import Cluster
from ...plan.planner import Planner, best, budget, with_strategy
from ...plan.table import print_alternatives, print_memory, print_work
from ...report.terminal import bar, print_json
from ...study.trials import common_flags
from ...trainer import initial_weights as start
from ...trainer.config import RunConfig
from ...trainer.config_file import resolve
from ...trainer.strategies.table import STRATEGIES


def planned_config(file: Path, settings: list[str], strategy: str | None) -> RunConfig:
    """The config of a file with fields changed, and its strategy replaced if another is named."""
    config = start.adopted(resolve(file, common_flags(settings)))
    if strategy is None or strategy == config.trainer.strategy:
        return config
    named = next((name for name in STRATEGIES if name == strategy), None)
    if named is None:
        raise UsageError(f"--strategy {strategy}: give {', '.join(STRATEGIES)}")
    trainer = with_strategy(config.trainer, named, config.trainer.activation_checkpointing)
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
    config = planned_config(Path(parsed.config), parsed["set"], parsed.strategy)
    planner = Planner(config, cluster)
    # On CPU every micro-batch would be a rehearsal of its own.
    trainers = [] if parsed.alone or cluster.gpu == "cpu" else planner.alternatives()
    with bar("rehearsing steps", planner.n_rehearsals([config.trainer, *trainers]), quiet=parsed.json) as advance:
        planner.rehearsed = lambda: advance(1)
        plan, impossible = None, ""
        try:
            plan = planner.plan()
        except UsageError as error:
            impossible = str(error)
        others = [found for found in map(planner.largest, trainers) if found is not None]
    if plan is None and not others:
        raise UsageError(impossible)
    batch = config.trainer.global_batch_size * config.model.max_seq_len
    tokens = parsed.tokens if parsed.tokens is not None else config.trainer.max_steps * batch
    whole_run = None if plan is None else budget(plan, config, cluster, tokens, parsed.price)
    if parsed.json:
        chosen = best(others)
        record: dict[str, Any] = {
            "n_params": planner.n_params,
            "cluster": dataclasses.asdict(cluster) | {"memory": cluster.memory, "sends": cluster.sends},
            "plan": None if plan is None else dataclasses.asdict(plan),
            "impossible": impossible or None,
            "budget": None if whole_run is None else dataclasses.asdict(whole_run),
            "others": [dataclasses.asdict(other) for other in others],
            "best": None if chosen is None else others.index(chosen),
        }
        print_json(record)
        return 0
    console = Console()
    where = f"{cluster.n_gpus} × {cluster.gpu}" + (" (processes on this machine)" if cluster.gpu == "cpu" else "")
    title = f"[bold]{parsed.config}[/bold]  {planner.n_params:,} parameters on {where}"
    console.print(title, highlight=False, soft_wrap=True)
    if plan is None:
        console.print(f"as it is, impossible: {impossible}", highlight=False, soft_wrap=True, markup=False)
    else:
        print_memory(plan, cluster, console)
        print_work(plan, config, cluster, whole_run, parsed.price, console)
        if config.trainer.compile != "no":
            console.print("planned as without trainer.compile, which takes less memory", highlight=False)
    if others:
        print_alternatives(others, console)
    return 0

"""`birthmark plan`: show whether a run fits on a cluster, what it takes, and which alternative takes least."""

from __future__ import annotations

import dataclasses
from typing import Any

from jsonargparse import Namespace

from ...errors import UsageError
from ...trainer.config import RunConfig
from ...trainer.config_parser import Parser
from ...trainer.gpu_specs import GPUS
from ...trainer.strategies.table import STRATEGIES
from ..options import add_config, config_with_overrides

SUMMARY = "Show whether a run fits on a cluster and what it takes there (docs/cluster.md)."


def add_options(parser: Parser) -> None:
    """Add the options for the run, the cluster, and the assumptions about both."""
    add_config(parser)
    parser.add_argument("--n_gpus", type=int, required=True, metavar="N", help="GPUs, each with one process.")
    parser.add_argument(
        "--gpu", type=str, default="h100-80gb", help=f"{', '.join(GPUS)}; cpu: processes on this machine."
    )
    parser.add_argument("--gpus_per_node", type=int, default=8, metavar="N", help="GPUs in one machine.")
    parser.add_argument(
        "--strategy", type=str | None, metavar="NAME", help=f"In place of the config's: {', '.join(STRATEGIES)}."
    )
    parser.add_argument(
        "--mfu",
        type=float | None,
        help="Share of the GPU's bf16 peak that a step runs at; by default 0.34, and 0.39 with trainer.compile.",
    )
    parser.add_argument(
        "--bandwidth",
        type=float | None,
        metavar="GB/S",
        help="That a GPU sends: to other machines through its own port (by default 400 Gbit/s, 50 GB/s), or, where "
        "there is one machine, over its link (by default its data sheet's).",
    )
    parser.add_argument(
        "--exposed",
        type=float,
        default=0.43,
        help="Share of the sending between machines that no computing hides (by default as published for 8 and 128 "
        "GPUs, docs/cluster.md).",
    )
    parser.add_argument(
        "--usable", type=float, default=0.92, help="Share of a GPU's memory for tensors; CUDA and NCCL take the rest."
    )
    parser.add_argument(
        "--drive", type=float, default=2.0, metavar="GB/S", help="That a machine writes to the run's file system."
    )
    parser.add_argument("--tokens", type=float | None, metavar="N", help="To train on; by default those of max_steps.")
    parser.add_argument("--price", type=float, default=2.0, help="Price of an hour of one GPU, in any currency.")
    parser.add_argument("--alone", action="store_true", help="Plan the config as it is, without alternatives.")
    parser.add_argument("--json", action="store_true", help="Print it as JSON, in bytes and seconds.")


def _planned_config(config: RunConfig, strategy: str | None) -> RunConfig:
    from ...plan.planner import with_strategy
    from ...trainer import initial_model

    config = initial_model.resolve_init_from(config)
    if config.adapter.is_on:
        raise UsageError(
            f"adapter.kind is {config.adapter.kind}: a plan counts a training of all weights, which takes more; plan "
            "that, --set adapter.kind=none"
        )
    if strategy is None or strategy == config.trainer.strategy:
        return config
    named = next((name for name in STRATEGIES if name == strategy), None)
    if named is None:
        raise UsageError(f"--strategy {strategy}: give {', '.join(STRATEGIES)}")
    trainer = with_strategy(config.trainer, named, config.trainer.activation_checkpointing)
    return dataclasses.replace(config, trainer=trainer)


def run(options: Namespace) -> int:
    """Plan one run.

    Raises:
        UsageError: a config, or an option, that is impossible.
    """
    from rich.console import Console

    from ...plan.cluster import Cluster
    from ...plan.planner import Planner, best, budget
    from ...plan.table import print_alternatives, print_memory, print_upkeep, print_work, upkeep
    from ...report.terminal import bar, print_json, say

    for name in ("tokens", "price"):
        if options[name] is not None and not options[name] >= 0:
            raise UsageError(f"--{name} {options[name]:g}: give at least 0")
    if not options.drive > 0:
        raise UsageError(f"--drive {options.drive:g}: give a positive number")
    bandwidth = None if options.bandwidth is None else options.bandwidth * 1e9
    cluster = Cluster(
        options.n_gpus,
        options.gpu,
        options.gpus_per_node,
        options.usable,
        options.mfu,
        bandwidth,
        options.exposed,
    )
    config = _planned_config(config_with_overrides(options), options.strategy)
    planner = Planner(config, cluster)
    config = planner.config
    # On CPU every micro-batch would be a rehearsal of its own.
    trainers = [] if options.alone or cluster.gpu == "cpu" else planner.alternatives()
    with bar("rehearsing steps", planner.n_rehearsals([config.trainer, *trainers]), quiet=options.json) as advance:
        planner.rehearsed = lambda: advance(1)
        plan, impossible = None, ""
        try:
            plan = planner.plan()
        except UsageError as error:
            impossible = str(error)
        others = [found for found in map(planner.largest, trainers) if found is not None]
    if plan is None and not others:
        raise UsageError(impossible)
    tokens = options.tokens if options.tokens is not None else config.tokens_after(config.trainer.max_steps)
    whole_run = None if plan is None else budget(plan, config, cluster, tokens, options.price)
    beside = None if plan is None else upkeep(planner, config.trainer, options.drive * 1e9)
    if options.json:
        chosen = best(others)
        record: dict[str, Any] = {
            "n_params": planner.n_params,
            "n_active": planner.n_active,
            "cluster": dataclasses.asdict(cluster) | {"memory": cluster.memory},
            "plan": None if plan is None else dataclasses.asdict(plan),
            "impossible": impossible or None,
            "budget": None if whole_run is None else dataclasses.asdict(whole_run),
            "upkeep": None if beside is None else dataclasses.asdict(beside),
            "others": [dataclasses.asdict(other) for other in others],
            "best": None if chosen is None else others.index(chosen),
        }
        print_json(record)
        return 0
    console = Console()
    where = f"{cluster.n_gpus} × {cluster.gpu}" + (" (processes on this machine)" if cluster.gpu == "cpu" else "")
    active = f" ({planner.n_active:,} per token)" if planner.n_active != planner.n_params else ""
    say(console, f"{planner.n_params:,} parameters{active} on {where}", title=options.config)
    if plan is None:
        say(console, f"as it is, impossible: {impossible}")
    else:
        print_memory(plan, cluster, console)
        print_work(plan, config, cluster, whole_run, options.price, console)
        if beside is not None:
            print_upkeep(beside, console)
        if config.trainer.compile != "no":
            say(console, "planned as without trainer.compile, which takes less memory")
    if others:
        print_alternatives(others, console)
    return 0

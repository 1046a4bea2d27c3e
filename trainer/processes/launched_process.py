"""This process among those that a launcher started for one run, from the launcher's environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...child_python import end_with_parent
from ...errors import UsageError

# Variables that are read: rank, ranks, rank on its node, number of its node.
_READ = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_ID",
)

# Steps that srun started have small numbers. Those of sbatch's shell and of salloc's have the largest of 32 bits.
_SHELLS = 0xFFFFFF00

# Ports that a job's step is given one of: below those that systems hand out by themselves.
_PORTS = range(15000, 30000)


def is_srun_task(variables: Mapping[str, str]) -> bool:
    """Return True if srun started a process with these variables; a shell inside an allocation has most of them too."""
    step = variables.get("SLURM_STEP_ID", "")
    return "SLURM_STEP_NUM_TASKS" in variables and step.isdecimal() and int(step) < _SHELLS


def torch_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and so on of a task that srun started, from SLURM's variables.

    Raises:
        UsageError: one of them is missing, or tasks are not spread evenly and in blocks.
    """
    from lightning.fabric.plugins.environments import SLURMEnvironment

    if missing := [name for name in _READ if name not in variables]:
        raise UsageError(f"{missing[0]} is missing in srun's environment: let it through (srun --export=ALL)")
    rank, n, local, node = (variables[name] for name in _READ[:4])
    per_node = re.fullmatch(r"(\d+)(\(x\d+\))?", variables["SLURM_STEP_TASKS_PER_NODE"])
    if per_node is None:
        raise UsageError(
            f"SLURM_STEP_TASKS_PER_NODE={variables['SLURM_STEP_TASKS_PER_NODE']}: start as many on every node, with "
            "srun --ntasks-per-node"
        )
    if (int(node), int(local)) != divmod(int(rank), int(per_node[1])):
        raise UsageError(
            f"srun started task {rank} as number {local} of node {node}: give srun --distribution=block, so that a "
            "node's tasks follow each other"
        )
    number = int(variables["SLURM_JOB_ID"]) + int(variables["SLURM_STEP_ID"])
    return {
        "RANK": rank,
        "WORLD_SIZE": n,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": per_node[1],
        "MASTER_ADDR": SLURMEnvironment.resolve_root_node_address(variables["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(_PORTS[number % len(_PORTS)]),
    }


# ---------------------------------------------------------------- launched process
# This process among those that a launcher started for one run, from the launcher's environment.


@dataclass(frozen=True)
class LaunchedProcess:
    """Place of this process among those of its launcher."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def n_nodes(self) -> int:
        """Number of machines, each with the same number of processes."""
        return self.world_size // self.local_world_size


def launched_process() -> LaunchedProcess | None:
    """Read this process's place from the launcher's environment variables; None without a launcher.

    srun's variables are first copied to their names in torch, so that torch and DeepSpeed read them too.

    Raises:
        UsageError: the variables contradict each other.
    """
    if "RANK" not in os.environ and is_srun_task(os.environ):
        os.environ.update(torch_variables(os.environ))
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    # One process per node, unless the launcher says more; DeepSpeed's has another name for how many.
    names = {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_SIZE", "1")}
    numbers = []
    for name, default in names.items():
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise UsageError(f"{name}={text!r} in the environment is not a number: start with a launcher")
        numbers.append(int(text))
    found = LaunchedProcess(*numbers)
    if not (found.rank < found.world_size and found.local_world_size > 0) or found.world_size % found.local_world_size:
        given = " ".join(f"{name}={number}" for name, number in zip(names, numbers, strict=True))
        raise UsageError(f"{given} in the environment fits no run: start as many on every node, with torchrun")
    return found


def stop_with_agent() -> None:
    """Have Linux send this process SIGTERM when the torchrun agent that started it dies, however it dies.

    The run then stops with a checkpoint. Without this it would train on alone, and a new start would find it locked.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def start_name() -> str:
    """Return a name for this start of the run's processes, which separates it from earlier ones in the launcher's
    store.

    It is torchrun's count of restarts. Several agents count separately, and may differ; but if a process of the run
    serves the store, not an agent, every start has a new store and needs no name.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1" and not launchers_store():
        return "any"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def launchers_store() -> bool:
    """Return True if the store at MASTER_PORT is in the launcher's process; otherwise it is in that of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def restarted() -> bool:
    """Return True if a launcher started this process to replace one that is gone: torchrun after a failure, SLURM after
    a requeue.
    """
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count not in ("", "0") for count in counts)


def restarts_are_counted() -> bool:
    """Return True if :func:`restarted` sees all restarts: torchrun does not count those caused by a node that joins or
    leaves.
    """
    return "TORCHELASTIC_RUN_ID" not in os.environ

"""srun as a launcher: SLURM's variables of a task under the names that torch reads."""

from __future__ import annotations

import re
from collections.abc import Mapping

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

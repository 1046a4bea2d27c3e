#!/usr/bin/env bash
# A job of your own for SLURM, one process for each GPU of a node: sbatch examples/slurm.sh OUT
#
# `sbatch launch/slurm.sbatch` does more: several nodes, a checkpoint before the time is over, and the job queued again.
#SBATCH --job-name=birthmark
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=4:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail
out="${1:?usage: sbatch slurm.sh OUT}"
. .venv/bin/activate # the environment that birthmark is installed in

export PYTHONSAFEPATH=1       # no file of the working folder takes the place of a module
export WANDB_MODE=offline     # nodes often have no network: send it later with `wandb sync`
export OMP_NUM_THREADS=8

# The same command goes on with a run that was cut short: it begins at the last checkpoint.
srun torchrun --standalone --nproc_per_node "$SLURM_GPUS_ON_NODE" -m birthmark.launch.cli \
    pretrain --config demo --run_dir "$out" --trainer.strategy fsdp2

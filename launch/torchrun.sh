#!/usr/bin/env bash
# One run on one node, or on several: the same command on each of them.
#
#   launch/torchrun.sh --config configs/llama2_7b_fsdp2.yaml --run_dir runs/7b
#   NNODES=4 HEAD=node0:29500 launch/torchrun.sh --config …      # node0 is one of them, and all reach it
#   srun --nodes 4 --ntasks-per-node 1 launch/torchrun.sh --config …     # SLURM says which nodes there are
#
# A worker that dies takes its run down and torchrun starts all of them again, up to MAX_RESTARTS times: the run goes on
# from its last checkpoint by itself. With NNODES=2:4 it also goes on with the nodes that are left, as long as
# trainer.global_batch_size is at least the number of processes.
set -euo pipefail
# No file of the working folder takes the place of a module, in any process that this one starts.
export PYTHONSAFEPATH=1

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$here/find_python.sh"

nnodes="${NNODES:-${SLURM_STEP_NUM_NODES:-1}}"
if [ "${SLURM_STEP_NUM_TASKS:-1}" -gt "${SLURM_STEP_NUM_NODES:-1}" ]; then
    echo "torchrun.sh: srun started $SLURM_STEP_NUM_TASKS tasks on $SLURM_STEP_NUM_NODES nodes: give" \
        "--ntasks-per-node 1, or let srun start birthmark pretrain itself, one task per GPU" >&2
    exit 2
fi
if [ -n "${HEAD:-}" ] && [ -z "${NNODES:-}${SLURM_STEP_NUM_NODES:-}" ]; then
    echo "torchrun.sh: HEAD is $HEAD, one of several nodes: give NNODES too, or leave HEAD out" >&2
    exit 2
fi
if [ "$nnodes" = 1 ]; then
    where=(--standalone)
else
    if [ -z "${HEAD:-}" ] && [ -n "${SLURM_STEP_NODELIST:-}" ]; then
        HEAD="$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1):${PORT:-$((15000 + SLURM_JOB_ID % 15000))}"
        RUN_ID="${RUN_ID:-$SLURM_JOB_ID.$SLURM_STEP_ID}"
    fi
    where=(--rdzv_backend c10d --rdzv_endpoint "${HEAD:?NNODES is $nnodes: give HEAD, host:port of one of them}"
        --rdzv_id "${RUN_ID:-birthmark}")
fi
exec "$PYTHON" -m birthmark.launch.torchrun_agent --nnodes "$nnodes" \
    --nproc_per_node "${NPROC:-${SLURM_GPUS_ON_NODE:-gpu}}" --max_restarts "${MAX_RESTARTS:-3}" "${where[@]}" \
    -m birthmark.launch.cli pretrain "$@"

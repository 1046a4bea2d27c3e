#!/usr/bin/env bash
# One run on one node, or on several: the same command on each of them.
#
#   launch/torchrun.sh --config configs/llama2_7b_fsdp2.yaml --run_dir runs/7b
#   NNODES=4 HEAD=node0:29500 launch/torchrun.sh --config …      # node0 is one of them, and all reach it
#
# A worker that dies takes its run down and torchrun starts all of them again, up to MAX_RESTARTS times: the run goes on
# from its last checkpoint by itself. With NNODES=2:4 it also goes on with the nodes that are left, as long as
# trainer.global_batch_size is a multiple of trainer.micro_batch_size × processes.
set -euo pipefail

nnodes="${NNODES:-1}"
if [ "$nnodes" = 1 ]; then
    where=(--standalone)
else
    where=(--rdzv_backend c10d --rdzv_endpoint "${HEAD:?NNODES is $nnodes: give HEAD, host:port of one of them}"
        --rdzv_id "${RUN_ID:-birthmark}")
fi
exec "${PYTHON:-python}" -m birthmark.launch.torchrun_agent --nnodes "$nnodes" --nproc_per_node "${NPROC:-gpu}" \
    --max_restarts "${MAX_RESTARTS:-3}" "${where[@]}" -m birthmark.launch.cli pretrain "$@"

#!/usr/bin/env bash
# One run through DeepSpeed's launcher, which starts the processes on all nodes of a hostfile over ssh.
#
#   launch/deepspeed.sh --config configs/llama2_7b_zero3.yaml --run_dir runs/7b
#   HOSTFILE=my.hosts launch/deepspeed.sh --config …             # lines of `host slots=GPUS`
set -euo pipefail
# No file of the working folder takes the place of a module, in any process that this one starts.
export PYTHONSAFEPATH=1

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$here/find_python.sh"
hostfile="${HOSTFILE:-$here/hostfile}"
[ -f "$hostfile" ] || { echo "deepspeed.sh: HOSTFILE $hostfile: no such file; write lines of 'host slots=GPUS'" >&2; exit 2; }
bad="$(grep -vnE '^[[:space:]]*(#.*)?$|^[^[:space:]]+[[:space:]]+slots=[0-9]+[[:space:]]*$' "$hostfile" || true)"
[ -z "$bad" ] || { echo "deepspeed.sh: HOSTFILE $hostfile: line ${bad%%$'\n'*} is not 'host slots=GPUS'" >&2; exit 2; }
alone=()
if [ "$(grep -vE '^[[:space:]]*(#.*)?$' "$hostfile" | cut -d ' ' -f 1)" = localhost ]; then
    alone=(--no_ssh_check --master_addr 127.0.0.1)  # this machine alone needs no ssh
fi
exec "$PYTHON" -m deepspeed.launcher.runner --hostfile "$hostfile" "${alone[@]}" --master_port "${PORT:-29500}" \
    --no_local_rank --module birthmark.launch.cli pretrain "$@"

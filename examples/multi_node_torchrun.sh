#!/usr/bin/env bash
# Pretrains on several machines: run this same command on each of them, in any order.
#
#   NNODES=2 MASTER_ADDR=node1 bash examples/multi_node_torchrun.sh --preset 350M --data-path PREFIX ... --save RUN
#
# MASTER_ADDR   a machine of the job that the others reach; it hosts the rendezvous. Needed when NNODES > 1.
# MASTER_PORT   a free port there (29500)
# NNODES        machines (1)
# NPROC         workers on this machine (one for each visible GPU, else one)
# JOB_ID        tells jobs apart that share a rendezvous (gptpar)
# MAX_RESTARTS  how many times this machine's workers may be started again after a death (0); see docs/reliability.md
# IFNAME        network interface for NCCL and gloo, if they choose the wrong one
#
# All flags go to `gptpar pretrain`. Data and --save must be the same folders on all machines (a shared file system).
# SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or Ctrl-C on one of them saves and stops all, however long the save takes; a second
# Ctrl-C stops at once. Run it again, with --load RUN, to go on from the last checkpoint.
set -euo pipefail
CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source tools/setup_env.sh run

NNODES="${NNODES:-1}"
MASTER_PORT="${MASTER_PORT:-29500}"
JOB_ID="${JOB_ID:-gptpar}"
if ((NNODES > 1)) && [[ -z "${MASTER_ADDR:-}" ]]; then
    echo "error: NNODES is $NNODES but MASTER_ADDR is not set: name the machine that hosts the rendezvous." >&2
    exit 2
fi
if [[ -z "${NPROC:-}" ]]; then
    NPROC="$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [[ -n "${IFNAME:-}" ]]; then
    export NCCL_SOCKET_IFNAME="$IFNAME" GLOO_SOCKET_IFNAME="$IFNAME"
fi

# torchrun itself would kill the workers 30 seconds after a signal, in the middle of a save.
exec "$PYTHON" -m gptpar launch \
    --nnodes "$NNODES" --nproc-per-node "$NPROC" --max-restarts "${MAX_RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:-localhost}:$MASTER_PORT" --rdzv-id "$JOB_ID" \
    -m gptpar pretrain "$@"

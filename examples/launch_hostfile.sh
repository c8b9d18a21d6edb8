#!/usr/bin/env bash
# Pretrains on the machines of a DeepSpeed-style hostfile, started from one place through ssh.
#
#   bash examples/launch_hostfile.sh [--dry-run] HOSTFILE [flags of gptpar pretrain]
#
# HOSTFILE has a line `host slots=4` for each machine (slots: workers there); # starts a comment. The first host is the
# master. All hosts must have this checkout at this path and let you in by ssh without a password. Ctrl-C, SIGTERM or a
# closed terminal saves and stops all, however long the save takes; a second Ctrl-C stops at once. A host that fails ends
# the job. --dry-run prints the commands and runs nothing.
#
# Environment: MASTER_PORT (29500), IFNAME (network interface for NCCL and gloo), PYTHON (a Python on every host),
# SSH (the command used: ssh), MASTER_ADDR (the first host's address, if others know it by another name).
# `gptpar launch --hostfile` does the rest; it also has --include, --exclude, --num_nodes and --num_gpus.
set -euo pipefail
ROOT="$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"

words=()
if [[ "${1:-}" == --dry-run ]]; then
    words+=(--dry-run)
    shift
fi
[[ $# -ge 1 ]] || { echo "usage: launch_hostfile.sh [--dry-run] HOSTFILE [flags of gptpar pretrain]" >&2; exit 2; }
hostfile="$(realpath -m -- "$1")"
shift
if [[ "${1:-}" == --dry-run ]]; then # behind the hostfile, too
    words+=(--dry-run)
    shift
fi
words+=(--hostfile "$hostfile" --master-port "${MASTER_PORT:-29500}")
[[ -z "${MASTER_ADDR:-}" ]] || words+=(--master-addr "$MASTER_ADDR")
[[ -z "${IFNAME:-}" ]] || export NCCL_SOCKET_IFNAME="$IFNAME" GLOO_SOCKET_IFNAME="$IFNAME"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

cd "$ROOT"
source tools/setup_env.sh run
exec "$PYTHON" -m gptpar launch "${words[@]}" -m gptpar pretrain "$@"

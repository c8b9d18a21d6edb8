#!/usr/bin/env bash
# Pretrains on the machines of a DeepSpeed-style hostfile, started from one place through ssh.
#
#   bash examples/launch_hostfile.sh [--dry-run] HOSTFILE [flags of gptpar pretrain]
#
# HOSTFILE has a line `host slots=4` for each machine (slots: workers there); # starts a comment. The first host is the
# master. All hosts must have this checkout at this path and let you in by ssh without a password. Ctrl-C stops all;
# a host that fails ends the job. --dry-run prints the commands and runs nothing.
#
# Environment: MASTER_PORT (29500), IFNAME (network interface for NCCL and gloo), PYTHON (a Python on every host),
# SSH (the command used: ssh), MASTER_ADDR (the first host's address, if others know it by another name).
set -euo pipefail
ROOT="$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"

dry_run=false
if [[ "${1:-}" == --dry-run ]]; then
    dry_run=true
    shift
fi
[[ $# -ge 1 ]] || { echo "usage: launch_hostfile.sh [--dry-run] HOSTFILE [flags of gptpar pretrain]" >&2; exit 2; }
[[ -r "$1" ]] || { echo "error: the hostfile $1 cannot be read" >&2; exit 2; }
hostfile="$1"
shift

shape='^[[:space:]]*([A-Za-z0-9_.:@][A-Za-z0-9_.:@-]*)[[:space:]]+slots=([1-9][0-9]*)[[:space:]]*$'
hosts=() slots=() problems=() number=0
declare -A line_of=()
while IFS= read -r line || [[ -n "$line" ]]; do
    number=$((number + 1))
    text="${line%%#*}"
    [[ "$text" =~ [^[:space:]] ]] || continue
    if [[ ! "$text" =~ $shape ]]; then
        problems+=("line $number is not 'host slots=NUMBER': $line")
        continue
    fi
    host="${BASH_REMATCH[1]}"
    if [[ -n "${line_of[$host]:-}" ]]; then
        problems+=("line $number names $host again, after line ${line_of[$host]}")
        continue
    fi
    line_of[$host]="$number"
    hosts+=("$host")
    slots+=("${BASH_REMATCH[2]}")
done <"$hostfile"
((${#hosts[@]} + ${#problems[@]})) || problems+=("it names no host")
if ((${#problems[@]})); then
    echo "error: the hostfile $hostfile has ${#problems[@]} problem(s):" >&2
    printf '  %s\n' "${problems[@]}" >&2
    exit 2
fi
# torchrun numbers workers by host and wants the same count on each.
for i in "${!hosts[@]}"; do
    [[ "${slots[i]}" == "${slots[0]}" ]] || problems+=("${hosts[i]} has ${slots[i]} slots, ${hosts[0]} has ${slots[0]}")
done
if ((${#problems[@]})); then
    echo "error: all hosts must have the same number of slots:" >&2
    printf '  %s\n' "${problems[@]}" >&2
    exit 2
fi

master="${MASTER_ADDR:-${hosts[0]##*@}}"
remote_command() { # node rank, then the flags
    local rank="$1"
    shift
    printf 'cd %q && ' "$ROOT"
    [[ -z "${PYTHON:-}" ]] || printf 'export PYTHON=%q && ' "$PYTHON"
    [[ -z "${IFNAME:-}" ]] || printf 'export NCCL_SOCKET_IFNAME=%q GLOO_SOCKET_IFNAME=%q && ' "$IFNAME" "$IFNAME"
    printf 'export OMP_NUM_THREADS=%q && source tools/setup_env.sh run && ' "${OMP_NUM_THREADS:-1}"
    printf '{ "$PYTHON" -m torch.distributed.run'
    printf ' %q' --nnodes "${#hosts[@]}" --nproc-per-node "${slots[0]}" --node-rank "$rank" \
        --master-addr "$master" --master-port "${MASTER_PORT:-29500}" -m gptpar pretrain "$@"
    # The end of its input, be it by Ctrl-C here or by a lost connection, tells a host to save and stop.
    printf '%s' ' </dev/null & child=$!; exec 3<&0; { read -r <&3; kill -TERM $child; } >/dev/null 2>&1 & watcher=$!;' \
        ' wait $child; code=$?; kill $watcher 2>/dev/null; exit $code; }'
}

over_ssh() { # the same for a login shell of any kind
    local command
    command="$(remote_command "$@")"
    echo "bash -c ${command@Q}"
}

read -ra ssh <<<"${SSH:-ssh} -o BatchMode=yes"
if $dry_run; then
    for i in "${!hosts[@]}"; do
        remote="$(over_ssh "$i" "$@")"
        echo "${ssh[*]} ${hosts[i]} ${remote@Q}"
    done
    exit 0
fi

# All hosts read from one pipe, on which nothing is ever written; closing it stops them.
folder="$(mktemp -d)"
mkfifo "$folder/hold"
exec {hold}<>"$folder/hold"
set -m # each host in a process group of its own: a Ctrl-C here is passed on by the trap, once
pids=()
for i in "${!hosts[@]}"; do
    {
        "${ssh[@]}" "${hosts[i]}" "$(over_ssh "$i" "$@")" 2>&1 {hold}>&- |
            sed -u "s/^/${hosts[i]}: /" {hold}>&-
    } <"$folder/hold" {hold}>&- &
    pids+=("$!")
done
rm -r "$folder"
stop_all() { exec {hold}>&-; }
trap 'trap - INT TERM HUP; echo "stopping all hosts" >&2; stop_all; wait; exit 130' INT TERM HUP

status=0
running=${#pids[@]}
while ((running > 0)); do
    code=0
    wait -n -p ended "${pids[@]}" || code=$?
    running=$((running - 1))
    for i in "${!pids[@]}"; do
        [[ "${pids[i]}" == "$ended" ]] || continue
        unset "pids[i]"
        if ((code != 0 && status == 0)); then
            status="$code"
            failed="${hosts[i]}"
            stop_all
        fi
    done
done
if ((status != 0)); then
    echo "error: ${failed} ended with exit code $status; the other hosts were stopped" >&2
fi
exit "$status"

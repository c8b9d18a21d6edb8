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
    # torchrun itself would kill the workers 30 seconds after a signal, in the middle of a save.
    printf '{ "$PYTHON" -m gptpar launch'
    printf ' %q' --nnodes "${#hosts[@]}" --nproc-per-node "${slots[0]}" --node-rank "$rank" \
        --master-addr "$master" --master-port "${MASTER_PORT:-29500}" -m gptpar pretrain "$@"
    # A host is told the signals to pass on; the end of its input, as by a lost connection, asks it to save and stop.
    printf '%s' ' </dev/null & child=$!; exec 3<&0;' \
        ' { while read -r word <&3; do kill -"$word" $child; done; kill -TERM $child; } >/dev/null 2>&1 & watcher=$!;' \
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

# Each host reads from a pipe the signals that it is to pass on.
folder="$(mktemp -d)"
set -m # each host in a process group of its own: a Ctrl-C here is passed on by the trap, once
pids=() pipes=()
for i in "${!hosts[@]}"; do
    mkfifo "$folder/$i"
    exec {pipe}<>"$folder/$i"
    pipes+=("$pipe")
    (
        for other in "${pipes[@]}"; do exec {other}>&-; done
        "${ssh[@]}" "${hosts[i]}" "$(over_ssh "$i" "$@")" 2>&1 | sed -u "s/^/${hosts[i]}: /"
    ) <"$folder/$i" &
    pids+=("$!")
done
rm -r "$folder"
tell_all() { # a signal's name
    for pipe in "${pipes[@]}"; do echo "$1" >&"$pipe"; done
}
stopped=0
on_signal() { # its name and number
    if ((stopped == 0)); then
        stopped=$((128 + $2))
        echo "stopping all hosts; each saves first" >&2 || true # the terminal may be gone
        tell_all TERM
    elif [[ "$1" == INT ]]; then
        echo "stopping all hosts at once" >&2
        tell_all INT
    fi
}
for name in INT TERM HUP USR1 USR2; do
    # shellcheck disable=SC2064 # the name of now
    trap "on_signal $name $(kill -l "$name")" "$name"
done

status=0
while ((${#pids[@]} > 0)); do
    code=0 ended=""
    wait -n -p ended "${pids[@]}" || code=$?
    for i in "${!pids[@]}"; do # none has ended where a signal came
        [[ "${pids[i]}" == "${ended:-}" ]] || continue
        unset "pids[i]"
        if ((code != 0 && status == 0)) && ! ((stopped && code > 128)); then
            status="$code"
            failed="${hosts[i]}"
            tell_all TERM
        fi
    done
done
if ((status != 0)); then
    echo "error: ${failed} ended with exit code $status; the other hosts were stopped" >&2
    exit "$status"
fi
exit "$stopped"

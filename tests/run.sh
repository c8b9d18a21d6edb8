#!/usr/bin/env bash
# Runs the tests, making an environment for them first where there is none: tests/run.sh [pytest arguments]
# tests/run.sh -m fast: the fast tier alone, in a minute or two on two cores.
set -euo pipefail
CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

source tools/setup_env.sh test

# Tests compute on tiny tensors, often in several processes at once: a thread pool in each would only fight over cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Some machines keep no compiled Python: every process that tests start would compile the package again.
unset PYTHONDONTWRITEBYTECODE

echo "tests: $("$PYTHON" -V) at $PYTHON, OMP_NUM_THREADS=$OMP_NUM_THREADS"
[[ $# -gt 0 ]] || set -- tests/
# The whole suite or a tier of it keeps two cores busy with three workers, since many tests wait; more would only fight
# over what the ranks' tests need. (nproc would count OMP_NUM_THREADS.)
if [[ "$1" =~ ^(tests/|-m)$ && "$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)" -gt 1 ]]; then
    set -- --workers 3 "$@"
fi
exec "$PYTHON" -m pytest "$@"

#!/usr/bin/env bash
# Runs the tests, making an environment for them first where there is none: tests/run.sh [pytest arguments]
set -euo pipefail
CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

source tools/setup_env.sh test

# Tests compute on tiny tensors, often in several processes at once: a thread pool in each would only fight over cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "tests: $("$PYTHON" -V) at $PYTHON, OMP_NUM_THREADS=$OMP_NUM_THREADS"
[[ $# -gt 0 ]] || set -- tests/
exec "$PYTHON" -m pytest "$@"

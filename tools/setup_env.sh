# shellcheck shell=bash
# Defines PYTHON, an interpreter that has what gptpar needs, and puts this checkout on PYTHONPATH. To be sourced:
#
#   source tools/setup_env.sh run     to train
#   source tools/setup_env.sh test    to run the tests as well
#   source tools/setup_env.sh dev     to lint and type-check as well
#
# This file only finds a Python to start with; tools/setup_env.py decides and installs, and says what it does.

_setup_env() {
    local CDPATH="" root level="run" candidate starter="" found=""
    root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd)"
    # A caller that names no level lends us its own arguments, which are none of our business.
    case "${1:-}" in test | dev) level="$1" ;; esac

    for candidate in "${PYTHON:-}" "$root/.venv/bin/python" python3 python python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            starter="$candidate"
            break
        fi
    done
    if [[ -z "$starter" ]]; then
        found="$(python3 --version 2>&1 || true)"
        echo "setup: gptpar needs Python 3.11 or newer and found none on PATH (python3 says: ${found:-nothing});" \
            "install one, or set PYTHON=/path/to/python3.12." >&2
        return 1
    fi
    PYTHON="$("$starter" "$root/tools/setup_env.py" "$level")" || return
    PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHON PYTHONPATH
}

# A script must not go on without an environment; an interactive shell must not close.
_setup_env "$@" || { [[ $- == *i* ]] && return 1; exit 1; }
unset -f _setup_env

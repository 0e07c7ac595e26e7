#!/usr/bin/env bash
# Unpacks the releases of Megatron-core in requirements/megatron-versions.txt under .cache/megatron/<version>, for the tests that put one of
# them first on PYTHONPATH. A second call does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
grep -v '^#' requirements/megatron-versions.txt | while read -r requirement; do
    target=.cache/megatron/${requirement##*==}
    if [ -f "$target/.complete" ]; then continue; fi
    rm -rf "$target"
    .tools/bin/uv pip install --quiet --python .venv/bin/python --no-deps --target "$target" "$requirement"
    touch "$target/.complete"
done

#!/usr/bin/env bash
# Runs tests with the lowest version of each dependency that pyproject.toml allows, in a throwaway environment: a bound
# that is too low fails here. $1: pytest's -m. PYTHON: the interpreter, python3 unless set.
set -euo pipefail
cd "$(dirname "$0")/.."

tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
"${PYTHON:-python3}" -m venv "$tool"
"$tool/bin/pip" install --quiet uv
"$tool/bin/uv" pip install --quiet --python "$tool/bin/python" --resolution lowest-direct --all-extras \
    --requirements pyproject.toml --editable .
"$tool/bin/python" -m pytest -n 2 -m "$1"

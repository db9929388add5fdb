#!/usr/bin/env bash
# Resolves pyproject.toml anew into the two lock files. uv runs from a throwaway environment: nothing else needs it.
set -euo pipefail
cd "$(dirname "$0")/.."

tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
python3.11 -m venv "$tool"
"$tool/bin/pip" install --quiet uv

compile() {
    "$tool/bin/uv" pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
        --no-annotate --custom-compile-command "make lock" "$@"
}
compile --group build --output-file requirements-build.lock
compile --all-extras --output-file requirements.lock pyproject.toml

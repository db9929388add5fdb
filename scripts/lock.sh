#!/usr/bin/env bash
# Resolves pyproject.toml anew into the lock files, which hold for every Python that it allows. uv runs from a throwaway environment: nothing else needs it.
set -euo pipefail
cd "$(dirname "$0")/.."

tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
python3 -m venv "$tool"
"$tool/bin/pip" install --quiet uv

compile() {
    "$tool/bin/uv" pip compile --quiet "$@" --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
        --no-annotate --custom-compile-command "make lock"
}
compile --upgrade --group build --output-file requirements-build.lock
compile --upgrade --all-extras --output-file requirements.lock pyproject.toml
# What a node may want, for images, traces too: the same versions, and nothing of what tests and Spark need.
compile --upgrade --extra node --extra tracing --constraint requirements.lock --output-file requirements-node.lock pyproject.toml
# What a local cluster needs: `make up` installs it and nothing else.
compile --upgrade --extra node --extra local --constraint requirements.lock --output-file requirements-local.lock pyproject.toml
# The documentation site: the same versions where both files name a package, because both are installed into .venv.
compile --upgrade --group docs --constraint requirements.lock --constraint requirements-build.lock --output-file requirements-docs.lock

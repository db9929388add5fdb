#!/usr/bin/env bash
# Asks PyPI's advisory database about every pinned dependency. The tool runs from a throwaway environment: nothing else
# needs it.
set -euo pipefail
cd "$(dirname "$0")/.."

tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
python3 -m venv "$tool"
"$tool/bin/pip" install --quiet pip-audit

"$tool/bin/pip-audit" --strict --progress-spinner off --disable-pip --require-hashes -r requirements.lock -r requirements-build.lock -r requirements-docs.lock

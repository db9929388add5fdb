#!/usr/bin/env bash
# Makes .venv from the lock files and installs the project into it. The Makefile calls it when one of them is newer.
set -euo pipefail
cd "$(dirname "$0")/.."

debian_line='sudo apt-get install -y python3.11 python3.11-venv python3-pip make'
python=${PYTHON:-python3.11}
if ! "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    printf 'kvstore needs Python 3.11 with venv and pip. On Debian:\n    %s\n' "$debian_line" >&2
    exit 1
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
install --require-hashes -r requirements-build.lock
install --require-hashes --no-build-isolation -r requirements.lock
install --no-deps --no-build-isolation -e .
touch .venv/.ready

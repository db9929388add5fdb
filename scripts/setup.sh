#!/usr/bin/env bash
# Makes .venv from the lock files and installs the project into it. The Makefile calls it when one of them is newer.
set -euo pipefail
cd "$(dirname "$0")/.."

usable() { "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

optimised() { "$1" -I kvstore/env/interpreter.py; }

# Of several that fit, one that was built with profile-guided optimisation: it takes some 15 to 20 % less processor time.
python=
for candidate in ${PYTHON:-python3.11 python3 /usr/bin/python3.11}; do
    usable "$candidate" || continue
    if optimised "$candidate"; then python=$candidate && break; fi
    python=${python:-$candidate}
done
if [ -z "$python" ]; then
    echo "kvstore needs Python 3.11 with venv and pip. On Debian:" >&2
    echo "    sudo apt-get install -y python3.11 python3.11-venv python3-pip make" >&2
    exit 1
fi

if [ "$(uname -m)" != x86_64 ] && ! command -v cc >/dev/null; then
    echo "On this machine hdrhistogram is compiled. On Debian: sudo apt-get install -y gcc python3.11-dev" >&2
    exit 1
fi

# Two calls at once would install over each other: the second waits, then finds nothing to do.
mkdir -p .venv
exec 9<.venv
flock 9

.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
echo "installing the locked dependencies into .venv (the first time: about 1 GB, some minutes)"
install --require-hashes -r requirements-build.lock
install --require-hashes --no-build-isolation -r requirements.lock
install --no-deps --no-build-isolation -e .
touch .venv/.ready

#!/usr/bin/env bash
# Makes .venv from the lock files and installs the project into it. The Makefile calls it when one of them is newer.
# `setup.sh --local` installs only what a local cluster needs.
# PYTHON=/path/to/python chooses the interpreter. `setup.sh --look` says which one it would take, and installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

# The oldest and the newest Python that it runs on are those of requires-python in pyproject.toml.
first_minor=11
last_minor=14

say() { echo "$*" >&2; }

version() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }
fits() { "$1" -c "import sys; sys.exit(not (3, $first_minor) <= sys.version_info[:2] <= (3, $last_minor))" 2>/dev/null; }
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }
optimised() { "$1" -I kvstore/env/interpreter.py; }
install() { .venv/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check "$@"; }

# Every interpreter by its real path, once: the ones that the caller named, or else all that are on the PATH.
candidates() {
    local names="${PYTHON:-}" minor each path
    if [ -z "$names" ]; then
        names=python3
        for minor in $(seq $first_minor $last_minor); do names="$names python3.$minor /usr/bin/python3.$minor"; done
        names="$names /usr/bin/python3"
    fi
    for each in $names; do
        path=$(command -v "$each" 2>/dev/null) && version "$path" >/dev/null && echo "$path"
    done | awk '!seen[$0]++'
}

# What installs a Python that fits, on this system.
advice() {
    local id="" like="" name="this system"
    if [ -r "${OS_RELEASE:-/etc/os-release}" ]; then
        . "${OS_RELEASE:-/etc/os-release}"
        id=${ID:-} like=${ID_LIKE:-} name=${PRETTY_NAME:-$id}
    elif [ "$(uname -s)" = Darwin ]; then
        id=macos name=macOS
    fi
    case "$id ${VERSION_ID:-}" in
        "debian 9" | "debian 1"[01] | "ubuntu 1"* | "ubuntu 20"* | "ubuntu 21"*)
            say "On $name: its packages have none that is new enough; take its next release, or pyenv"
            return
            ;;
        "ubuntu 22"*)
            say "On $name: sudo apt-get install -y python3.11 python3.11-venv make"
            return
            ;;
    esac
    case " $id $like " in
        *" debian "* | *" ubuntu "*) say "On $name: sudo apt-get install -y python3 python3-venv python3-pip make" ;;
        *" fedora "* | *" rhel "*) say "On $name: sudo dnf install -y python3.12 python3.12-pip make" ;;
        *" suse "* | *" opensuse "*) say "On $name: sudo zypper install -y python312 python312-pip make" ;;
        *" arch "*) say "On $name: sudo pacman -S --needed python make" ;;
        *" alpine "*) say "On $name: wheels are for glibc, and several dependencies have none for musl: use a Debian container" ;;
        *" macos "*) say "On $name: brew install python@3.13" ;;
        *) say "On $name: install Python 3.$first_minor to 3.$last_minor with venv and pip, by its packages or by pyenv" ;;
    esac
    say "Then: make setup; or name one: PYTHON=/path/to/python3.13 make setup"
}

# Of those that fit, the first that was built with profile-guided optimisation: it takes some 15 to 20 % less processor
# time. `python3` comes first, being the one that this system keeps up to date.
python= found=
for candidate in $(candidates); do
    what="$candidate ($(version "$candidate"))"
    if ! fits "$candidate"; then
        found="$found\n  $what: expected 3.$first_minor to 3.$last_minor"
    elif ! has_venv "$candidate"; then
        found="$found\n  $what: has no venv or ensurepip"
    elif optimised "$candidate"; then
        python=$candidate && break
    else
        found="$found\n  $what: not profile-guided"
        python=${python:-$candidate}
    fi
done
if [ -z "$python" ]; then
    say "kvstore needs Python 3.$first_minor to 3.$last_minor with venv and pip. Found here:"
    say "$(printf '%b' "${found:-\n  none}")"
    advice
    exit 1
fi
echo "Python: $python ($(version "$python"))$(optimised "$python" || echo ", not profile-guided: some 15 to 20 % slower")"
if [ "${1:-}" = --look ]; then exit 0; fi

if [ "$(uname -m)" != x86_64 ] && ! command -v cc >/dev/null; then
    say "On this machine hdrhistogram is compiled: install a C compiler and Python's headers."
    say "On Debian: sudo apt-get install -y gcc python3-dev"
    exit 1
fi

if ! command -v flock >/dev/null; then
    say "expected flock (package util-linux): kvstore is installed on Linux; elsewhere use a container (docs/how-to/run-in-containers.md)"
    exit 1
fi

# Two calls at once would install over each other: the second waits, then finds nothing to do.
mkdir -p .venv
exec 9<.venv
flock 9

# An environment of another Python is made anew: what is installed for one is nothing to the other.
same() { [ "$(version .venv/bin/python)" = "$(version "$python")" ]; }
{ .venv/bin/python -m pip --version >/dev/null 2>&1 && { [ -z "${PYTHON:-}" ] && fits .venv/bin/python || same; }; } \
    || "$python" -m venv --clear .venv
if [ "${1:-}" = --local ]; then
    lock=requirements-local.lock size="0.3 GB, a minute"
else
    lock=requirements.lock size="1.7 GB, two minutes"
fi
echo "installing the locked dependencies into .venv, Python $(version .venv/bin/python) (the first time: about $size)"
install --require-hashes -r requirements-build.lock
if [ "${1:-}" != --local ] || .venv/bin/python -c 'import pyspark' 2>/dev/null; then
    install --require-hashes --no-build-isolation -r $lock
    install --no-deps --no-build-isolation -e .
else
    # A local cluster needs 19 MB of pyspark's 490: ZooKeeper's jars. Only these are kept.
    part=$(mktemp -d)
    trap 'rm -rf "$part"' EXIT
    awk '/^[^ ]/ { left = /^(pyspark|py4j)==/ } !left' $lock >"$part/most.lock"
    awk '/^[^ ]/ { left = /^pyspark==/ } left' $lock >"$part/pyspark.lock"
    install --require-hashes --no-build-isolation -r "$part/most.lock"
    install --no-deps --no-build-isolation -e .
    TMPDIR=$part .venv/bin/python -m pip download --quiet --no-cache-dir --disable-pip-version-check --no-deps \
        --no-build-isolation --require-hashes --dest "$part" -r "$part/pyspark.lock"
    .venv/bin/python -c 'import sys; from pathlib import Path; from kvstore.devcluster.zookeeper import unpack_jars
unpack_jars(Path(sys.argv[1]))' "$part"/pyspark-*.tar.gz
fi
touch .venv/.local
if [ "${1:-}" != --local ]; then touch .venv/.ready; fi

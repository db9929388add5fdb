#!/usr/bin/env bash
# Installs the programs that some tests run, from Debian's packages: Chromium, redis-cli, and Prometheus's promtool (into
# build/tools, because Debian's package would start a server). Elsewhere it says why it cannot, and those tests are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "test tools: $*" >&2; }
skipped() { say "$*; tests that need chromium, redis-cli or promtool are skipped where it is missing" && exit 0; }
has() { PATH="$PATH:build/tools" command -v "$1" >/dev/null; }

packages=()
has chromium || has chromium-browser || has google-chrome || packages+=(chromium)
has redis-cli || packages+=(redis-tools)
if [ ${#packages[@]} = 0 ] && has promtool; then exit 0; fi
command -v apt-get >/dev/null || skipped "expected apt-get, got another system"
[ "$(id -u)" = 0 ] || skipped "expected root: sudo apt-get install chromium redis-tools prometheus"
. /etc/os-release
[ "${ID:-}" = debian ] || skipped "${PRETTY_NAME:-this system} has Chromium only as a snap, which containers cannot run"
say "installing what is missing of chromium, redis-cli and promtool (up to 370 MB)"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null || skipped "apt-get update failed"
if [ ${#packages[@]} != 0 ]; then
    apt-get install -qq -y --no-install-recommends "${packages[@]}" >/dev/null || skipped "apt-get install failed"
fi
if ! has promtool; then
    part=$(mktemp -d)
    trap 'rm -rf "$part"' EXIT
    (cd "$part" && apt-get download -qq prometheus) >/dev/null 2>&1 || skipped "apt-get download prometheus failed"
    dpkg-deb -x "$part"/prometheus_*.deb "$part/unpacked"
    install -D -m 0755 "$part/unpacked/usr/bin/promtool" build/tools/promtool
fi

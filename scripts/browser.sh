#!/usr/bin/env bash
# Installs Chromium for the tests of the dashboard, if this system's packages have it and the caller may install them.
# Otherwise it says why and ends well: those tests are skipped then, and no others need a browser.
set -euo pipefail

say() { echo "browser: $*" >&2; }
skipped() { say "$*; tests of the dashboard in a browser are skipped" && exit 0; }
found() { command -v chromium || command -v chromium-browser || command -v google-chrome; }

if found >/dev/null; then exit 0; fi
command -v apt-get >/dev/null || skipped "expected apt-get, got another system: install Chromium yourself"
[ "$(id -u)" = 0 ] || skipped "expected root: sudo apt-get install chromium"
. /etc/os-release
[ "${ID:-}" = debian ] || skipped "${PRETTY_NAME:-this system} has Chromium only as a snap, which containers cannot run"
say "installing chromium (300 MB)"
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } >/dev/null || skipped "apt-get failed"
found >/dev/null || skipped "expected chromium after its installation, got none"

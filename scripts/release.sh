#!/usr/bin/env bash
# Builds what a release publishes into dist/: the wheel, the source distribution, the bill of materials and the hashes of
# all three. The same commit gives the same bytes.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf dist
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) .venv/bin/python -m hatchling build -d dist > /dev/null
tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
python3 -m venv "$tool"
"$tool/bin/pip" install --quiet cyclonedx-bom
"$tool/bin/cyclonedx-py" requirements requirements.lock --pyproject pyproject.toml --output-reproducible \
    --of JSON -o dist/sbom.json 2>/dev/null
cd dist
sha256sum -- * > SHA256SUMS
cat SHA256SUMS

#!/usr/bin/env bash
# Asks PyPI's advisory database about every pinned dependency, and writes what is pinned as a bill of materials
# (CycloneDX, build/sbom.json). The tools run from a throwaway environment: nothing else needs them.
set -euo pipefail
cd "$(dirname "$0")/.."

tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
python3 -m venv "$tool"
"$tool/bin/pip" install --quiet pip-audit cyclonedx-bom

mkdir -p build
"$tool/bin/cyclonedx-py" requirements requirements.lock --pyproject pyproject.toml --output-reproducible \
    --of JSON -o build/sbom.json 2>/dev/null
echo "build/sbom.json names $(grep -c '"purl"' build/sbom.json) packages"
"$tool/bin/pip-audit" --strict --progress-spinner off --disable-pip --require-hashes -r requirements.lock -r requirements-build.lock -r requirements-docs.lock

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
# uPlot is not a package of Python: its files are in the wheel.
python3 - "$(sed -n 's/^# uPlot //p' kvstore/server/ui/files/uplot/README.md)" <<'END'
import json, sys
from pathlib import Path

path, version = Path("dist/sbom.json"), sys.argv[1]
listed = json.loads(path.read_text())
listed["components"].append(
    {
        "type": "library", "name": "uplot", "version": version, "purl": f"pkg:npm/uplot@{version}",
        "bom-ref": f"uplot=={version}", "licenses": [{"license": {"id": "MIT"}}],
    }
)
path.write_text(json.dumps(listed, indent=2) + "\n")
END
cd dist
sha256sum -- * > SHA256SUMS
cat SHA256SUMS

#!/usr/bin/env bash
# Regenerates the modules of kvstore/proto/*.proto, with type stubs, under OUT (default: here). tests/proto checks that nothing changes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
PATH=$PWD/.venv/bin:$PATH

shopt -s nullglob
messages=(kvstore/proto/*.proto)
if [ ${#messages[@]} -eq 0 ]; then exit 0; fi
mapfile -t services < <(grep -lE '^service ' "${messages[@]}" || true)

[ "$out" != . ] || rm -f kvstore/proto/*_pb2*.py kvstore/proto/*_pb2*.pyi
python -m grpc_tools.protoc -I. --python_out="$out" --mypy_out="quiet:$out" "${messages[@]}"
if [ ${#services[@]} -gt 0 ]; then
    python -m grpc_tools.protoc -I. --grpc_python_out="$out" --mypy_grpc_out="quiet:$out" "${services[@]}"
fi

#!/usr/bin/env bash
# Makes kvstorev1/ of kvstore/proto/kv.proto: PROTOC is a protoc; the plugins are those that go.mod pins.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck disable=SC2086  # it may be several words
${PROTOC:-protoc} -I ../.. \
    --plugin=protoc-gen-go="$(go tool -n protoc-gen-go)" \
    --plugin=protoc-gen-go-grpc="$(go tool -n protoc-gen-go-grpc)" \
    --go_out=. --go_opt=module=github.com/kvstore-log/kvstore-go \
    --go-grpc_out=. --go-grpc_opt=module=github.com/kvstore-log/kvstore-go \
    kvstore/proto/kv.proto

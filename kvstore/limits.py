"""Limits of keys, values and batches, and the length of client ids. Clients, servers and partitions share them.

Each endpoint checks them (server/redis/plans.py and pipeline/fast_path.py, server/grpc/decode.py,
server/peer/frames.py). Clients check them before they send (client/core/operations.py), and the leader checks them last
(partition/leading/evaluate.py).
"""

KEY_BYTES_MAX = 4096
"""Maximum bytes of a key. A key has at least one byte."""
VALUE_BYTES_MAX = 1 << 20
BATCH_BYTES_MAX = 1 << 20
"""Maximum bytes of all keys and values in one atomic batch. A single value may reach it."""
BATCH_OPS_MAX = 10_000
"""Maximum operations in one batch."""
CLIENT_BYTES = 16
"""Random bytes of a client's id in request ids, exactly."""

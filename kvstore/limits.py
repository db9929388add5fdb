"""The largest key, value and batch, and the length of a client's id: the same for clients, servers and partitions.

Each endpoint checks them (server/redis/plans.py and pipeline/fast_path.py, server/grpc/decode.py,
server/peer/frames.py), clients do before they send (client/core/operations.py), and the leader at last
(partition/leading/evaluate.py).
"""

KEY_BYTES_MAX = 4096
"""A key has one byte at least."""
VALUE_BYTES_MAX = 1 << 20
BATCH_BYTES_MAX = 1 << 20
"""Keys and values of one atomic batch together; one value may fill it."""
BATCH_OPS_MAX = 10_000
"""Operations of one batch."""
CLIENT_BYTES = 16
"""Exactly so many random bytes name a client in request ids."""

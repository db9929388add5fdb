"""The largest key, value and batch, and the length of a client's id: the same for clients, servers and partitions."""

KEY_BYTES_MAX = 4096
"""A key has one byte at least."""
VALUE_BYTES_MAX = 1 << 20
BATCH_BYTES_MAX = 1 << 20
"""Keys and values of one atomic batch together; one value may fill it."""
CLIENT_BYTES = 16
"""Exactly so many random bytes name a client in request ids."""

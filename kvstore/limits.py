"""Limits of keys, values and batches, and the length of client ids. Clients, servers and partitions share them.

Each endpoint checks them (server/redis/plans.py and pipeline/fast_path.py, server/grpc/decode.py,
server/peer/frames.py). Clients check them before they send (client/core/operations.py), and the leader checks them last
(partition/leading/evaluate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore.coordination_keys import is_coordination_key
from kvstore.errors import InvalidRequest

KEY_BYTES_MAX = 4096
"""Maximum bytes of a key. A key has at least one byte."""
VALUE_BYTES_MAX = 1 << 20
BATCH_BYTES_MAX = 1 << 20
"""Maximum bytes of all keys and values in one atomic batch. A single value may reach it."""
BATCH_OPS_MAX = 10_000
"""Maximum operations in one batch."""
TRANSACTION_KEYS_MAX = 100
"""Maximum number of different keys in one transaction over several partitions. Its keys and values may have
BATCH_BYTES_MAX bytes."""
TRANSACTION_PARTITIONS_MAX = 16
"""Maximum number of partitions of one transaction."""
CLIENT_BYTES = 16
"""Random bytes of a client's id in request ids, exactly."""


# docs/protocol.md Tx1
def check_transaction_keys(keys: Iterable[bytes], partition_of: Callable[[bytes], str]) -> None:
    """Raise InvalidRequest if no transaction over several partitions may have these keys. Keys that are all in one
    partition have only the limits of a batch."""
    keys = {*keys}
    partitions = {*map(partition_of, keys)}
    if len(partitions) <= 1:
        return
    advice = "split the transaction, or put the same {tag} into the keys"
    if len(keys) > TRANSACTION_KEYS_MAX:
        raise InvalidRequest(
            f"expected at most {TRANSACTION_KEYS_MAX} keys in a transaction over several partitions, got {len(keys)}; "
            f"{advice}"
        )
    if len(partitions) > TRANSACTION_PARTITIONS_MAX:
        raise InvalidRequest(
            f"expected keys of at most {TRANSACTION_PARTITIONS_MAX} partitions in a transaction, got keys of "
            f"{len(partitions)}; {advice}"
        )
    if held := sorted(filter(is_coordination_key, keys)):
        raise InvalidRequest(
            "expected no key of a session, lock, election, group, barrier or queue in a transaction over several "
            f"partitions, got {held[0]!r:.100}; write such keys in a batch on their {{tag}}, or rename other keys"
        )

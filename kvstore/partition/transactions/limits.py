"""Decides which operations may be a transaction (docs/protocol.md Tx1). Decides only.

The server that receives a transaction checks it, and home checks it again, because its ring may be newer.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import InvalidRequest
from kvstore.limits import BATCH_BYTES_MAX, KEY_BYTES_MAX, check_transaction_keys
from kvstore.partition.state.commands import Transact
from kvstore.partition.state.operations import size_of
from kvstore.partition.state.traits import IN_BATCH, home_key
from kvstore.types import PartitionId


def check_transaction(op: Transact, partition_of: Callable[[bytes], PartitionId]) -> None:
    """Raise InvalidRequest if the operation cannot be a transaction on the partitions of its keys."""
    if not op.ops or any(each.code not in IN_BATCH for each in op.ops):
        raise InvalidRequest("expected one or more operations that may be in a batch in a transaction")
    if op.key != home_key(op.ops):
        raise InvalidRequest("expected the first key that the transaction writes as its home key, got another key")
    if (size := size_of(op)) > BATCH_BYTES_MAX + KEY_BYTES_MAX:
        raise InvalidRequest(f"expected up to {BATCH_BYTES_MAX} bytes of keys and values in a transaction, got {size}")
    check_transaction_keys((each.key for each in op.ops), partition_of)

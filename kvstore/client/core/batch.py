"""A batch as a caller builds it. Decides only."""

from __future__ import annotations

from kvstore.client.core import operations
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.values import Level
from kvstore.errors import InvalidRequest


def operations_of(batch: Batch) -> list[ClientOperation]:
    """Return the operations of a batch. Raises InvalidRequest for anything but a Batch."""
    if isinstance(batch, Batch):
        return batch.operations
    raise InvalidRequest(f"expected a Batch, got {type(batch).__name__} {batch!r:.80}; build one with `Batch().put(…)`")


class Batch:
    """Operations on one partition that are carried out together or not at all.

    Keys belong to one partition if they share a `{tag}`. Each method adds an operation and returns the batch.
    `client.batch(batch)` returns one result for each operation, in order.

    Examples:
        >>> from kvstore.client import Batch
        >>> transfer = Batch().check(b"{a}/owner", present=False).put(b"{a}/owner", b"Ann").increment(b"{a}/count")
        >>> len(transfer)
        3
    """

    def __init__(self) -> None:
        self.operations: list[ClientOperation] = []

    def put(
        self,
        key: bytes,
        value: bytes,
        *,
        ttl_s: float | None = None,
        if_absent: bool = False,
        if_present: bool = False,
        if_version: int | None = None,
        keep_ttl: bool = False,
    ) -> Batch:
        """Write a key. Result: the new version. See `Client.put` for the arguments."""
        return self._add(
            operations.put(
                key,
                value,
                ttl_s=ttl_s,
                if_absent=if_absent,
                if_present=if_present,
                if_version=if_version,
                keep_ttl=keep_ttl,
            )
        )

    def delete(self, key: bytes, *, if_version: int | None = None) -> Batch:
        """Delete a key. Result: the sequence of the deletion, or 0 if the key was absent."""
        return self._add(operations.delete(key, if_version=if_version))

    def increment(self, key: bytes, delta: int = 1) -> Batch:
        """Add to a decimal number. Result: the sum."""
        return self._add(operations.increment(key, delta))

    def append(self, key: bytes, suffix: bytes) -> Batch:
        """Append to a value. Result: the new length in bytes."""
        return self._add(operations.append(key, suffix))

    def expire(self, key: bytes, ttl_s: float | None) -> Batch:
        """Set the expiry of a key in seconds, or remove it with None. Result: True if the key is present."""
        return self._add(operations.expire(key, ttl_s))

    def check(self, key: bytes, *, version: int | None = None, present: bool | None = None) -> Batch:
        """Carry out the batch only if a condition on a key is met; else the batch raises ConditionFailed. Result: the
        version.

        Args:
            key: The key, which the batch need not write.
            version: The version that the key must have. 0: absent.
            present: True if the key must be present, False if it must be absent. Give either this or `version`.
        """
        return self._add(operations.condition(key, version=version, present=present))

    def get(self, key: bytes) -> Batch:
        """Read a key at this point of the batch. Result: the item or None."""
        return self._add(operations.get(key, Level.LINEARIZABLE))

    def __len__(self) -> int:
        return len(self.operations)

    def _add(self, operation: ClientOperation) -> Batch:
        self.operations.append(operation)
        return self

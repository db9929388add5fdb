"""A batch as a caller builds it. Decides only."""

from __future__ import annotations

from kvstore.client.core import operations
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.values import Level


class Batch:
    """Operations on one partition, all or nothing. Keys share a partition for sure if they share a `{tag}`.

    Each method adds an operation and returns the batch. `client.batch(batch)` gives one result for each, in order.
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
        """Its result: the new version."""
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
        """Its result: the sequence of the delete, 0 if the key was absent."""
        return self._add(operations.delete(key, if_version=if_version))

    def increment(self, key: bytes, delta: int = 1) -> Batch:
        """Its result: the new value."""
        return self._add(operations.increment(key, delta))

    def append(self, key: bytes, suffix: bytes) -> Batch:
        """Its result: the new length."""
        return self._add(operations.append(key, suffix))

    def expire(self, key: bytes, ttl_s: float | None) -> Batch:
        """Its result: whether the key was there."""
        return self._add(operations.expire(key, ttl_s))

    def check(self, key: bytes, *, version: int | None = None, present: bool | None = None) -> Batch:
        """Do the batch only if the key has this version (0: is absent), or is there, or is not; it need not be written.
        Its result: the version. Else the batch raises ConditionFailed."""
        return self._add(operations.condition(key, version=version, present=present))

    def get(self, key: bytes) -> Batch:
        """Its result: the Item at this point of the batch, or None."""
        return self._add(operations.get(key, Level.LINEARIZABLE))

    def __len__(self) -> int:
        return len(self.operations)

    def _add(self, operation: ClientOperation) -> Batch:
        self.operations.append(operation)
        return self

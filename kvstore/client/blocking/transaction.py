# Written by `make generate` from kvstore/client/aio/transaction.py. Edit that file.
"""A blocking transaction: `with client.transaction() as txn`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, TypeVar

from kvstore.client.blocking.engine import BlockingEngine
from kvstore.client.core import operations
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.transaction import TransactionState
from kvstore.client.core.values import Item, Level
from kvstore.errors import ConditionFailed, Conflict, Retryable, StoreError

T = TypeVar("T")


class Transaction:
    """Reads and writes of keys of any partitions that are carried out together or not at all, at one moment.

    Create it with `client.transaction()`. Reads go to the store at once and remember the version that they found.
    Writes are kept back. At the end of the block, one request checks that every key that was read still has its
    version, and carries out the writes. A block that ends with an exception writes nothing.

    Committed transactions are strictly serialisable: each one happens at one moment between its first read and the end
    of its block. Reads inside the block may be of different moments; if they are, the commit fails.

    Raises:
        Conflict: At the end of the block, if another client has changed a key after this transaction read it, or
            another transaction holds a key. Nothing was written. `client.transact` runs a function again in this case.
        ConditionFailed: At the end of the block, if a condition given to `check` or `put` is not met. Nothing was
            written. `key` and `version` are what was found.
        InvalidRequest: At the end of the block, if the transaction has more than 100 keys, 1 MiB or 16 partitions, or a
            key of a session or a lock. Keys that share a `{tag}` belong to one partition, for which only the limits of
            `client.batch` hold.
        OutcomeUnknown: At the end of the block, if the writes may have been carried out.
    """

    def __init__(self, engine: BlockingEngine, timeout_s: float | None) -> None:
        self._engine, self._timeout_s = engine, timeout_s
        self._state = TransactionState()

    def __enter__(self) -> Self:
        self._state.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._commit()
        else:
            self._state.end()

    # ── reads ──

    def get(self, key: bytes, *, level: Level = Level.LINEARIZABLE) -> Item | None:
        """Return the value of a key as this transaction sees it, or None if the key is absent.

        A key that this transaction writes has version 0 until the commit. A key that was read before is not read again.
        Costs one round trip.

        Args:
            key: The key.
            level: How fresh the read must be. The commit checks the version at every level.

        Raises:
            Unavailable: If no server that may answer does so in time.
        """
        operation = operations.get(key, level)
        if self._state.unread([operation.key]):
            self._state.take(operation.key, self._engine.run(operation, self._timeout_s), operation.level)
        return self._state.item(operation.key)

    def get_many(self, keys: Iterable[bytes], *, level: Level = Level.LINEARIZABLE) -> dict[bytes, Item]:
        """Return the keys that are present, each with its item as this transaction sees it. See `get`.

        Args:
            keys: The keys. Repeated keys are read once.
            level: How fresh the reads must be.
        """
        wanted = [operations.get(key, level) for key in operations.distinct(keys)]
        unread = set(self._state.unread(each.key for each in wanted))
        reads = [each for each in wanted if each.key in unread]
        for read, found in zip(reads, self._engine.run_all(reads, self._timeout_s), strict=True):
            self._state.take(read.key, found, read.level)
        items = ((each.key, self._state.item(each.key)) for each in wanted)
        return {key: item for key, item in items if item is not None}

    # ── writes ──

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
    ) -> None:
        """Write a key at the commit. See `Client.put` for the arguments.

        Behind another write of this transaction on the key, a condition is about the key as that write leaves it.

        Raises:
            ConditionFailed: At once, if an earlier write of this transaction leaves the key as the condition excludes
                it. The version is 0, because the key has none until the commit.
            InvalidRequest: If `if_version` is given behind another write of this transaction on the key.
        """
        self._state.write(
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

    def delete(self, key: bytes) -> None:
        """Delete a key at the commit. An absent key is not an error."""
        self._state.write(operations.delete(key))

    def increment(self, key: bytes, delta: int = 1) -> None:
        """Add to a decimal number at the commit. Without a `get` of the key, the transaction does not depend on the
        number that it finds."""
        self._state.write(operations.increment(key, delta))

    def append(self, key: bytes, suffix: bytes) -> None:
        """Append to a value at the commit."""
        self._state.write(operations.append(key, suffix))

    def check(self, key: bytes, *, version: int | None = None, present: bool | None = None) -> None:
        """Commit only if a condition on a key is met; else the commit raises ConditionFailed. Costs no round trip.

        Args:
            key: The key, which the transaction need not read or write.
            version: The version that the key must have. 0: absent.
            present: True if the key must be present, False if it must be absent. Give either this or `version`.
        """
        self._state.require(operations.condition(key, version=version, present=present))

    # ── the end ──

    def attempt(self, function: Callable[[Self], T]) -> T:
        """Call a function with this transaction, commit, and return the function's result: one attempt of
        `client.transact`.

        Raises:
            Conflict: If the transaction cannot commit, or if the function raised an exception after it had read keys
                that never had these values at one moment.
        """
        try:
            result = function(self)
        except Retryable:
            self._state.end()
            raise
        except Exception:
            self._check_reads()
            raise
        self._commit()
        return result

    def _commit(self) -> None:
        self._state.check_open()
        self._state.end()
        self._run(self._state.commit())

    def _check_reads(self) -> None:
        """Raise Conflict if a key has changed after this transaction read it. Does nothing if that cannot be found
        out."""
        self._state.end()
        reads = self._state.reads
        try:
            self._run(reads if len(reads) > 1 else [])
        except Conflict:
            raise
        except StoreError:
            pass

    def _run(self, parts: list[ClientOperation]) -> None:
        if not parts:
            return
        combined = operations.transact(parts, self._engine.routing.partition_of)
        try:
            self._engine.absorb(operations.positions_of(self._engine.run(combined, self._timeout_s)))
        except ConditionFailed as error:
            raise self._state.failure(error) from None

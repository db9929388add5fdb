"""The reads and writes of a transaction until it commits. Decides only.

Reads remember versions, and writes are kept back. At the commit, one request checks the versions and carries out the
writes. So a transaction commits only if everything that it has read is still the current state.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote_from_bytes

from kvstore.client.core.operation import DELETE, PUT, ClientOperation
from kvstore.client.core.operations import condition
from kvstore.client.core.values import Item, Level
from kvstore.errors import ConditionFailed, Conflict, InvalidRequest, StoreError
from kvstore.proto import kv_pb2
from kvstore.rpc.status import MESSAGE_CHARACTERS_MAX

_INTEGER_MIN, _INTEGER_MAX = -(1 << 63), (1 << 63) - 1


class TransactionState:
    """The reads and writes of one transaction."""

    def __init__(self) -> None:
        self._versions: dict[bytes, int] = {}
        """Version of each key that was read, 0 if it was absent, in order of the first read."""
        self._read: dict[bytes, Item | None] = {}
        self._writes: list[ClientOperation] = []
        self._conditions: list[ClientOperation] = []
        self._is_exact = True
        """True if every read was linearizable."""
        self._is_ended = False

    def check_open(self) -> None:
        """Raise InvalidRequest if the transaction has ended."""
        if self._is_ended:
            raise InvalidRequest("the transaction has ended; begin another one")

    def end(self) -> None:
        """Accept no more reads and writes."""
        self._is_ended = True

    # ── reads ──

    def unread(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys that have to be read from the store: those whose value does not follow from earlier reads and
        writes of this transaction."""
        self.check_open()
        return [key for key in keys if key not in self._versions and not any(map(_replaces, self._writes_of(key)))]

    def take(self, key: bytes, found: Item | None, level: int) -> None:
        """Remember what a read found. Of several reads of a key, the first counts."""
        self.check_open()
        if key not in self._versions:
            self._versions[key] = 0 if found is None else found.version
            self._read[key] = found
            self._is_exact = self._is_exact and level in (Level.LINEARIZABLE, Level.STRICT)

    def item(self, key: bytes) -> Item | None:
        """Return the item of a key as this transaction leaves it. The version of a key that this transaction writes is
        0, because it has none yet. Raises InvalidRequest if the value cannot be incremented."""
        found = self._read.get(key)
        for each in self._writes_of(key):
            found = _applied(each, found)
        return found

    def _writes_of(self, key: bytes) -> list[ClientOperation]:
        return [each for each in self._writes if each.key == key]

    # ── writes ──

    def write(self, operation: ClientOperation) -> None:
        """Keep a write back until the commit. Raises ConditionFailed or InvalidRequest if its condition cannot be met
        behind the writes of this transaction on the same key."""
        self.check_open()
        if operation.options is not None and self._writes_of(operation.key):
            self._check_condition(operation.key, operation.options.flags)
        self._writes.append(operation)

    def _check_condition(self, key: bytes, flags: int) -> None:
        """Check the condition of a write on a key that this transaction has written: the store would report the key's
        new version, as if another client had changed the key."""
        if flags & kv_pb2.IF_VERSION:
            raise InvalidRequest(
                f"expected if_version with the first write of {key!r:.100} in the transaction, got it with a later "
                "write; a key that the transaction writes has no version until the commit"
            )
        unmet = kv_pb2.IF_PRESENT if self._is_deleted(key) else kv_pb2.IF_ABSENT
        if flags & unmet:
            raise ConditionFailed(0, key)

    def _is_deleted(self, key: bytes) -> bool:
        """Return True if a key that this transaction writes is absent after its last write."""
        return self._writes_of(key)[-1].code == DELETE

    def require(self, operation: ClientOperation) -> None:
        """Add a condition to the commit."""
        self.check_open()
        self._conditions.append(operation)

    # ── the end ──

    @property
    def reads(self) -> list[ClientOperation]:
        """Conditions that every key still has the version that was read."""
        return [condition(key, version=version) for key, version in self._versions.items()]

    def commit(self) -> list[ClientOperation]:
        """Return the operations of the commit: conditions, then writes. Empty if there is nothing to commit: no key was
        written, and at most one was read, which is a linearizable read by itself."""
        if not self._writes and not self._conditions and len(self._versions) <= 1 and self._is_exact:
            return []
        return [*self.reads, *self._conditions, *self._writes]

    def failure(self, error: ConditionFailed) -> StoreError:
        """Return the error to raise for a condition that was not met: Conflict if a key has changed after it was read,
        otherwise the error itself. An error does not name a long key, which may be one that was read."""
        key = error.key
        if key in self._versions and error.version != self._versions[key]:
            return Conflict(
                f"{key!r:.100} was changed by another client: expected version {self._versions[key]}, got "
                f"{error.version}; run the transaction again"
            )
        if not key and any(len(quote_from_bytes(each)) > MESSAGE_CHARACTERS_MAX for each in self._versions):
            return Conflict("a key was changed by another client after it was read; run the transaction again")
        return error


def _replaces(operation: ClientOperation) -> bool:
    """Return True if the value after the operation does not depend on the value before."""
    return operation.code in (PUT, DELETE)


def _applied(operation: ClientOperation, found: Item | None) -> Item | None:
    """Return a key's item after a write of this transaction."""
    value = b"" if found is None else found.value
    if operation.code == PUT:
        return _written(operation.value)
    if operation.code == DELETE:
        return None
    if operation.code == kv_pb2.APPEND:
        return _written(value + operation.value)
    assert operation.options is not None, "an increment has its delta there"
    try:
        total = int(b"0" if found is None else value) + operation.options.delta
    except ValueError:
        raise InvalidRequest(f"{operation.key!r:.100}: expected a decimal number, got {value!r:.40}") from None
    if not _INTEGER_MIN <= total <= _INTEGER_MAX:
        raise InvalidRequest(f"{operation.key!r:.100}: expected a sum of 64 bits, got {total}")
    return _written(b"%d" % total)


def _written(value: bytes) -> Item:
    return Item(value, 0, 0, 0, 0)

"""Carries out transactions that only read, at the server that received them.

A transaction that only reads usually logs nothing (docs/protocol.md Tx11). The server reads all keys twice: their
versions in a first pass, and their values in a second. A linearizable read waits if a transaction is about to change
its key, so it shows either all of that transaction or nothing. A version never returns once a newer write has replaced
it. So if both passes find the same versions, every key kept its version from the first pass to the second, and the
values belong to one moment between the passes.

This does not hold for a key that is absent in both passes, because another client may have created and deleted it in
between. Therefore the server reads all absent keys at one moment between the two passes, in a separate transaction. If
they belong to one partition, that transaction costs at most one entry of the log. Otherwise it locks the keys.

If keys keep changing between the two passes, the server locks all keys in the same way and reads them then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvstore.errors import (
    ConditionFailed,
    Conflict,
    InvalidRequest,
    OutcomeUnknown,
    StoreError,
    Unavailable,
)
from kvstore.partition.state.commands import Check, Get, Meta, Op, Result, Sink, Transact
from kvstore.partition.state.operations import BATCH_RESULT_BYTES_MAX, is_met
from kvstore.partition.state.traits import APPLIES_NOTHING
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.types import PartitionId

PASSES_MAX = 2
"""Maximum number of times that the server compares two passes. If a key has changed each time, it locks all keys."""
LOCKS_MAX = 8
"""Maximum number of times that the server tries to lock all keys."""
LOCK_AGAIN_S = 0.02
"""Pause in seconds after a failed try to lock all keys, times the number of tries so far."""
_Found = dict[bytes, Any]
"""The results of GET or META in one pass, by key. None means that the key is absent."""


class Reading(Protocol):
    """The part of the dispatcher that is used here."""

    @property
    def topology(self) -> ClusterTopology: ...

    def progress(self, partition: PartitionId) -> tuple[int, int]: ...

    def submit_uncharged(self, op: Op, sink: Sink, token: int, ring_version: int = 0) -> None:
        """Execute an operation on the partition that owns its key, without charging namespaces."""
        ...


def only_reads_several(op: Transact, partition_of: Callable[[bytes], PartitionId]) -> bool:
    """Return True if a transaction writes nothing and has keys of several partitions."""
    return all(each.code in APPLIES_NOTHING for each in op.ops) and len({partition_of(each.key) for each in op.ops}) > 1


def transact_read_only(reading: Reading, op: Transact, sink: Sink, token: int, ring_version: int = 0) -> None:
    """Carry out a transaction that only reads. The caller has checked that the user may read all keys, and has charged
    the namespaces."""
    _ReadTransaction(reading, op, sink, token, ring_version).begin()


class _ReadTransaction(Sink):
    """One running transaction that only reads. It is the sink of its own reads."""

    def __init__(self, reading: Reading, op: Transact, sink: Sink, token: int, ring_version: int) -> None:
        self._reading, self._op, self._ring_version = reading, op, ring_version
        self._sink, self._token = sink, token
        self._keys = list(dict.fromkeys(each.key for each in op.ops))
        self._wanted = {each.key for each in op.ops if each.__class__ is Get}
        """The keys whose values the transaction returns."""
        self._asked: Sequence[bytes] = ()
        """The keys of the current pass."""
        self._results: list[Any] = []
        self._left = 0
        """Number of results of the current pass that have not arrived."""
        self._next: Callable[[_Found], None] = self._take_versions
        self._versions: _Found = {}
        self._attempts = 0

    @property
    def line(self) -> object:
        return self._sink.line

    @property
    def is_gone(self) -> bool:
        return self._sink.is_gone

    def begin(self) -> None:
        """Begin the first pass, which reads the versions of all keys, or lock all keys if they keep changing."""
        self._attempts += 1
        if self._attempts <= PASSES_MAX:
            self._read(self._take_versions, self._keys, [Meta(key, 0, 0) for key in self._keys])
        else:
            # Home is the last partition: it may wait for its keys when all others are locked (docs/protocol.md Tx16).
            keys = sorted(self._keys, key=self._reading.topology.ring.partition_of, reverse=True)
            self._read_at_once(self._take_locked, keys, self._values_of(keys))

    def complete(self, token: int, result: Result | StoreError) -> None:
        self._results[token] = result
        self._left -= 1
        if not self._left:  # not at once: a leader that delivers results accepts no operations meanwhile
            asyncio.get_running_loop().call_soon(self._take)

    def flush(self) -> None:
        """Do nothing. The last result of a pass begins the next step."""

    def _read(self, then: Callable[[_Found], None], keys: Sequence[bytes], ops: Sequence[Op]) -> None:
        self._next, self._asked = then, keys
        self._results, self._left = [None] * len(ops), len(ops)
        for token, op in enumerate(ops):
            self._reading.submit_uncharged(op, self, token, self._ring_version)

    def _read_at_once(self, then: Callable[[_Found], None], keys: Sequence[bytes], ops: Sequence[Op]) -> None:
        """Read keys at one moment, by a transaction that locks them if they belong to several partitions."""
        self._read(
            lambda found: then(dict(zip(keys, found[keys[0]][0], strict=True))),
            keys[:1],
            [Transact(keys[0], tuple(ops))],
        )

    def _take(self) -> None:
        results = self._results
        error = next((each for each in results if isinstance(each, StoreError)), None)
        if error is None and self._sink.is_gone:
            error = Unavailable("its client is gone")
        if isinstance(error, Conflict):
            self._begin_again()
            return
        if error is not None:  # no read changes anything, so an outcome that is unknown is as good as none
            self._end(Unavailable(str(error)) if isinstance(error, OutcomeUnknown) else error)
            return
        self._next(dict(zip(self._asked, results, strict=True)))

    # ── the steps ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_versions(self, found: _Found) -> None:
        """Check conditions and sizes after the first pass, and continue with the absent keys."""
        if self._has_failed(found):
            return
        size = sum(found[each.key][0] for each in self._op.ops if each.__class__ is Get and found[each.key])
        if size > BATCH_RESULT_BYTES_MAX:
            self._end(
                InvalidRequest(
                    f"expected a transaction that returns at most {BATCH_RESULT_BYTES_MAX} bytes, got at least {size}; "
                    "split the transaction"
                )
            )
            return
        self._versions = found
        absent = [key for key in self._keys if found[key] is None]
        if absent:
            self._read_at_once(self._take_absent, absent, [Meta(key, 0, 0) for key in absent])
        else:
            self._read_values()

    def _has_failed(self, found: _Found) -> bool:
        """End the transaction and return True if one of its conditions fails."""
        for each in self._op.ops:
            if each.__class__ is Check and not is_met(int(each.flags), each.version, found[each.key]):
                self._end(ConditionFailed(_version_of(found[each.key]), each.key))
                return True
        return False

    def _take_absent(self, found: _Found) -> None:
        """Continue if all absent keys were absent at one moment."""
        if any(each is not None for each in found.values()):
            self._begin_again()
        elif len(found) == len(self._keys):
            self._answer(found)
        else:
            self._read_values()

    def _read_values(self) -> None:
        present = [key for key in self._keys if self._versions[key] is not None]
        self._read(self._take_values, present, self._values_of(present))

    def _values_of(self, keys: Sequence[bytes]) -> list[Op]:
        return [Get(key, 0, 0) if key in self._wanted else Meta(key, 0, 0) for key in keys]

    def _take_values(self, found: _Found) -> None:
        """Answer if no key has changed since the first pass."""
        if all(_version_of(each) == _version_of(self._versions[key]) for key, each in found.items()):
            self._answer(found)
        else:
            self._begin_again()

    def _take_locked(self, found: _Found) -> None:
        """Answer with what was read while all keys were locked."""
        if not self._has_failed(found):
            self._answer(found)

    def _begin_again(self) -> None:
        locked = self._attempts - PASSES_MAX
        if locked < LOCKS_MAX:
            asyncio.get_running_loop().call_later(max(0, locked) * LOCK_AGAIN_S, self.begin)
        else:
            self._end(Conflict(f"other transactions held the keys of a read transaction {LOCKS_MAX} times in a row"))

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _answer(self, found: _Found) -> None:
        ring = self._reading.topology.ring
        partitions = sorted({ring.partition_of(key) for key in self._keys})
        results = [_result_of(each, found.get(each.key)) for each in self._op.ops]
        self._end((results, [(each, self._reading.progress(each)[0]) for each in partitions]))

    def _end(self, result: Result | StoreError) -> None:
        self._sink.complete(self._token, result)
        self._sink.flush()


def _version_of(found: Any) -> int:
    """Return the version in the result of a GET or META, 0 if the key is absent."""
    return 0 if found is None else int(found[1])


def _result_of(op: Op, found: Any) -> Result:
    """Return the result of an operation from what was found at its key. If the transaction has a GET and a META of one
    key, `found` is the result of the GET."""
    if op.__class__ is Check:
        return _version_of(found)
    if op.__class__ is Meta and found is not None and isinstance(found[0], bytes):
        return (len(found[0]), *found[1:])
    result: Result = found
    return result

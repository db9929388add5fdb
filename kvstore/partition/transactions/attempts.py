"""The attempts of a home leader to carry out transactions, in memory only (docs/protocol.md Tx3). Decides only.

An attempt is alive from its beginning until its decision is acknowledged or it is dropped. While it is alive, home
reports neither COMMITTED nor ABORTED for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from kvstore.errors import InvalidRequest, Overloaded, StoreError
from kvstore.partition.state.commands import Op, Prepare, RequestId, Resolve, Result, Sink, Transact
from kvstore.partition.state.intents import IntentName
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.operations import size_of
from kvstore.partition.state.traits import APPLIES_NOTHING
from kvstore.partition.transactions.limits import check_transaction
from kvstore.partition.transactions.typed_results import restored
from kvstore.types import PartitionId

ATTEMPTS_MAX = 4_096
"""Maximum number of attempts that one leader has in memory. Further transactions are refused with Overloaded."""
ATTEMPTS_BYTES_MAX = 128 << 20
"""Maximum bytes of these transactions: of their keys and values, and of the results that participants have returned.
Further transactions are refused with Overloaded, and so are transactions whose results exceed it."""
CLIENT_SHARE = 4
"""One client may use a quarter of each of these limits. A client is known by its request ids. Transactions without a
request id have only the common limits."""
WAITERS_MAX = 64
"""Maximum number of retries that join one attempt."""

Waiter = tuple[Sink, int]
"""A sink and the token by which it knows the transaction."""
JoinKey = tuple[bytes, int, bytes]
"""Client, sequence, home key."""


class Prepared(msgspec.Struct, frozen=True):
    """A participant's answer once its intents are in its log."""

    partition: PartitionId
    intents: tuple[IntentName, ...]
    results: list[Result | StoreError]
    mark: int


class Part(msgspec.Struct):
    """The operations of a transaction on the keys of one participant."""

    partition: PartitionId
    """The owner when the attempt began."""
    places: list[int]
    """The places of its operations in the transaction."""
    ops: tuple[Op, ...]
    prepared: Prepared | None = None


class Deadline(Protocol):
    """A timer."""

    def cancel(self) -> None: ...

    def cancelled(self) -> bool: ...


class RunningAttempt(msgspec.Struct, eq=False):
    """An attempt in memory."""

    name: Attempt
    op: Transact
    waiters: list[Waiter]
    """The sinks that wait for the result: of the request and of its retries."""
    home: Part
    """The operations on the home partition's own keys."""
    parts: list[Part]
    """The operations on all other keys, by participant."""
    size_bytes: int = 0
    """Bytes of the transaction's keys and values."""
    results_bytes: int = 0
    """Bytes of the results that participants have returned."""
    is_alive: bool = True
    deadline: Deadline | None = None
    """The timer that ends the attempt unless all participants have prepared."""
    began_s: float = 0.0
    """Time of the clock, in seconds, when the attempt began."""
    prepared_s: float = 0.0
    """Time of the clock, in seconds, when the last participant had prepared. 0 means not yet."""
    begun_ms: int = 0
    """Record time of home when the attempt began."""
    is_home_last: bool = False
    """True if home follows all participants in the order in which keys are locked (docs/protocol.md Tx16)."""
    is_in_turn: bool = False
    """True if the transaction writes nothing. Its participants prepare one after the other, so PREPARE may wait at
    each (docs/protocol.md Tx16)."""
    is_sent: bool = False
    """True once DECIDE has been sent to the log. The attempt cannot be dropped any more."""

    @property
    def is_prepared(self) -> bool:
        """True if all participants have prepared."""
        return all(part.prepared is not None for part in self.parts)

    @property
    def written(self) -> int:
        """Number of different keys that the transaction writes."""
        return len(written_keys(self.op.ops))

    @property
    def intents(self) -> tuple[IntentName, ...]:
        """The intents of all participants."""
        return tuple(name for part in self.parts if part.prepared is not None for name in part.prepared.intents)

    @property
    def mark(self) -> int:
        """The highest pin number that a participant has sent."""
        return max((part.prepared.mark for part in self.parts if part.prepared is not None), default=0)

    def prepare(self, part: Part, mark: int) -> Prepare:
        """Return the operation that asks a participant to prepare. Only the last participant may let it wait,
        unless they prepare in turn."""
        waits = self.is_in_turn or part.partition == max(each.partition for each in self.parts)
        whole = (part.ops[0].key, self.op.key, self.name, part.ops, int(self.op.flags), self.written)
        return Prepare(*whole, mark, waits, self.begun_ms)

    def result(self, own: Sequence[Result | StoreError], seq: int) -> Result:
        """Return the transaction's result, from the results of home's own operations and the sequence of the
        decision."""
        results: list[Any] = [None] * len(self.op.ops)
        positions: dict[PartitionId, int] = {self.name.partition: seq}
        for place, result in zip(self.home.places, own, strict=True):
            results[place] = result
        for part in self.parts:
            assert part.prepared is not None
            for place, result in zip(part.places, part.prepared.results, strict=True):
                results[place] = result
            last = max(name.seq for name in part.prepared.intents)
            partition = part.prepared.partition
            positions[partition] = max(last, positions.get(partition, 0))
        return results, [*positions.items()]


class Attempts:
    """The attempts of one leader that are alive."""

    def __init__(self, partition: PartitionId, epoch: int) -> None:
        self._partition, self._epoch = partition, epoch
        self._begun = 0
        self._all, self._by_client = _Load(), dict[bytes, _Load]()
        self.alive: dict[Attempt, RunningAttempt] = {}
        self._by_request: dict[JoinKey, RunningAttempt] = {}

    def __len__(self) -> int:
        return len(self.alive)

    def __iter__(self) -> Iterator[RunningAttempt]:
        return iter([*self.alive.values()])

    def is_running(self, op: Transact) -> bool:
        """Return True if an attempt at the request is alive."""
        return op.request is not None and _join_key(op.request, op.key) in self._by_request

    # docs/protocol.md Tx2
    def join(self, op: Transact, waiter: Waiter) -> bool:
        """Let a retry wait for the running attempt of its request. Returns False if there is none. Raises
        InvalidRequest if the request id is that of another transaction, and Overloaded if too many retries wait."""
        running = self._by_request.get(_join_key(op.request, op.key)) if op.request is not None else None
        if running is None:
            return False
        if running.op.ops != op.ops or running.op.flags != op.flags:
            raise InvalidRequest("the request id was used for another transaction; use a new request id")
        if len(running.waiters) >= WAITERS_MAX:
            raise Overloaded(f"{WAITERS_MAX} retries of the transaction wait for its result; retry later")
        running.waiters.append(waiter)
        return True

    def begin(
        self,
        op: Transact,
        waiter: Waiter,
        is_own: Callable[[bytes], bool],
        owner_of: Callable[[bytes], PartitionId],
    ) -> RunningAttempt:
        """Begin an attempt under a new name. `is_own` returns True for keys that the home partition owns. Raises
        InvalidRequest if the operation cannot be a transaction, and Overloaded if too many are under way."""
        check_transaction(op, lambda key: self._partition if is_own(key) else owner_of(key))
        size_bytes = size_of(op)
        self._charge(op.request, 1, size_bytes)
        home, parts = split(op.ops, self._partition, is_own, owner_of)
        self._begun += 1
        name = Attempt(self._partition, self._epoch, self._begun)
        running = RunningAttempt(name, op, [waiter], home, parts, size_bytes)
        running.is_home_last = self._partition > max((part.partition for part in parts), default=self._partition)
        running.is_in_turn = not running.written
        if running.is_in_turn:
            parts.sort(key=lambda part: part.partition)
        self.alive[running.name] = running
        if op.request is not None:
            self._by_request[_join_key(op.request, op.key)] = running
        return running

    def drop(self, running: RunningAttempt) -> None:
        """End an attempt. From now on only the log decides what home reports about it."""
        running.is_alive = False
        if self.alive.pop(running.name, None) is not None:
            self._release(running)
        if running.deadline is not None:
            running.deadline.cancel()  # its timer keeps the keys and values in memory
        if running.op.request is not None:
            key = _join_key(running.op.request, running.op.key)
            if self._by_request.get(key) is running:
                del self._by_request[key]

    # docs/protocol.md Tx4
    def take(self, running: RunningAttempt, part: Part, prepared: Prepared) -> None:
        """Take a participant's answer. Raises Overloaded if there is no capacity for its results; the attempt must then
        be dropped."""
        part.prepared = prepared
        if running.is_alive:
            results_bytes = _value_bytes(prepared.results)
            self._charge(running.op.request, 0, results_bytes)
            running.results_bytes += results_bytes

    def _charge(self, request: RequestId | None, count: int, size_bytes: int) -> None:
        """Count a transaction, or its bytes. Raises Overloaded if a limit is reached, and counts nothing then."""
        self._all.check(count, size_bytes, 1, "transactions")
        if request is not None:
            mine = self._by_client.get(request.client) or _Load()
            mine.check(count, size_bytes, CLIENT_SHARE, "transactions of one client")
            self._by_client[request.client] = mine.add(count, size_bytes)
        self._all.add(count, size_bytes)

    def _release(self, running: RunningAttempt) -> None:
        size_bytes = running.size_bytes + running.results_bytes
        self._all.add(-1, -size_bytes)
        if running.op.request is not None:
            client = running.op.request.client
            if not self._by_client[client].add(-1, -size_bytes).count:
                del self._by_client[client]


class _Load:
    """The number and the bytes of attempts that are alive: of one client, or of all."""

    __slots__ = ("count", "size_bytes")

    def __init__(self) -> None:
        self.count = self.size_bytes = 0

    def check(self, count: int, size_bytes: int, share: int, whose: str) -> None:
        """Raise Overloaded if this much more exceeds the limits. `share` divides the limits."""
        if self.count + count > ATTEMPTS_MAX // share:
            raise Overloaded(f"{self.count} {whose} are under way at their home, the maximum; retry later")
        if self.size_bytes + size_bytes > ATTEMPTS_BYTES_MAX // share:
            raise Overloaded(
                f"expected {whose} at their home to have at most {ATTEMPTS_BYTES_MAX // share} bytes with their "
                f"results, got {self.size_bytes + size_bytes}; retry later"
            )

    def add(self, count: int, size_bytes: int) -> _Load:
        self.count += count
        self.size_bytes += size_bytes
        return self


def _join_key(request: RequestId, home: bytes) -> JoinKey:
    return request[0], request[1], home


def written_keys(ops: Sequence[Op]) -> set[bytes]:
    """Return the keys that these operations write."""
    return {op.key for op in ops if op.code not in APPLIES_NOTHING}


def split(
    ops: Sequence[Op],
    partition: PartitionId,
    is_own: Callable[[bytes], bool],
    owner_of: Callable[[bytes], PartitionId],
) -> tuple[Part, list[Part]]:
    """Split the operations of a transaction by partition: home's own part, and the parts of all participants."""
    home = Part(partition, [], ())
    parts: dict[PartitionId, Part] = {}
    for place, op in enumerate(ops):
        if is_own(op.key):
            part = home
        else:
            owner = owner_of(op.key)
            part = parts[owner] if owner in parts else parts.setdefault(owner, Part(owner, [], ()))
        part.places.append(place)
    for part in (home, *parts.values()):
        part.ops = tuple(ops[place] for place in part.places)
    return home, [*parts.values()]


def prepared_of(part: Part, result: Any) -> Prepared:
    """Decode a participant's answer to PREPARE. Raises InvalidRequest if it is malformed."""
    try:
        partition, intents, results, mark = result
        names = tuple(IntentName(bytes(key), int(seq)) for key, seq in intents)
        mark = int(mark)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"malformed answer of participant {part.partition}: {error}") from error
    if {name.key for name in names} != {op.key for op in part.ops}:
        raise InvalidRequest(f"expected intents on all keys of participant {part.partition}, got others")
    return Prepared(PartitionId(partition), names, restored(part.ops, results), mark)


# ── operations that home queues for itself ────────────────────────────────────────────────────────────────────────────


class Decide(Transact):
    """Commits an attempt: carries out home's part and logs the decision (docs/protocol.md Tx5). Only the home leader
    itself queues this operation. `ops` are the operations on home's own keys."""

    running: RunningAttempt | None = None


class End(Resolve):
    """Removes a decision, because all of its intents are resolved (docs/protocol.md Tx8). Only the home leader itself
    queues this operation. `key` is the home key."""


def _value_bytes(value: Any) -> int:
    if isinstance(value, bytes):
        return len(value)
    return sum(map(_value_bytes, value)) if isinstance(value, list | tuple) else 0

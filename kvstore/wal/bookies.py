"""Clients of all bookies, by id. The node's own bookie is called directly; each other bookie has its own
connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import TypeVar

from kvstore.env.ports import Env
from kvstore.errors import BookieError, Corrupted, StoreError
from kvstore.proto import bookkeeper as wire
from kvstore.proto.availability import HeldEntries, decode_availability
from kvstore.proto.bookkeeper import NEWEST_LEDGER, BadFrame, BookieOperation, BookieResponse, Status
from kvstore.proto.digest import EntryDigest
from kvstore.proto.shortcuts import TXN_END
from kvstore.proto.version_two import BatchRead
from kvstore.types import NO_ENTRY, NO_LEDGER, BookieId, EntryId, LedgerId
from kvstore.wal.batches import TIMEOUT_S as BATCH_TIMEOUT_S
from kvstore.wal.batches import Batches
from kvstore.wal.connection import AddDone, AnsweredError, Connection, ReadDone, error_of, settle
from kvstore.wal.ports import EntryListener, LocalBookie, ReadAnswer

T = TypeVar("T")

READ_TIMEOUT_S = 5.0
REFUSAL_S = 60.0
"""Seconds for which a refused connection is reported, unless a later connection is accepted."""
LONG_POLL_GRACE_S = 2.0
"""Seconds by which the answer to a long poll may exceed the requested timeout."""
AllDone = Callable[[EntryId, BookieId, StoreError | None], None]
PollDone = Callable[[ReadAnswer | BookieError], None]
LacDone = Callable[[EntryId | BookieError], None]
_ABSENT = (Status.NO_ENTRY, Status.NO_LEDGER)


class BookieClients:
    """The clients of all bookies; implements BookieClient in kvstore.wal.ports. `address` returns the `host:port` of a
    bookie, or None if it is unknown. Connections are opened when they are first needed."""

    def __init__(
        self,
        env: Env,
        address: Callable[[BookieId], str | None],
        *,
        own: tuple[BookieId, LocalBookie] | None = None,
        cluster: str = "",
    ) -> None:
        """`own` is the id and the storage of this node's bookie, if it has one. `cluster` is the instance id of this
        cluster, which bookies compare with their own (docs/protocol.md B32); an empty string is not sent."""
        self.cluster = cluster
        self.own: BookieId | None = own[0] if own else None
        self._next_txn = chain.from_iterable(repeat(range(1, TXN_END))).__next__
        """Shared by all connections, so that a request to several bookies is encoded once. A number is reused only long
        after its request was answered or abandoned."""
        self._env = env
        self._address = address
        self._clients: dict[BookieId, _Local | _Remote] = {own[0]: _Local(*own)} if own else {}

    def add(
        self,
        bookie: BookieId,
        ledger: LedgerId,
        entry: EntryId,
        packet: bytes,
        key: bytes,
        recovery: bool,
        done: AddDone,
    ) -> None:
        """Store an entry packet; see BookieClient."""
        self.add_to_all((bookie,), ledger, entry, packet, key, recovery, lambda _entry, _bookie, error: done(error))

    def add_to_all(
        self,
        bookies: Sequence[BookieId],
        ledger: LedgerId,
        entry: EntryId,
        packet: bytes,
        key: bytes,
        recovery: bool,
        done: AllDone,
    ) -> None:
        """Store an entry packet at each of the bookies, which must be distinct; see BookieClient."""
        txn, frame = 0, b""
        own: _Local | None = None
        for bookie in bookies:
            client = self._clients.get(bookie) or self._at(bookie)
            if isinstance(client, _Local):
                own = client
            else:
                if not frame:
                    txn = self._next_txn()
                    frame = wire.encode_add(txn, ledger, entry, key, packet, recovery)
                client.connection.add(txn, frame, partial(done, entry, bookie))
        if own is not None:
            own.storage.add(ledger, entry, packet, key, recovery=recovery, done=partial(own.added, entry, done))

    def write_lac(self, bookie: BookieId, ledger: LedgerId, key: bytes, body: bytes, lac: EntryId) -> None:
        """Send an explicit LAC packet to a bookie; see BookieClient."""
        self._at(bookie).write_lac(ledger, key, body, lac)

    async def read(
        self, bookie: BookieId, ledger: LedgerId, entry: EntryId, *, fence_key: bytes | None = None, priority: int = 0
    ) -> ReadAnswer:
        """Read one entry, and fence the ledger first if `fence_key` is given; see BookieClient."""
        answer = await self._at(bookie).read(ledger, entry, fence_key, priority)
        return _read_answer(bookie, entry, answer)

    async def read_batch(
        self,
        bookie: BookieId,
        ledger: LedgerId,
        entries: range,
        *,
        bytes_max: int,
        fence_key: bytes | None = None,
        priority: int = 0,
    ) -> Sequence[bytes]:
        """Return packets of some of `entries`; see BookieClient."""
        asked = BatchRead(ledger, entries.start, 0, len(entries), bytes_max, fence_key, priority > 0, passes_over=True)
        return await self._at(bookie).read_batch(asked)

    async def read_lac(self, bookie: BookieId, ledger: LedgerId, digest: EntryDigest) -> EntryId:
        """Return the bookie's last-add-confirmed; see BookieClient."""
        answered: asyncio.Future[EntryId | BookieError] = asyncio.get_running_loop().create_future()
        self.ask_lac(bookie, ledger, digest, partial(settle, answered))
        found = await answered
        if isinstance(found, BookieError):
            raise found
        return found

    def ask_lac(self, bookie: BookieId, ledger: LedgerId, digest: EntryDigest, done: LacDone) -> None:
        """Request the last-add-confirmed without the cost of a task; see BookieClient."""
        self._at(bookie).read_lac(ledger, partial(_reported_lac, bookie, ledger, digest, done))

    def long_poll(
        self, bookie: BookieId, ledger: LedgerId, previous_lac: EntryId, timeout_ms: int, done: PollDone
    ) -> None:
        """Wait until the LAC passes `previous_lac`; see BookieClient."""
        self._at(bookie).long_poll(ledger, previous_lac, timeout_ms, partial(_polled, bookie, done))

    def refusals(self) -> dict[BookieId, str]:
        """Return the bookies that have refused connections of this process within the last REFUSAL_S seconds, each with
        its reason."""
        since = self._env.clock.now() - REFUSAL_S
        remote = {bookie: each.connection for bookie, each in self._clients.items() if isinstance(each, _Remote)}
        found = {bookie: each.refusal[0] for bookie, each in remote.items() if each.refusal[1] >= since}
        return {bookie: reason for bookie, reason in sorted(found.items()) if reason}

    def listen(self, ledger: LedgerId, listener: EntryListener) -> Callable[[], None] | None:
        """Notify `listener` of everything that the node's own bookie stores of the ledger; see BookieClient."""
        own = self._clients.get(self.own) if self.own is not None else None
        return own.listen(ledger, listener) if isinstance(own, _Local) else None

    async def entries(self, bookie: BookieId, ledger: LedgerId) -> HeldEntries:
        """Return the ids of the entries that the bookie holds; see BookieClient."""
        return await self._at(bookie).entries(ledger)

    async def newest_ledger(self, bookie: BookieId) -> LedgerId:
        """Return the highest id of the cluster's own ledgers that the bookie has seen; see BookieClient."""
        return await self._at(bookie).newest_ledger()

    async def space(self, bookie: BookieId) -> tuple[int, int]:
        """Return the total and the free bytes of the bookie's disks. Raises BookieError."""
        return await self._at(bookie).space()

    def close(self) -> None:
        """Close all connections. Outstanding and later requests fail with BookieError."""
        for client in self._clients.values():
            if isinstance(client, _Remote):
                client.connection.close()
                client.batches.close()

    def _at(self, bookie: BookieId) -> _Local | _Remote:
        found = self._clients.get(bookie)
        if found is None:
            batches = Batches(bookie, self._connection(bookie), self._env.clock)
            found = self._clients[bookie] = _Remote(bookie, self._connection(bookie), batches)
        return found

    def _connection(self, bookie: BookieId) -> Connection:
        """Create a connection object, which connects when it is first used."""
        env = self._env
        return Connection(
            bookie,
            self._address,
            self._next_txn,
            clock=env.clock,
            transport=env.transport,
            nursery=env.nursery,
            beat=env.beat,
            cluster=self.cluster,
        )


class _Remote:
    """A bookie on another node, reached through its connections."""

    def __init__(self, bookie: BookieId, connection: Connection, batches: Batches) -> None:
        self.connection, self.batches = connection, batches
        self._bookie = bookie

    def write_lac(self, ledger: LedgerId, key: bytes, body: bytes, lac: EntryId) -> None:
        self.connection.notify(lambda txn: wire.encode_write_lac(txn, ledger, lac, key, body))

    async def read(self, ledger: LedgerId, entry: EntryId, fence_key: bytes | None, priority: int) -> BookieResponse:
        return await self.connection.ask(
            lambda txn: wire.encode_read(txn, ledger, entry, fence_key=fence_key, priority=priority), READ_TIMEOUT_S
        )

    async def read_batch(self, asked: BatchRead) -> list[bytes]:
        return await self.batches.ask(asked)

    def read_lac(self, ledger: LedgerId, done: ReadDone) -> None:
        self.connection.call(lambda txn: wire.encode_read_lac(txn, ledger), READ_TIMEOUT_S, done)

    def long_poll(self, ledger: LedgerId, previous_lac: EntryId, timeout_ms: int, done: ReadDone) -> None:
        self.connection.call(
            lambda txn: wire.encode_long_poll(txn, ledger, previous_lac, timeout_ms),
            timeout_ms / 1000 + LONG_POLL_GRACE_S,
            done,
        )

    async def entries(self, ledger: LedgerId) -> HeldEntries:
        answer = await self.connection.ask(lambda txn: wire.encode_list_entries(txn, ledger), READ_TIMEOUT_S)
        if answer.status in _ABSENT:
            return HeldEntries(())
        if answer.status != Status.OK or answer.body is None:
            raise BookieError(f"{self._bookie}: answered {answer.status}")
        try:
            return decode_availability(answer.body)
        except BadFrame as error:
            raise BookieError(f"{self._bookie}: {error}") from None

    async def newest_ledger(self) -> LedgerId:
        answer = await self.connection.ask(lambda txn: wire.encode_bookie_info(txn, NEWEST_LEDGER), READ_TIMEOUT_S)
        if answer.status != Status.OK:
            raise BookieError(f"{self._bookie}: answered {answer.status}")
        return NO_LEDGER if answer.newest_ledger is None else LedgerId(answer.newest_ledger)

    async def space(self) -> tuple[int, int]:
        answer = await self.connection.ask(wire.encode_bookie_info, READ_TIMEOUT_S)
        if answer.status != Status.OK or answer.total_bytes is None or answer.free_bytes is None:
            raise BookieError(f"{self._bookie}: answered {answer.status}")
        return answer.total_bytes, answer.free_bytes


class _Local:
    """The node's own bookie. Its answers have the same form as answers from the network."""

    def __init__(self, bookie: BookieId, storage: LocalBookie) -> None:
        self._bookie = bookie
        self.storage = storage
        self._loop = asyncio.get_running_loop()

    def added(self, entry: EntryId, done: AllDone, status: int) -> None:
        """Translate the status of an add into the error that `done` expects."""
        done(entry, self._bookie, None if status == 0 else error_of(self._bookie, status))

    def write_lac(self, ledger: LedgerId, key: bytes, body: bytes, lac: EntryId) -> None:
        self.storage.write_lac(ledger, body, key, done=lambda _status: None)

    async def read(self, ledger: LedgerId, entry: EntryId, fence_key: bytes | None, priority: int) -> BookieResponse:
        answered: asyncio.Future[BookieResponse] = self._loop.create_future()
        fence = fence_key is not None
        self.storage.read(ledger, entry, key=fence_key, fence=fence, done=partial(_settle_read, answered, ledger))
        return answered.result() if answered.done() else await self._in_time(answered, READ_TIMEOUT_S)

    async def read_batch(self, asked: BatchRead) -> list[bytes]:
        try:
            async with asyncio.timeout(BATCH_TIMEOUT_S):
                answer = await self.read(LedgerId(asked.ledger), EntryId(asked.entry), asked.fence_key, 0)
        except TimeoutError:
            raise BookieError(f"{self._bookie}: gave no batch in time") from None
        if answer.status != Status.OK or answer.body is None:
            return []
        return self.storage.read_on(asked.ledger, asked.entry, answer.body, asked.limits, passes_over=True)

    def read_lac(self, ledger: LedgerId, done: ReadDone) -> None:
        def on_lac(status: Status, explicit: bytes | None, last: bytes | None) -> None:
            done(BookieResponse(0, BookieOperation.READ_LAC, status, ledger, body=explicit, last_entry=last))

        self.storage.read_lac(ledger, done=on_lac)  # answered from memory, without waiting

    def long_poll(self, ledger: LedgerId, previous_lac: EntryId, timeout_ms: int, done: ReadDone) -> None:
        # The storage applies the timeout itself.
        self.storage.long_poll(ledger, previous_lac, timeout_ms, done=partial(_local_answer, done, ledger))

    def listen(self, ledger: LedgerId, listener: EntryListener) -> Callable[[], None] | None:
        return self.storage.listen(ledger, listener)

    async def newest_ledger(self) -> LedgerId:
        return self.storage.own_ledgers.newest

    async def space(self) -> tuple[int, int]:
        return self.storage.space()

    async def entries(self, ledger: LedgerId) -> HeldEntries:
        answered: asyncio.Future[HeldEntries | StoreError] = self._loop.create_future()

        def listed(status: Status, runs: Sequence[tuple[int, int]]) -> None:
            if answered.done():
                return
            if status != Status.OK and status not in _ABSENT:
                answered.set_result(BookieError(f"{self._bookie}: answered {status.name}"))
            else:
                answered.set_result(HeldEntries.of_runs(runs))

        self.storage.list_entries(ledger, done=listed)
        got = await self._in_time(answered, READ_TIMEOUT_S)
        if isinstance(got, StoreError):
            raise got
        return got

    async def _in_time(self, answered: asyncio.Future[T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            raise BookieError(f"{self._bookie}: did not answer in time") from None


def _reported_lac(
    bookie: BookieId, ledger: LedgerId, digest: EntryDigest, done: LacDone, answer: BookieResponse | BookieError
) -> None:
    if isinstance(answer, BookieError):
        return done(answer)
    if answer.status not in _ABSENT and answer.status != Status.OK:
        return done(AnsweredError(f"{bookie}: answered {answer.status}", answer.status))
    try:
        explicit = digest.open_lac(ledger, answer.body) if answer.body else NO_ENTRY
        last = digest.open(ledger, None, answer.last_entry).lac if answer.last_entry else NO_ENTRY
    except Corrupted as error:
        return done(AnsweredError(f"{bookie}: {error}", Status.IO_ERROR))
    done(max(explicit, last))


def _settle_read(
    answered: asyncio.Future[BookieResponse], ledger: int, status: int, entry: int, packet: bytes | None, lac: int
) -> None:
    if not answered.done():
        answered.set_result(BookieResponse(0, BookieOperation.READ_ENTRY, status, ledger, entry, packet, lac))


def _local_answer(done: ReadDone, ledger: int, status: int, entry: int, packet: bytes | None, lac: int) -> None:
    done(BookieResponse(0, BookieOperation.READ_ENTRY, status, ledger, entry, packet, lac))


def _polled(bookie: BookieId, done: PollDone, answer: BookieResponse | BookieError) -> None:
    if not isinstance(answer, BookieError):
        try:
            done(_read_answer(bookie, EntryId(answer.entry), answer))
            return
        except BookieError as error:
            answer = error
    done(answer)


def _read_answer(bookie: BookieId, entry: EntryId, answer: BookieResponse) -> ReadAnswer:
    lac = NO_ENTRY if answer.max_lac is None else EntryId(answer.max_lac)
    if answer.status in _ABSENT:
        return ReadAnswer(entry, None, lac)
    error = error_of(bookie, answer.status)
    if error is not None:
        raise error if isinstance(error, BookieError) else BookieError(str(error))
    return ReadAnswer(entry, answer.body, lac)

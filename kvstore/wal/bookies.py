"""All bookies by id: the node's own by plain calls, each of the others over one connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.env.ports import Env, Nursery
from kvstore.errors import BookieError, Corrupted
from kvstore.proto import bookkeeper as wire
from kvstore.proto.availability import decode_availability
from kvstore.proto.bookkeeper import Answer, BadFrame, Status
from kvstore.proto.digest import EntryDigest
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerId
from kvstore.wal.connection import AddDone, Connection, error_of
from kvstore.wal.ports import LocalBookie, ReadAnswer

READ_TIMEOUT_S = 5.0
LONG_POLL_GRACE_S = 2.0
"""How much later than asked for a long poll may be answered."""
_ABSENT = (Status.NO_ENTRY, Status.NO_LEDGER)


class Bookies:
    """A BookieClient (kvstore.wal.ports). `address` says where a bookie listens, None if nobody knows."""

    def __init__(
        self,
        env: Env,
        address: Callable[[BookieId], str | None],
        *,
        own: tuple[BookieId, LocalBookie] | None = None,
        nursery: Nursery | None = None,
    ) -> None:
        self._env = env
        self._nursery = nursery or env.nursery
        self._address = address
        self.own: BookieId | None = own[0] if own else None
        self._local = own[1] if own else None
        self._connections: dict[BookieId, Connection] = {}

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
        if bookie == self.own and self._local is not None:
            self._local.add(ledger, entry, packet, key, recovery=recovery, done=done)
            return
        self._to(bookie).add(lambda txn: wire.encode_add(txn, ledger, entry, key, packet, recovery), done)

    def write_lac(self, bookie: BookieId, ledger: LedgerId, key: bytes, body: bytes, lac: EntryId) -> None:
        """Tell a bookie the last confirmed entry; best effort."""
        if bookie == self.own and self._local is not None:
            self._local.write_lac(ledger, key, body)
            return
        self._to(bookie).tell(lambda txn: wire.encode_write_lac(txn, ledger, lac, key, body))

    async def read(
        self, bookie: BookieId, ledger: LedgerId, entry: EntryId, *, fence_key: bytes | None = None, priority: int = 0
    ) -> ReadAnswer:
        """Read one entry, fencing the ledger first if a key is given; see BookieClient."""
        if bookie == self.own and self._local is not None:
            return await self._local.read(ledger, entry, fence_key=fence_key)
        answer = await self._to(bookie).ask(
            lambda txn: wire.encode_read(txn, ledger, entry, fence_key=fence_key, priority=priority), READ_TIMEOUT_S
        )
        return _read_answer(bookie, entry, answer)

    async def read_lac(self, bookie: BookieId, ledger: LedgerId, digest: EntryDigest) -> EntryId:
        """The bookie's last add confirmed; see BookieClient."""
        if bookie == self.own and self._local is not None:
            explicit, last = await self._local.read_lac(ledger)
        else:
            answer = await self._to(bookie).ask(lambda txn: wire.encode_read_lac(txn, ledger), READ_TIMEOUT_S)
            if answer.status not in _ABSENT and answer.status != Status.OK:
                raise BookieError(f"{bookie}: answered {answer.status}")
            explicit, last = answer.body, answer.last_entry
        try:
            first = digest.open_lac(ledger, explicit) if explicit else NO_ENTRY
            return max(first, digest.open(ledger, None, last).lac if last else NO_ENTRY)
        except Corrupted as error:
            raise BookieError(f"{bookie}: {error}") from None

    async def long_poll(self, bookie: BookieId, ledger: LedgerId, previous_lac: EntryId, timeout_ms: int) -> ReadAnswer:
        """Wait for the LAC to pass `previous_lac`; see BookieClient."""
        if bookie == self.own and self._local is not None:
            return await self._local.long_poll(ledger, previous_lac, timeout_ms)
        answer = await self._to(bookie).ask(
            lambda txn: wire.encode_long_poll(txn, ledger, previous_lac, timeout_ms),
            timeout_ms / 1000 + LONG_POLL_GRACE_S,
        )
        return _read_answer(bookie, EntryId(answer.entry), answer)

    async def entries(self, bookie: BookieId, ledger: LedgerId) -> Sequence[int]:
        """The ids of the entries that the bookie holds; see BookieClient."""
        if bookie == self.own and self._local is not None:
            return await self._local.entries(ledger)
        answer = await self._to(bookie).ask(lambda txn: wire.encode_list_entries(txn, ledger), READ_TIMEOUT_S)
        if answer.status in _ABSENT:
            return []
        if answer.status != Status.OK or answer.body is None:
            raise BookieError(f"{bookie}: answered {answer.status}")
        try:
            return decode_availability(answer.body)
        except BadFrame as error:
            raise BookieError(f"{bookie}: {error}") from None

    def is_up(self, bookie: BookieId) -> bool:
        """Whether there is a connection to it just now."""
        return bookie == self.own or (bookie in self._connections and self._connections[bookie].is_up)

    def close(self) -> None:
        """Fail what is outstanding; nothing is sent any more."""
        for connection in self._connections.values():
            connection.close()

    def _to(self, bookie: BookieId) -> Connection:
        connection = self._connections.get(bookie)
        if connection is None:
            env = self._env
            connection = self._connections[bookie] = Connection(
                bookie, self._address, clock=env.clock, transport=env.transport, nursery=self._nursery
            )
        return connection


def _read_answer(bookie: BookieId, entry: EntryId, answer: Answer) -> ReadAnswer:
    lac = NO_ENTRY if answer.max_lac is None else EntryId(answer.max_lac)
    if answer.status in _ABSENT:
        return ReadAnswer(entry, None, lac)
    error = error_of(bookie, answer.status)
    if error is not None:
        raise BookieError(str(error))
    return ReadAnswer(entry, answer.body, lac)

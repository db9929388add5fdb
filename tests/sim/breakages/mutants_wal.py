"""Ways to break the ledger client and the log. Tests must notice each; `make mutants` tries them all.

Every breakage is a patch that lasts for one run; nothing in kvstore/ knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore.errors import BookieError, MetadataError, MetadataLost
from kvstore.meta import codec, paths
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.store import SetData
from kvstore.proto.digest import HEADER, EntryDigest, Packet
from kvstore.types import NO_ENTRY, EntryId, LedgerState, PartitionId
from kvstore.wal import ensembles, opener, placement, recovery
from kvstore.wal.choice import BookieChoice
from kvstore.wal.copies.copying import Copying
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.handle import LedgerHandle
from kvstore.wal.leading.anchors import Anchors
from kvstore.wal.leading.leader_log import LeaderLog
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.lists import LedgerLists
from kvstore.wal.recovery import EntryAnswer, LastAnswer, Recovery, Unknown
from kvstore.wal.tailing.ledger_end import LedgerEnd
from kvstore.wal.tailing.tail import TailReader
from kvstore.wal.takeover import LogTakeover
from kvstore.wal.writer import LedgerWriter, WriterState
from tests.sim.breakages import mutants_ids

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = dict(mutants_ids.MUTANTS)


def mutant(name: str) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        MUTANTS[name] = patch
        return patch

    return register


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Apply the breakage to the code in the block."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        MUTANTS[name](monkeypatch)
        yield


@mutant("two processes of a machine get copies of an entry")
def _process_as_machine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placement, "machine_of", lambda node: node)


@mutant("recovery reads do not fence")
def _unfenced(patch: pytest.MonkeyPatch) -> None:
    async def ask(self: Any, bookie: Any, entry: Any) -> None:
        key = self._key if entry is None else None
        wanted = NO_ENTRY if entry is None else entry
        try:
            answer = await self._ports.bookies.read(bookie, self.metadata.ledger, wanted, fence_key=key)
        except BookieError:
            self._handle(Unknown(bookie, entry))
            return
        self._handle(LastAnswer(bookie, answer.packet) if entry is None else EntryAnswer(bookie, entry, answer.packet))

    patch.setattr(opener._Run, "_ask", ask)


@mutant("a recovery publishes its ensemble early")
def _early(patch: pytest.MonkeyPatch) -> None:
    original = opener._Run._replace

    def replace(self: Any) -> None:
        original(self)
        published = self.metadata

        async def publish() -> None:
            try:
                await self._ports.ledgers.update(published.ledger, lambda _: published)
            except MetadataError:
                return

        self._nursery.spawn(publish(), name="publish early")

    patch.setattr(opener._Run, "_replace", replace)


@mutant("unknown counts as absent")
def _unknown_is_absent(patch: pytest.MonkeyPatch) -> None:
    original = Recovery._silence

    def silence(self: Any, bookie: Any, entry: Any) -> Any:
        if entry is None or entry not in self._asked:
            return original(self, bookie, entry)
        self._asked[entry].absent.add(self._ensemble.index(bookie))
        return self._decide()

    patch.setattr(Recovery, "_silence", silence)


@mutant("one negative ends a recovery")
def _one_negative(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "is_window_covered", lambda window, definite, quorum: any(i in definite for i in window))


@mutant("acknowledges while the ensemble changes")
def _acks_in_change(patch: pytest.MonkeyPatch) -> None:
    original = LedgerWriter._confirm_ready

    def confirm_ready(self: Any) -> Any:
        state = self.state
        if state is WriterState.CHANGING:
            self.state = WriterState.OPEN
        try:
            return original(self)
        finally:
            self.state = state

    patch.setattr(LedgerWriter, "_confirm_ready", confirm_ready)


@mutant("copies on replaced bookies count")
def _old_acks(patch: pytest.MonkeyPatch) -> None:
    original = LedgerWriter._resume

    def resume(self: Any, metadata: Any, replaced: Any) -> Any:
        acks = {entry: sent.acks for entry, sent in self._sent.items()}
        confirm, self._confirm_ready = self._confirm_ready, list
        commands = original(self, metadata, replaced)
        self._confirm_ready = confirm
        for entry, sent in self._sent.items():
            sent.acks |= acks[entry]
        return [*commands, *self._confirm_ready()]

    patch.setattr(LedgerWriter, "_resume", resume)


@mutant("the writer changes a ledger that is not open")
def _not_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ensembles, "_check_open", lambda recorded: None)


@mutant("the lease is not waited out")
def _no_wait(patch: pytest.MonkeyPatch) -> None:
    async def wait_out(self: Any, listed: Any, taken: Any) -> None:
        return

    patch.setattr(LogTakeover, "_wait_out", wait_out)


@mutant("the LAC is ahead")
def _lac_ahead(patch: pytest.MonkeyPatch) -> None:
    original = LedgerWriter.append

    def append(self: Any, payload: bytes, now: float) -> Any:
        confirmed, self._frozen_lac = self._frozen_lac, EntryId(self.last_added + 1)
        try:
            return original(self, payload, now)
        finally:
            self._frozen_lac = confirmed

    patch.setattr(LedgerWriter, "append", append)


@mutant("the list is written without compare")
def _blind_list(patch: pytest.MonkeyPatch) -> None:
    async def write(self: Any, partition: Any, listed: Any, version: int, **_: Any) -> int:
        path = paths.partition_log(partition)
        _, stat = await self._store.get(path)
        await self._store.multi([SetData(path, codec.encode(listed), stat.version)])
        return int(stat.version + 1)

    patch.setattr(LedgerLists, "write", write)


@mutant("a rolled ledger is not listed")
def _unlisted(patch: pytest.MonkeyPatch) -> None:
    original = LeaderLog._write_list

    async def write_list(self: Any, listed: Any, created: Any = None) -> None:
        if created is None:
            await original(self, listed, created)

    patch.setattr(LeaderLog, "_write_list", write_list)


@mutant("entries go to the next ledger before the last one's are acknowledged")
def _no_drain(patch: pytest.MonkeyPatch) -> None:
    drained, close = LedgerHandle.drained, LedgerHandle.close

    async def at_once(self: Any) -> None:
        return

    async def close_later(self: Any) -> None:
        await drained(self)
        await close(self)

    patch.setattr(LedgerHandle, "drained", at_once)
    patch.setattr(LedgerHandle, "close", close_later)


@mutant("a takeover recovers the last ledger only")
def _last_only(patch: pytest.MonkeyPatch) -> None:
    make = LedgerLists.make
    attempt = LogTakeover._attempt

    class LastOnly:
        """The lists as a reader of the last ledger only sees them."""

        def __init__(self, lists: LedgerLists) -> None:
            self._lists = lists

        async def make(self, partition: PartitionId) -> tuple[Any, int]:
            listed, version = await make(self._lists, partition)
            return _Short(listed), version

        async def write(self, partition: PartitionId, listed: Any, version: int, **rest: Any) -> int:
            return await self._lists.write(partition, listed, version, **rest)

        def is_long(self, partition: PartitionId) -> bool:
            return bool(self._lists.is_long(partition))

    async def short_sighted(self: Any, *where: Any) -> Any:
        lists, self._lists = self._lists, LastOnly(self._lists)
        try:
            return await attempt(self, *where)
        finally:
            self._lists = lists

    patch.setattr(LogTakeover, "_attempt", short_sighted)


class _Short:
    """A list whose last two ledgers are one."""

    def __init__(self, listed: Any) -> None:
        self._listed = listed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listed, name)

    @property
    def ledgers(self) -> Any:
        return _LastOne(self._listed.ledgers)


class _LastOne(tuple[Any, ...]):
    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        return found[-1:] if where == slice(-2, None) else found


# docs/protocol.md T2
@mutant("a listed successor counts as the end of a ledger")
def _early_end(patch: pytest.MonkeyPatch) -> None:
    original = TailReader._available

    async def available(self: Any) -> Any:
        entries = await original(self)
        if not entries and self._reader is not None:
            await self._move_on(self._reader)
        return entries

    patch.setattr(TailReader, "_available", available)


@mutant("a tailer reads beyond the LAC")
def _beyond_lac(patch: pytest.MonkeyPatch) -> None:
    original: Any = LedgerEnd.limit

    def limit(self: Any) -> EntryId:
        is_open = self._reader.metadata.state is LedgerState.OPEN
        return EntryId(original.fget(self) + is_open)

    patch.setattr(LedgerEnd, "limit", property(limit))


@mutant("a tail believes a number without a digest")
def _unverified_lac(patch: pytest.MonkeyPatch) -> None:
    async def believe(self: Any, _asked: Any, answer: Any) -> None:
        self._believe(answer, answer.max_lac)

    patch.setattr(LedgerEnd, "_verify", believe)


@mutant("a lease counts from the acknowledgement")
def _resend_moves(patch: pytest.MonkeyPatch) -> None:
    original = LedgerHandle._confirm

    def confirm(self: Any, entry: Any, sent_at: float) -> None:
        original(self, entry, self._now())

    patch.setattr(LedgerHandle, "_confirm", confirm)


@mutant("any release record in the last two ledgers saves the wait")
def _old_release(patch: pytest.MonkeyPatch) -> None:
    async def is_released(self: Any, taken: Any) -> bool:
        for each in taken:
            for entry in range(each.last + 1):
                reader = EntryReader(each._snapshot, self._ports.bookies, self._nursery)
                if self._is_release((await reader.read(EntryId(entry))).payload):
                    return True
        return False

    patch.setattr(LogTakeover, "_is_released", is_released)


@mutant("a recovery's packets carry a LAC that moves")
def _moving_lac(patch: pytest.MonkeyPatch) -> None:
    def make(*values: Any, frozen_lac: Any, **others: Any) -> LedgerWriter:
        return LedgerWriter(*values, **others)

    patch.setattr(opener, "LedgerWriter", make)


@mutant("a recovery begins below its last fragment")
def _low_floor(patch: pytest.MonkeyPatch) -> None:
    original = Recovery.__init__

    def begin(self: Recovery, *values: Any) -> None:
        original(self, *values)
        self.lac = NO_ENTRY

    patch.setattr(Recovery, "__init__", begin)


@mutant("nobody is told that the last entry is confirmed")
def _silent_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedgerHandle, "_send_lac", lambda self, _: setattr(self, "_lac_timer", None))


@mutant("what an answer calls for is done in the middle of something else")
def _no_queue(patch: pytest.MonkeyPatch) -> None:
    def perform_all(self: Any, commands: Any) -> None:
        for command in commands:
            self._perform(command)
        if self._is_changing and self.writer.state is not WriterState.CHANGING:
            self._is_changing = False
            self._settled.set()

    patch.setattr(LedgerHandle, "_perform_all", perform_all)


@mutant("a leader goes on without its anchors")
def _adrift(patch: pytest.MonkeyPatch) -> None:
    async def guard(self: Any) -> None:
        return

    patch.setattr(Anchors, "guard", guard)


@mutant("a server that lags ends a lead")
def _no_second_look(patch: pytest.MonkeyPatch) -> None:
    async def check(self: Any, doubted: set[str]) -> None:
        for path in sorted(doubted):
            if (fault := await self._fault(path)) is not None:
                raise MetadataLost(fault)

    patch.setattr(Anchors, "_check", check)


@mutant("a tail passes over what a batch lacks")
def _passed_over(patch: pytest.MonkeyPatch) -> None:
    async def read_many(_: Any, reader: Any, first: Any, last: Any, bytes_left: int) -> Any:
        found = await reader.read_batch([EntryId(entry) for entry in range(first, last + 1)], bytes_left)
        return [found[entry] for entry in sorted(found)]

    patch.setattr(TailReader, "_read_many", read_many)


@mutant("the packets of a batch are taken by their places")
def _by_place(patch: pytest.MonkeyPatch) -> None:
    original = EntryDigest.open_those

    def open_those(self: Any, ledger: Any, packets: Any, wanted: Any) -> Any:
        good = original(self, ledger, packets, wanted).values()
        return {at: (packet._replace(entry=at), raw) for at, (packet, raw) in zip(sorted(wanted), good, strict=False)}

    patch.setattr(EntryDigest, "open_those", open_those)


@mutant("the packets of a batch are not checked")
def _unchecked_batch(patch: pytest.MonkeyPatch) -> None:
    def open_those(self: Any, _: Any, packets: Any, wanted: Any) -> Any:
        parts = [(HEADER.unpack_from(each), each) for each in packets]
        return {
            EntryId(entry): (Packet(EntryId(entry), EntryId(lac), length, raw[HEADER.size + self.size :]), raw)
            for (_, entry, lac, length), raw in parts
            if entry in wanted
        }

    patch.setattr(EntryDigest, "open_those", open_those)


@mutant("a recovery takes what a batch lacks for absent")
def _absent_in_batch(patch: pytest.MonkeyPatch) -> None:
    original = opener._Run._ask

    async def ask(self: Any, bookie: Any, entry: Any) -> None:
        ahead = self._ahead[bookie]
        if entry is not None and self._recovery.found >= recovery.READ_AHEAD:
            self._handle(EntryAnswer(bookie, entry, await ahead.take(entry)))
        else:
            await original(self, bookie, entry)

    patch.setattr(opener._Run, "_ask", ask)


@mutant("a check takes what a batch lacks for good")
def _good_in_batch(patch: pytest.MonkeyPatch) -> None:
    async def good_copies(_self: Any, _bookie: Any, entries: Any) -> Any:
        return set(entries)

    patch.setattr(Copying, "_good_copies", good_copies)


@mutant("a machine that is registered twice counts twice")
def _counted_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BookieChoice, "ensemble_max", property(lambda self: len(self.spares())))


@mutant("leads a log that ends before the state here")
def _leads_an_older_log(patch: pytest.MonkeyPatch) -> None:
    original = LogTakeover.run

    async def run(self: LogTakeover, lease_ms: int, next_seq: Any, applied: Any, others: Any) -> Any:
        return await original(self, lease_ms, next_seq, others=others)

    patch.setattr(LogTakeover, "run", run)


@mutant("leads a log that ends before another replica's state")
def _leads_behind_others(patch: pytest.MonkeyPatch) -> None:
    original = LogTakeover.run

    async def run(self: LogTakeover, lease_ms: int, next_seq: Any, applied: Any, others: Any) -> Any:
        return await original(self, lease_ms, next_seq, applied)

    patch.setattr(LogTakeover, "run", run)


# docs/protocol.md G26
@mutant("goes on in a list that does not have what was read")
def _any_list_explains(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedgerList, "explains", lambda self, position: True)


# docs/protocol.md G24
@mutant("takes a list that has changed meanwhile for an older one")
def _changed_is_older(patch: pytest.MonkeyPatch) -> None:
    async def confirm(self: LedgerLists, partition: Any, version: int) -> None:
        return None

    patch.setattr(LedgerLists, "confirm", confirm)


@mutant("takes a log over in an older copy of the metadata")
def _passes_the_mark(patch: pytest.MonkeyPatch) -> None:
    async def pass_over(self: ClusterIdentity) -> None:
        return None

    patch.setattr(ClusterIdentity, "_refuse_older", pass_over)


# docs/protocol.md R6
@mutant("a log goes on from the end that its leader found")
def _own_end(patch: pytest.MonkeyPatch) -> None:
    original = opener.LedgerTakeover.close

    async def close(self: opener.LedgerTakeover) -> Any:
        found = self.last
        recorded = await original(self)
        self.last = found
        return recorded

    patch.setattr(opener.LedgerTakeover, "close", close)


# docs/protocol.md G25
@mutant("a takeover lists its own end as the closed one")
def _closed_end_too_late(patch: pytest.MonkeyPatch) -> None:
    async def closed_end(self: Any, listed: Any, taken: Any) -> Any:
        return await self._end(listed, taken, taken)

    patch.setattr(LogTakeover, "_closed_end", closed_end)


# docs/protocol.md G25
@mutant("a roll lists the closed end of the roll before")
def _closed_end_too_early(patch: pytest.MonkeyPatch) -> None:
    original = LeaderLog._switch

    def switch(self: Any, metadata: Any) -> None:
        before = self._before_open
        original(self, metadata)
        self._before_open = before

    patch.setattr(LeaderLog, "_switch", switch)

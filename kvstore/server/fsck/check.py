"""Checks every invariant of a live cluster that can be read from outside. Reads the metadata and all copies of all
entries of the partitions' logs, and asks the bookies which entries of other ledgers they hold.

The check fences nothing and writes nothing. The cluster keeps running, so anything that looks wrong is read again
before it is reported: a log may have been trimmed, or the third copy of an entry may still be on its way.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from kvstore.env import Env
from kvstore.errors import Corrupted, LedgerError, MetadataError, NoSuchLedger, NoSuchNode, UndecodableNode
from kvstore.meta import paths
from kvstore.meta.bookies import BookieView
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.lost import given_up
from kvstore.meta.store import MetadataStore
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.ranking import LeaderRecord, Published
from kvstore.proto.digest import EntryDigest
from kvstore.ring import PartitionState, Ring, decode
from kvstore.server.fsck.findings import (
    START_SERVERS,
    SWEPT,
    WAIT_FOR_LEADER,
    FsckReport,
    Sequences,
    check_copies,
    check_length,
    check_list,
    check_quorum,
    check_written,
    check_zones,
    orphans,
)
from kvstore.server.fsck.presence import Presence, subject_of
from kvstore.server.fsck.undecodable import undecodable_nodes
from kvstore.server.placement.retirement import kept_ledgers
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState, PartitionId, ServerId
from kvstore.wal.bookies import BookieClients
from kvstore.wal.config import LogConfig
from kvstore.wal.connection import AnsweredError
from kvstore.wal.coverage import is_somewhere_short
from kvstore.wal.creator import owner_of
from kvstore.wal.ledger_list import Listed
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from kvstore.wal.placement import spread_out
from kvstore.wal.repair import bookies_of

ENTRIES_AT_ONCE, LEDGERS_AT_ONCE = 32, 16
AGAIN_S = 0.5
AGAIN_MAX = 6
"""Interval and number of attempts to read copies of one ledger that a bookie lacks."""
SILENT_AFTER = ENTRIES_AT_ONCE * AGAIN_MAX

RESTORE_IT = (
    "Everything else works without it. If a later release wrote it, that release can read it. Otherwise keep a copy of "
    "the node and report it with the output of `kvstore fsck --json`."
)
TRUST_ONE = (
    "Start every replica of the partition. A majority decides, and the outvoted copies are rebuilt. If all replicas "
    "are "
    "up and still differ, run `kvstore partition trust PARTITION --replica SERVER` to declare one copy right."
)
FOUND_IT = "Create it: `kvstore up` for a local cluster, otherwise `kvstore cluster init`."

Progress = Callable[[str, int, int], None]
"""A function that receives the progress: (subject, entries checked, entries in total)."""


class LedgerCopies:
    """Reads single copies of a ledger's entries, without fencing the ledger."""

    def __init__(self, bookies: BookieClients, metadata: LedgerMetadata) -> None:
        self.metadata = metadata
        self.silence: Counter[BookieId] = Counter()
        """Number of consecutive reads that each bookie has left unanswered."""
        self.waited_for: set[BookieId] = set()
        """Bookies that did not have an entry after AGAIN_MAX attempts."""
        self.unheard: list[BookieId] = []
        """Bookies of the last fragment that did not report the last confirmed entry."""
        self._bookies = bookies
        self._digest = EntryDigest(metadata.digest, metadata.password)

    async def last_entry(self) -> EntryId:
        """Return the last entry of a closed ledger, or the last confirmed entry of an open ledger."""
        if self.metadata.state is LedgerState.CLOSED:
            return self.metadata.last_entry
        fragment = self.metadata.fragments[-1]
        last = max(EntryId(fragment.first - 1), NO_ENTRY)
        self.unheard = []
        for bookie in fragment.ensemble:
            try:
                last = max(last, await self._bookies.read_lac(bookie, self.metadata.ledger, self._digest))
            except LedgerError:
                self.unheard.append(bookie)
        return last

    def has_unknown_end(self) -> bool:
        """Return True if the bookies that did not answer may be the only ones with the last acknowledged entries."""
        ensemble = self.metadata.fragments[-1].ensemble
        return is_somewhere_short({ensemble.index(each) for each in self.unheard}, self.metadata.quorum)

    def is_silent(self, bookie: BookieId) -> bool:
        """Return True if the bookie has been silent for so many reads that asking again is pointless."""
        return self.silence[bookie] >= SILENT_AFTER

    async def read(self, bookie: BookieId, entry: EntryId) -> bytes | None:
        """Return the payload in the bookie's copy. Return None if the bookie has no copy or a damaged one, or does
        not answer."""
        ledger = self.metadata.ledger
        if self.is_silent(bookie):
            return None
        try:
            answer = await self._bookies.read(bookie, ledger, entry)
        except AnsweredError:  # most likely damage, so keep asking this bookie
            self.silence[bookie] = 0
            return None
        except LedgerError:
            self.silence[bookie] += 1
            return None
        self.silence[bookie] = 0
        try:
            return None if answer.packet is None else self._digest.open(ledger, entry, answer.packet).payload
        except Corrupted:
            return None


class Fsck:
    """One check of a cluster. `run` raises MetadataError if the metadata store cannot be read."""

    def __init__(self, env: Env, store: MetadataStore, progress: Progress = lambda *_: None) -> None:
        self.report = FsckReport()
        self._env, self._store, self._progress = env, store, progress
        self._ledgers, self._lists = LedgerStore(store), LedgerLists(store)
        self._view = BookieView(store)
        self._bookies = BookieClients(env, self._view.address)
        self._unlisted_partitions: set[PartitionId] = set()
        """Partitions whose ledger lists cannot be read, so that their orphaned ledgers cannot be found."""
        self._silent: set[BookieId] = set()
        """Registered bookies that do not answer."""

    async def run(self) -> FsckReport:
        try:
            await self._view.refresh()
            ring = await self._ring()
            self._bookies.cluster = await LayoutStore(self._store).instance_id_seen() or ""
            if ring is not None:
                for partition in sorted(ring.partitions):
                    try:
                        await self._partition(partition, ring)
                    except UndecodableNode as error:
                        self.report.error(
                            str(partition), f"the list of its ledgers cannot be read: {error}", RESTORE_IT
                        )
                        self._unlisted_partitions.add(partition)
                async for path, why in undecodable_nodes(self._store, sorted(ring.partitions)):
                    self.report.warn(path, f"cannot be read and is ignored: {why}", RESTORE_IT)
            await self._unlisted()
        finally:
            self._bookies.close()
        return self.report

    async def _ring(self) -> Ring | None:
        try:
            data, _ = await self._store.get(paths.RING)
            return decode(data)
        except NoSuchNode:
            self.report.error("ring", "no ring exists: this cluster was never created", FOUND_IT)
        except Corrupted as error:
            self.report.error("ring", str(error))
        return None

    # ── a partition ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _partition(self, partition: PartitionId, ring: Ring) -> None:
        self.report.partitions += 1
        if ring.partitions[partition].state is PartitionState.RETIRED:
            held = "`kvstore partition pins` lists the pins that hold its log; the log is removed after the last one"
            self.report.note(str(partition), f"is retired and needs no replica; {held}")
        else:
            await self._replicas(partition, ring.partitions[partition].replicas)
        listed, _ = await self._lists.read(partition, latest=True)
        found = await self._metadata(listed.ledgers)
        gone = [each.id for each in listed.ledgers if each.id not in found]
        if gone:  # perhaps trimmed during the read
            listed, _ = await self._lists.read(partition, latest=True)
            found = await self._metadata(listed.ledgers)
        check_list(self.report, partition, listed, found)
        widest = max((each.quorum.write for each in found.values()), default=0)  # the configured quorum is unknown here
        copies_wanted = min(widest, len(self._view.current.all))
        sequences = Sequences(self.report, partition)
        for each in listed.ledgers:
            if each.id in found:
                sequences.begin(each.first_seq, exact=each.exact)
                subject = f"{partition} ledger={each.id}"
                check_quorum(self.report, subject, found[each.id], copies_wanted)
                await self._ledger(subject, found[each.id], sequences)

    async def _replicas(self, partition: PartitionId, replicas: Sequence[ServerId]) -> None:
        """Report what replicas have published. States are not compared here, because replicas compare them and publish
        the result (docs/protocol.md P5, P35)."""
        published: dict[ServerId, Published] = {}
        try:
            published = await Claims(self._store, partition, ServerId("fsck")).published()
            LeaderRecord.decode((await self._store.get(paths.partition_leader(partition)))[0])
        except NoSuchNode:
            self.report.warn(str(partition), "has no leader at the moment", WAIT_FOR_LEADER)
        except Corrupted as error:
            self.report.error(str(partition), f"the data of its election cannot be read: {error!r}")
            return
        for server, replica in sorted(published.items()):
            if replica.doubt is not None:
                since, seq, crc = replica.doubt
                what = f"neither leads nor answers: replicas differ since {since}, its CRC is {crc:08x} at {seq}"
                self.report.error(f"{partition} {server}", what, TRUST_ONE)
        missing = ", ".join(server for server in replicas if server not in published)
        if missing:
            self.report.warn(str(partition), f"replicas are not up: {missing}", START_SERVERS)

    async def _metadata(self, listed: Sequence[Listed]) -> dict[LedgerId, LedgerMetadata]:
        found: dict[LedgerId, LedgerMetadata] = {}
        for each in listed:
            try:
                found[each.id], _ = await self._ledgers.read(each.id)
            except NoSuchLedger:
                continue
            except Corrupted as error:
                self.report.error(f"ledger={each.id}", str(error))
        return found

    # ── a ledger ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _ledger(self, subject: str, metadata: LedgerMetadata, sequences: Sequences) -> None:
        self.report.ledgers += 1
        for attempt in range(AGAIN_MAX):
            if attempt:  # perhaps the leader replaces a bookie, or has done so since the metadata was read
                await asyncio.sleep(AGAIN_S)
                found = await self._metadata_or_none(metadata.ledger)
                if found is None:  # trimmed during the read
                    sequences.skip()
                    return
                metadata = found
            copies = LedgerCopies(self._bookies, metadata)
            last = await copies.last_entry()
            if not copies.has_unknown_end():
                break
        else:
            check_written(self.report, subject, metadata, copies.unheard, self._is_up)
        self._check_zones(subject, metadata)
        read, bytes_read = 0, 0
        is_given_up = given_up(metadata)
        async for entry, payloads in self._entries(copies, last):
            payload = next((each for each in payloads.values() if each is not None), None)
            if payload is None and await self._is_gone(metadata.ledger):
                sequences.skip()
                return  # trimmed during the read
            check_copies(self.report, subject, metadata, entry, payloads, self._is_up, is_given_up=is_given_up(entry))
            if payload is None:
                sequences.skip()
            else:
                sequences.add(subject, entry, payload)
                read, bytes_read = read + 1, bytes_read + len(payload)
            self._progress(subject, entry + 1, last + 1)
        if metadata.state is not LedgerState.CLOSED:
            sequences.skip()  # it may have more entries than are confirmed, and the next ledger begins after those
        if read == last + 1:
            check_length(self.report, subject, metadata, bytes_read)

    def _check_zones(self, subject: str, metadata: LedgerMetadata) -> None:
        view = self._view
        zones = {bookie: view.zone(bookie) for bookie in {*bookies_of(metadata), *view.current.all}}
        better = spread_out(metadata, zones, view.current.writable, self._env.random)
        check_zones(self.report, subject, metadata, better, zones)

    async def _entries(
        self, copies: LedgerCopies, last: EntryId
    ) -> AsyncIterator[tuple[EntryId, dict[BookieId, bytes | None]]]:
        """Yield every entry up to `last` with its copies. Several entries are read at a time."""
        for first in range(0, last + 1, ENTRIES_AT_ONCE):
            entries = [EntryId(entry) for entry in range(first, min(first + ENTRIES_AT_ONCE, last + 1))]
            reading = [self._env.nursery.spawn(self._copies(copies, entry), name="fsck copies") for entry in entries]
            for entry, task in zip(entries, reading, strict=True):
                yield entry, await task

    async def _copies(self, copies: LedgerCopies, entry: EntryId) -> dict[BookieId, bytes | None]:
        payloads: dict[BookieId, bytes | None] = dict.fromkeys(copies.metadata.write_set(entry))
        for attempt in range(AGAIN_MAX):
            lacking = [bookie for bookie, payload in payloads.items() if payload is None]
            if attempt:
                lacking = [bookie for bookie in lacking if self._is_up(bookie) and bookie not in copies.waited_for]
                if not lacking:
                    break
                await asyncio.sleep(AGAIN_S)
            for bookie in lacking:
                payloads[bookie] = await copies.read(bookie, entry)
        for bookie, payload in payloads.items():
            if payload is None:
                await self._stop_waiting_for(copies, bookie)
        return payloads

    async def _stop_waiting_for(self, copies: LedgerCopies, bookie: BookieId) -> None:
        """Record that the check has waited for the bookie once. Copies of this ledger that the bookie lacks count as
        missing at once from now on."""
        if bookie in copies.waited_for:
            return
        copies.waited_for.add(bookie)
        await self._view.refresh()
        if copies.silence[bookie]:
            self._silent.add(bookie)

    async def _is_gone(self, ledger: LedgerId) -> bool:
        try:
            await self._ledgers.read(ledger)
        except NoSuchLedger:
            return True
        return False

    def _is_up(self, bookie: BookieId) -> bool:
        return bookie in self._view.current.all and bookie not in self._silent

    # ── what nobody lists ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _unlisted(self) -> None:
        """Check every ledger that no partition lists: ledgers of other clients of the bookies, logs kept for readers,
        and orphans."""
        all_ids = await self._ledgers.list_ids()
        listed, kept = await self._listed(), await self._kept()
        owners: dict[LedgerId, PartitionId] = {}
        young: dict[LedgerId, bool] = {}
        others: list[LedgerMetadata] = []
        now_ms, spared_ms = self._env.clock.wall_ms(), int(LogConfig().orphan_age_s * 2000)
        unlisted = [ledger for ledger in all_ids if ledger not in listed]
        for number, ledger in enumerate(unlisted):
            metadata = await self._metadata_or_none(ledger)
            if metadata is None:
                continue
            maker = owner_of(metadata)
            if maker is None or ledger in kept:
                others.append(metadata)
            elif maker not in self._unlisted_partitions:
                owners[ledger] = maker
                young[ledger] = now_ms - metadata.ctime_ms < spared_ms
            if len(others) == LEDGERS_AT_ONCE or number == len(unlisted) - 1:
                await self._check_others(others)
                others = []
            self._progress("ledgers in no list", number + 1, len(unlisted))
        await self._check_others(others)
        names = await self._listed() | kept
        for ledger, owner in orphans(sorted(names), all_ids, owners):
            subject, message = f"{owner} ledger={ledger}", "was created for this partition but is not in its list"
            if young[ledger]:
                self.report.note(subject, f"{message}; removed a few minutes after its creation")
            elif await self._is_held(PartitionId(owner), ledger):
                self.report.note(subject, f"{message}; held by a pin (a snapshot, a feed or a move)")
            else:
                self.report.warn(subject, message, SWEPT)

    async def _metadata_or_none(self, ledger: LedgerId) -> LedgerMetadata | None:
        """Return the metadata of a ledger. Return None if the ledger is gone, or if its metadata is unreadable,
        which is reported."""
        try:
            return (await self._ledgers.read(ledger))[0]
        except NoSuchLedger:
            pass
        except UndecodableNode as error:
            self.report.warn(
                f"ledger={ledger}",
                f"its copies are not checked, because its metadata cannot be decoded: {error}",
                RESTORE_IT,
            )
        except MetadataError as error:
            self.report.warn(
                f"ledger={ledger}", f"its copies are not checked, because its metadata could not be read: {error!r}"
            )
        return None

    async def _check_others(self, ledgers: Sequence[LedgerMetadata]) -> None:
        """Find missing copies of ledgers whose entries are not read, several ledgers at a time."""
        presence = Presence(self._bookies, self._ledgers, self.report, self._is_up, self._silent.add)

        async def check(metadata: LedgerMetadata) -> MetadataError | None:
            self._check_zones(subject_of(metadata), metadata)
            try:
                await presence.check(metadata)
            except MetadataError as error:
                return error
            return None

        checking = [self._env.nursery.spawn(check(each), name="fsck presence") for each in ledgers]
        for metadata, task in zip(ledgers, checking, strict=True):
            if (error := await task) is not None:
                self.report.warn(subject_of(metadata), f"its copies are not checked: {error!r}")

    async def _kept(self) -> set[LedgerId]:
        """Return the ledgers that are kept for readers of feeds although their partitions have left the ring."""
        try:
            return await kept_ledgers(self._store)
        except UndecodableNode as error:
            self.report.warn("kept logs", f"cannot be read, so their copies are not checked: {error}", RESTORE_IT)
            return set()

    async def _listed(self) -> set[LedgerId]:
        """Return the ledgers in the current lists. Reads the ring again, because partitions may have joined since
        the check began; the check takes hours in a large cluster. Raises MetadataError."""
        found: set[LedgerId] = set()
        try:
            data, _ = await self._store.get(paths.RING)
        except NoSuchNode:
            return found  # already reported; the bookies may still serve other clients
        for partition in sorted(decode(data).partitions):
            with suppress(UndecodableNode):  # already reported
                ledgers, _ = await self._lists.read(partition, latest=True)
                found.update(each.id for each in ledgers.ledgers)
        return found

    async def _is_held(self, partition: PartitionId, ledger: LedgerId) -> bool:
        oldest = await Pins(self._store, self._lists).oldest(partition, 0)
        return oldest is not None and ledger >= oldest

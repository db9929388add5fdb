"""A bookie's storage in several directories, each on a disk of its own: one survivor is enough to go on.

Every directory is a whole storage (kvstore.bookie.storage): a journal, an index, checkpoints, a reclaim. A ledger is in
one of them, all of it: where its first record went, which is on the disk, so nothing else need say where a ledger is.

What is lost with a directory, and why nothing lies about it, stands in losses.py (docs/protocol.md, B23).

A directory that fails while the bookie runs takes nothing back of what it said (B24). Its ledgers stay its own, here
and on its disk, for it may be well again after a restart: they are not taken over, but refused, until it is read back
or is declared lost. New ledgers go to the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvstore.bookie.adds import Done
from kvstore.bookie.admission import LedgerAdmission, LedgerAuthority
from kvstore.bookie.backpressure import BackpressureGate
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.directories.gathering import Gathered, say_gone
from kvstore.bookie.directories.homes import Homes
from kvstore.bookie.directories.losses import doubt_what_was_lost
from kvstore.bookie.directories.part import DirectoryStorage
from kvstore.bookie.directories.refusing import CANNOT_STORE, CANNOT_TELL
from kvstore.bookie.directories.state import DirectoryState
from kvstore.bookie.inventory import IsOurs, OwnLedgers, nobodys
from kvstore.bookie.journal.room import JournalFull
from kvstore.bookie.ledger import LedgerListener
from kvstore.bookie.reader import ReadDone
from kvstore.bookie.statistics import Statistics, added_up
from kvstore.bookie.storage import BookieStorage
from kvstore.env.ports import Env
from kvstore.os_errors import no_room
from kvstore.proto.bookkeeper import LAST_ENTRY, Status

log = logging.getLogger(__name__)


class SpreadStorage:
    """Has the calls of kvstore.bookie.storage.BookieStorage."""

    def __init__(
        self, env: Env, config: BookieConfig, gathered: Gathered, authority: LedgerAuthority, own_ledgers: OwnLedgers
    ) -> None:
        self.bookie = gathered.identity.bookie
        self.statistics = Statistics()
        """Of connections, and of what no directory counts."""
        self.sync_gate = BackpressureGate()
        """Shut while too much waits for the sync of any directory."""
        self.metadata_gate = BackpressureGate()
        self.admission = LedgerAdmission(authority, self.bookie, env.nursery, self.statistics, self.metadata_gate)
        self.raw = SpreadRawAdds(self, is_on=config.admit_raw_adds)
        self.own_ledgers = own_ledgers
        self._env, self._config, self._authority = env, config, authority
        self._loop = asyncio.get_running_loop()
        self._plan = gathered.plan
        self.parts = tuple(self._part(gathered, number) for number in range(len(gathered.directories)))
        self.homes = Homes(self.parts)
        self._is_started = False
        self._is_readonly = False
        self._on_readonly: Callable[[bool], None] = lambda _readonly: None
        self._on_failed: Callable[[DirectoryStorage], None] = lambda _part: None

    def _part(self, gathered: Gathered, number: int) -> DirectoryStorage:
        directory, config = gathered.directories[number], self._config
        pending_bytes_max = max(1, config.pending_bytes_max // len(gathered.directories))
        own = replace(config.alone(directory.path, directory.index_dir), pending_bytes_max=pending_bytes_max)
        env = replace(self._env, fatal=lambda reason: self._failed(part, reason))
        storage = BookieStorage(env, own, self.bookie, self._authority, self.own_ledgers, admission=self.admission)
        storage.sync_gate = self.sync_gate
        storage.on_readonly(lambda _: self._look_for_room())
        part = DirectoryStorage(directory, own, storage)
        return part

    # Its life

    async def start(self, _doubts: Sequence[str] = ()) -> None:
        """Read all directories back and make them ready; what those that are lost may have held is in limbo then.

        Raises ConfigError, MetadataError, OSError (no room).
        """
        try:
            for part in self.parts:
                await part.start()
            self.homes.check()
            if self._plan.lost:
                await doubt_what_was_lost(self.homes, self._authority, self.bookie)
                lost = ", ".join(each.path for each in self._plan.lost)
                log.warning("bookie=%s goes on without %s", self.bookie, lost)
                self._plan = say_gone(self._env, self._config, self._plan)
        except BaseException as error:
            self.stop()
            if isinstance(error, JournalFull):
                raise no_room("no space is left for what a start writes") from error
            raise
        self._is_started = True
        self._is_readonly = self.is_readonly

    async def synced(self) -> None:
        """Return when everything accepted before is on the disks."""
        await self.homes.synced()

    def stop(self) -> None:
        """Write nothing more. What was not reported may or may not be there."""
        for part in self.parts:
            part.stop()

    # docs/protocol.md B24
    def _failed(self, part: DirectoryStorage, reason: str) -> None:
        """The disk of a directory does not take what is written, or does not say whether it did."""
        if part.reason:
            return
        path = part.directory.path
        if not self._is_started or self.homes.alive == [part]:
            self._env.fatal(f"{path}: {reason}; if its disk is lost, name it in storage.lost_dirs")
        log.critical("bookie=%s goes on without %s until it is started again: %s", self.bookie, path, reason)
        part.fail(reason)
        self._loop.call_soon(self._has_failed, part)

    def _has_failed(self, part: DirectoryStorage) -> None:
        part.refuse_all()
        self._on_failed(part)
        self._look_for_room()
        self.sync_gate.open(part.storage.adds)

    def on_failed(self, listener: Callable[[DirectoryStorage], None]) -> None:
        """Call `listener` when a directory has failed."""
        self._on_failed = listener

    def on_readonly(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` when the bookie becomes read-only or writable again."""
        self._on_readonly = listener

    @property
    def is_readonly(self) -> bool:
        """Ordinary adds are refused in all directories."""
        return all(part.storage.is_readonly for part in self.homes.alive)

    @property
    def takes_copies(self) -> bool:
        """Return True if any directory accepts recovery adds."""
        return any(part.storage.takes_copies for part in self.homes.alive)

    def _look_for_room(self) -> None:
        if self._is_started and self.is_readonly != self._is_readonly:
            self._is_readonly = self.is_readonly
            self._on_readonly(self._is_readonly)

    def space(self) -> tuple[int, int]:
        """Bytes in all, as far as this bookie could use them, and bytes that are free."""
        found = [part.space() for part in self.homes.alive]
        return sum(total for total, _ in found), sum(free for _, free in found)

    def directories(self) -> list[DirectoryState]:
        """Each of them, those that have failed too."""
        return [
            DirectoryState(
                part.directory.path,
                part.reason,
                part.free_bytes(),
                part.storage.is_readonly,
                "" if part.reason else part.storage.journal.why_full,
            )
            for part in self.parts
        ]

    def refresh_statistics(self) -> Statistics:
        """All directories' together, with what is counted only on demand."""
        found = added_up([self.statistics, *(part.storage.refresh_statistics() for part in self.parts)])
        found.readonly = self.is_readonly
        found.directories, found.directories_failed = len(self.parts), len(self.parts) - len(self.homes.alive)
        return found

    # Writing

    # docs/protocol.md B12
    def may_ask(self, ledger: int, key: bytes, body: bytes | None = None, *, is_writers: bool = False) -> bool:
        """Whether what shows this key for the ledger may have to wait for the metadata store."""
        return self.homes.asked(ledger).calls.may_ask(ledger, key, body, is_writers=is_writers)

    def add(self, ledger: int, entry: int, body: bytes, key: bytes, *, recovery: bool, done: Done) -> None:
        """Store an entry packet. OK once it is on the disk; IO_ERROR if its directory has failed; …"""
        part, done = self.homes.hold(ledger, done)
        part.calls.add(ledger, entry, body, key, recovery=recovery, done=done)

    def add_raw(self, ledger: int, entry: int, body: bytes, key: bytes, *, done: Done) -> None:
        """The same of who may add where no metadata stand (docs/protocol.md, B28)."""
        part, done = self.homes.hold(ledger, done)
        if isinstance(part.calls, BookieStorage):
            part.calls.raw.add(ledger, entry, body, key, done=done)
        else:
            done(CANNOT_STORE)

    def write_lac(self, ledger: int, body: bytes, key: bytes, *, done: Done) -> None:
        """Keep an explicit LAC packet."""
        part, done = self.homes.hold(ledger, done)
        part.calls.write_lac(ledger, body, key, done=part.asked(done, CANNOT_STORE))

    def force(self, ledger: int, *, done: Done) -> None:
        """OK once everything accepted before is on the disk."""
        part = self.homes.asked(ledger)
        part.calls.force(ledger, done=part.asked(done, CANNOT_STORE))

    # Reading

    def read(self, ledger: int, entry: int, *, key: bytes | None = None, fence: bool = False, done: ReadDone) -> None:
        """Read one entry, and with `fence` fence the ledger before. What a directory that has failed may have is
        neither there nor absent."""
        part, answer = self.homes.hold(ledger, done) if fence else (self.homes.asked(ledger), done)
        guarded = part.asked(answer, CANNOT_TELL, entry, None, -1)
        part.calls.read(ledger, entry, key=key, fence=fence, done=guarded)

    def read_on(
        self, ledger: int, entry: int, body: bytes, limits: tuple[int, int], *, passes_over: bool = False
    ) -> list[bytes]:
        """The packet read of an entry, and those that follow it here."""
        return self.homes.asked(ledger).calls.read_on(ledger, entry, body, limits, passes_over=passes_over)

    def read_lac(self, ledger: int, *, done: Callable[[Status, bytes | None, bytes | None], Any]) -> None:
        """The last explicit LAC packet and the last entry packet."""
        self.homes.asked(ledger).calls.read_lac(ledger, done=done)

    def long_poll(self, ledger: int, previous_lac: int, timeout_ms: int, *, done: ReadDone) -> Callable[[], None]:
        """Answer when the LAC has passed `previous_lac`, or at the timeout."""
        part = self.homes.asked(ledger)
        guarded = part.asked(done, CANNOT_TELL, LAST_ENTRY, None, -1)
        return part.taken_back(guarded, part.calls.long_poll(ledger, previous_lac, timeout_ms, done=guarded))

    def listen(self, ledger: int, listener: LedgerListener) -> Callable[[], None] | None:
        """Tell of what is stored of the ledger from now on."""
        return self.homes.asked(ledger).calls.listen(ledger, listener)

    def list_entries(self, ledger: int, *, done: Callable[[Status, Sequence[tuple[int, int]]], Any]) -> None:
        """The entries here, as runs (first, count), rising."""
        part = self.homes.asked(ledger)
        part.calls.list_entries(ledger, done=part.asked(done, CANNOT_TELL, ()))


class SpreadRawAdds:
    """Takes raw adds from connections (kvstore.bookie.raw_adds)."""

    def __init__(self, storage: SpreadStorage, *, is_on: bool) -> None:
        self.is_on = is_on
        self.add = storage.add_raw


AnyStorage = BookieStorage | SpreadStorage
"""Of a bookie: in one directory, or in several."""


def storage_of(
    env: Env, config: BookieConfig, gathered: Gathered, authority: LedgerAuthority, is_ours: IsOurs = nobodys
) -> AnyStorage:
    """The storage in the directories that were found."""
    own_ledgers = OwnLedgers(is_ours)
    if gathered.plan.version:
        return SpreadStorage(env, config, gathered, authority, own_ledgers)
    path = gathered.directories[0].path
    return BookieStorage(env, config.alone(path, config.index_dir), gathered.identity.bookie, authority, own_ledgers)

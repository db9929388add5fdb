"""A bookie's storage in several directories, each on its own disk. One surviving directory is enough to continue.

Every directory is a complete storage (kvstore.bookie.storage) with a journal, an index, checkpoints and a reclaimer. A
ledger is entirely in the directory of its first record. This record is on disk, so the place of a ledger is recorded
nowhere else. losses.py explains what is lost with a directory, and why no answer is wrong (docs/protocol.md, B23).

A directory that fails while the bookie runs revokes nothing that it has answered (B24). Its ledgers stay there, because
the disk may be healthy again after a restart. They are not taken over but refused, until the directory is read back or
declared lost. New ledgers go to the other directories.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvstore.bookie.adds import Done
from kvstore.bookie.admission import LedgerAdmission
from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.backpressure import BackpressureGate
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.directories.directory_storage import DirectoryStorage
from kvstore.bookie.directories.gathering import Gathered, record_gone
from kvstore.bookie.directories.homes import LedgerDirectories
from kvstore.bookie.directories.losses import doubt_what_was_lost
from kvstore.bookie.directories.refusing import CANNOT_STORE, STATE_UNKNOWN
from kvstore.bookie.directories.state import DirectoryState
from kvstore.bookie.inventory import IsOurs, OwnLedgers, none_are_ours
from kvstore.bookie.journal.reserve import JournalFull
from kvstore.bookie.ledger import LedgerListener
from kvstore.bookie.reader import ReadDone
from kvstore.bookie.statistics import Statistics, added_up
from kvstore.bookie.storage import BookieStorage
from kvstore.env.ports import Env
from kvstore.os_errors import no_space
from kvstore.proto.bookkeeper import LAST_ENTRY, Status

log = logging.getLogger(__name__)


class SpreadStorage:
    """A storage with the calls of kvstore.bookie.storage.BookieStorage, spread over directories."""

    def __init__(
        self, env: Env, config: BookieConfig, gathered: Gathered, authority: MetadataAuthority, own_ledgers: OwnLedgers
    ) -> None:
        self.bookie = gathered.identity.bookie
        self.statistics = Statistics()
        """Counts of connections, and others that belong to no directory."""
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
        self.homes = LedgerDirectories(self.parts)
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
        storage.on_readonly(lambda _: self._check_readonly())
        part = DirectoryStorage(directory, own, storage)
        return part

    # Lifecycle

    async def start(self, _doubts: Sequence[str] = ()) -> None:
        """Read all directories back and prepare them. The contents of lost directories are in limbo then.

        Raises ConfigError, MetadataError, OSError (no space).
        """
        try:
            for part in self.parts:
                await part.start()
            self.homes.check()
            if self._plan.lost:
                await doubt_what_was_lost(self.homes, self._authority, self.bookie)
                lost = ", ".join(each.path for each in self._plan.lost)
                log.warning("continuing without lost directories bookie=%s directories=%s", self.bookie, lost)
                self._plan = record_gone(self._env, self._config, self._plan)
        except BaseException as error:
            self.stop()
            if isinstance(error, JournalFull):
                raise no_space("no space is left for the records of a start") from error
            raise
        self._is_started = True
        self._is_readonly = self.is_readonly

    async def synced(self) -> None:
        """Return when everything accepted before is on the disks."""
        await self.homes.synced()

    def stop(self) -> None:
        """Write nothing more. Unreported records may or may not be on disk."""
        for part in self.parts:
            part.stop()

    # docs/protocol.md B24
    def _failed(self, part: DirectoryStorage, reason: str) -> None:
        """Handle the failure of a directory's disk, which rejects writes or does not confirm them."""
        if part.reason:
            return
        path = part.directory.path
        if not self._is_started or self.homes.alive == [part]:
            self._env.fatal(f"{path}: {reason}; if its disk is lost, add it to storage.lost_dirs")
        log.critical(
            "directory failed, continuing without it until a restart bookie=%s directory=%s reason=%s",
            self.bookie,
            path,
            reason,
        )
        part.fail(reason)
        self._loop.call_soon(self._has_failed, part)

    def _has_failed(self, part: DirectoryStorage) -> None:
        part.refuse_all()
        self._on_failed(part)
        self._check_readonly()
        self.sync_gate.open(part.storage.adds)

    def on_failed(self, listener: Callable[[DirectoryStorage], None]) -> None:
        """Call `listener` when a directory has failed."""
        self._on_failed = listener

    def on_readonly(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` when the bookie becomes read-only or writable again."""
        self._on_readonly = listener

    @property
    def is_readonly(self) -> bool:
        """True if all directories refuse ordinary adds."""
        return all(part.storage.is_readonly for part in self.homes.alive)

    @property
    def takes_copies(self) -> bool:
        """True if any directory accepts recovery adds."""
        return any(part.storage.takes_copies for part in self.homes.alive)

    def _check_readonly(self) -> None:
        if self._is_started and self.is_readonly != self._is_readonly:
            self._is_readonly = self.is_readonly
            self._on_readonly(self._is_readonly)

    def space(self) -> tuple[int, int]:
        """Return the bytes that this bookie could use in all, and the free bytes."""
        found = [part.space() for part in self.homes.alive]
        return sum(total for total, _ in found), sum(free for _, free in found)

    def directories(self) -> list[DirectoryState]:
        """Return the state of each directory, including failed ones."""
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
        """Return the sum of all directories' counters, including those that are counted only on demand."""
        found = added_up([self.statistics, *(part.refresh_statistics() for part in self.parts)])
        found.readonly = self.is_readonly
        found.directories, found.directories_failed = len(self.parts), len(self.parts) - len(self.homes.alive)
        return found

    # Writing

    # docs/protocol.md B12
    def may_ask(self, ledger: int, key: bytes, body: bytes | None = None, *, is_writers: bool = False) -> bool:
        """Return True if a request with this key may have to wait for the metadata store."""
        return self.homes.asked(ledger).calls.may_ask(ledger, key, body, is_writers=is_writers)

    def add(self, ledger: int, entry: int, body: bytes, key: bytes, *, recovery: bool, done: Done) -> None:
        """Store an entry packet. `done` gets OK once the packet is on disk, IO_ERROR if its directory has failed, …"""
        part, done = self.homes.hold(ledger, done)
        part.calls.add(ledger, entry, body, key, recovery=recovery, done=done)

    def add_raw(self, ledger: int, entry: int, body: bytes, key: bytes, *, done: Done) -> None:
        """Store an entry packet that may be raw (docs/protocol.md, B28)."""
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
        """Call `done` with OK once everything accepted before is on disk."""
        part = self.homes.asked(ledger)
        part.calls.force(ledger, done=part.asked(done, CANNOT_STORE))

    # Reading

    def read(self, ledger: int, entry: int, *, key: bytes | None = None, fence: bool = False, done: ReadDone) -> None:
        """Read one entry, and with `fence` fence the ledger before. An entry of a failed directory is neither present
        nor absent."""
        part, answer = self.homes.hold(ledger, done) if fence else (self.homes.asked(ledger), done)
        guarded = part.asked(answer, STATE_UNKNOWN, entry, None, -1)
        part.calls.read(ledger, entry, key=key, fence=fence, done=guarded)

    def read_on(
        self, ledger: int, entry: int, body: bytes, limits: tuple[int, int], *, passes_over: bool = False
    ) -> list[bytes]:
        """Return the packet read of an entry, and those of the following entries that are here."""
        return self.homes.asked(ledger).calls.read_on(ledger, entry, body, limits, passes_over=passes_over)

    def read_lac(self, ledger: int, *, done: Callable[[Status, bytes | None, bytes | None], Any]) -> None:
        """Read the last explicit LAC packet and the last entry packet."""
        self.homes.asked(ledger).calls.read_lac(ledger, done=done)

    def long_poll(self, ledger: int, previous_lac: int, timeout_ms: int, *, done: ReadDone) -> Callable[[], None]:
        """Answer when the LAC has passed `previous_lac`, or at the timeout."""
        part = self.homes.asked(ledger)
        guarded = part.asked(done, STATE_UNKNOWN, LAST_ENTRY, None, -1)
        return part.cancelling(guarded, part.calls.long_poll(ledger, previous_lac, timeout_ms, done=guarded))

    def listen(self, ledger: int, listener: LedgerListener) -> Callable[[], None] | None:
        """Notify `listener` of what is stored of the ledger from now on."""
        return self.homes.asked(ledger).calls.listen(ledger, listener)

    def list_entries(self, ledger: int, *, done: Callable[[Status, Sequence[tuple[int, int]]], Any]) -> None:
        """List the entries here as rising runs (first, count)."""
        part = self.homes.asked(ledger)
        part.calls.list_entries(ledger, done=part.asked(done, STATE_UNKNOWN, ()))


class SpreadRawAdds:
    """Takes raw adds from connections (kvstore.bookie.raw_adds)."""

    def __init__(self, storage: SpreadStorage, *, is_on: bool) -> None:
        self.is_on = is_on
        self.add = storage.add_raw


AnyStorage = BookieStorage | SpreadStorage
"""The storage of a bookie, in one directory or in several."""


def storage_of(
    env: Env, config: BookieConfig, gathered: Gathered, authority: MetadataAuthority, is_ours: IsOurs = none_are_ours
) -> AnyStorage:
    """Return the storage in the directories that were found."""
    own_ledgers = OwnLedgers(is_ours)
    if gathered.plan.version:
        return SpreadStorage(env, config, gathered, authority, own_ledgers)
    path = gathered.directories[0].path
    return BookieStorage(env, config.alone(path, config.index_dir), gathered.identity.bookie, authority, own_ledgers)

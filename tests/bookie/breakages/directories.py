"""Ways to break a bookie with several directories, for tests/bookie/mutants.py (docs/protocol.md, B23 and B24)."""

from __future__ import annotations

from typing import Any

from kvstore.bookie import identity, storage
from kvstore.bookie.directories import directory_storage, gathering, homes, membership, spread
from kvstore.bookie.directories.places import MemberState
from kvstore.proto.bookkeeper import Status
from tests.bookie.breakages.registry import mutant, replace


@mutant("denies entries that a lost directory may have held")
def _forgets_what_was_lost() -> None:
    async def nothing(*_: Any) -> None:
        """Record no ledger as lost."""

    replace(spread, "doubt_what_was_lost", lambda _original: nothing)


@mutant("marks a lost directory as gone before its ledgers are in limbo")
def _gone_at_once() -> None:
    def change(original: Any) -> Any:
        def changed(self: Any, found: Any, anchor: int) -> Any:
            found = original(self, found, anchor)
            if found.lost:
                found = found.after(MemberState.LOST, MemberState.GONE)
                self.record(found, found.present)
            return found

        return changed

    replace(gathering._Gathering, "_change", change)


@mutant("accepts a lost directory again")
def _takes_back() -> None:
    replace(membership, "_HERE", lambda _: tuple(MemberState))


@mutant("starts without a directory that was not declared lost")
def _misses_nothing() -> None:
    def make(original: Any) -> Any:
        def now(member: Any, paths: Any, lost: Any) -> Any:
            return original(member, paths, {*lost, member.path})

        return now

    replace(membership, "_now", make)


@mutant("does not record a new directory in the others")
def _joins_alone() -> None:
    def make(original: Any) -> Any:
        def record(self: Any, found: Any, numbers: Any) -> None:
            original(self, found, [each for each in numbers if each])

        return record

    replace(gathering._Gathering, "record", make)


@mutant("confirms requests that waited for a failed directory")
def _confirms_anyway() -> None:
    def make(original: Any) -> Any:
        def refuse_all(self: Any) -> None:
            for group in self.storage.journal.unreported():
                for add in group.adds:
                    add[5](Status.OK)
                group.adds.clear()
                for done in group.after:
                    done()
            original(self)

        return refuse_all

    replace(directory_storage.DirectoryStorage, "refuse_all", make)


@mutant("does not answer requests that waited for a failed directory")
def _silence() -> None:
    replace(directory_storage.DirectoryStorage, "refuse_all", lambda _original: lambda _self: None)


@mutant("moves the ledgers of a failed directory to the others")
def _takes_over() -> None:
    def make(original: Any) -> Any:
        def fail(self: Any, reason: str) -> None:
            original(self, reason)
            self.ledgers, self.tombstones = frozenset(), frozenset()

        return fail

    replace(directory_storage.DirectoryStorage, "fail", make)


@mutant("ends the process when one directory of several fails")
def _one_for_all() -> None:
    replace(spread.SpreadStorage, "_failed", lambda _original: lambda self, _part, reason: self._env.fatal(reason))


@mutant("asks another directory about a ledger with waiting requests")
def _forgets_who_waits() -> None:
    replace(homes.LedgerDirectories, "chosen", _without_memory)


def _without_memory(original: Any) -> Any:
    def chosen(self: Any, ledger: int) -> Any:
        kept, self._in_flight = self._in_flight, {}
        try:
            return original(self, ledger)
        finally:
            self._in_flight = kept

    return chosen


@mutant("trusts a directory that was restored from a copy")
def _trusts_copies() -> None:
    replace(identity._Identification, "_doubt_of_start", _without_doubt)


def _without_doubt(original: Any) -> Any:
    def note(self: Any, directory: str, version: int) -> str:
        doubt: str = original(self, directory, version)
        return "" if directory in self._others else doubt

    return note


@mutant("records the start of a copy before its doubt is on disk")
def _remembers_early() -> None:
    def make(original: Any) -> Any:
        def note(self: Any, directory: str, version: int) -> str:
            doubt: str = original(self, directory, version)
            if doubt:
                identity._note_start(self._disk, directory, version, version + 1)
            return doubt

        return note

    replace(identity._Identification, "_doubt_of_start", make)


@mutant("does not doubt records that a start writes again")
def _tail_undoubted() -> None:
    replace(storage, "renew_doubts", lambda _original: lambda _found, _facts: None)


@mutant("ends a doubt because an earlier one had ended")
def _ends_doubt() -> None:
    replace(storage, "drop_ends_of_doubts", lambda _original: lambda _found: None)

"""Ways to break the bookie, each of which its tests must notice; `make mutants` tries them all.

Every breakage is a patch that lasts for one run of the tests; nothing in kvstore/ knows of it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from errno import EDQUOT
from typing import Any

from msgspec.structs import replace as replaced

from kvstore import os_errors
from kvstore.bookie import admission, fencing, identity, inventory, keys, reader, replay, turns
from kvstore.bookie import node as node_module
from kvstore.bookie import storage as storage_module
from kvstore.bookie.adds import Adds
from kvstore.bookie.connections import requests as requests_module
from kvstore.bookie.connections import service as service_module
from kvstore.bookie.facts import Facts
from kvstore.bookie.fencing import WriteVerdict
from kvstore.bookie.index import index_files
from kvstore.bookie.journal import journal, scan, segment, supply
from kvstore.bookie.journal.record import RecordKind
from kvstore.bookie.journal.reserve import Use
from kvstore.bookie.storage import BookieStorage
from kvstore.bookie.upkeep import reclaim
from kvstore.proto.bookkeeper import Status
from tests.bookie.breakages import directories as of_directories  # noqa: F401 - it registers more of them
from tests.bookie.breakages import index_files as of_index_files  # noqa: F401 - so does this
from tests.bookie.breakages import stored_copies as of_held_entries  # noqa: F401 - as does this
from tests.bookie.breakages import unauthenticated  # noqa: F401 - and this
from tests.bookie.breakages.registry import MUTANTS, hide, mutant, patched, replace

__all__ = ["MUTANTS", "caught_by"]
VARIABLE = "BOOKIE_MUTANT"
MISFIT = re.compile(r"^E +(AttributeError|TypeError|NameError)\b.*", re.MULTILINE)
"""The last line of a failure if a patch does not fit the code."""


def pytest_configure() -> None:
    """Break what the environment names. Runs as a plugin."""
    MUTANTS[os.environ[VARIABLE]]()


@mutant("acks before the sync")
def _early_ack() -> None:
    def make(original: Any) -> Any:
        def store(self: Any, ledger: Any, entry: int, body: bytes, recovery: bool, lac: int, done: Any) -> None:
            original(self, ledger, entry, body, recovery, lac, lambda _status: None)
            done(Status.OK)

        return store

    replace(Adds, "_store", make)


@mutant("treats a quota as a broken disk")
def _broken_by_a_quota() -> None:
    replace(os_errors, "_MEANING", lambda original: {**original, EDQUOT: os_errors.Meaning.DIRECTORY})


@mutant("treats a failed sync as a full disk")
def _full_by_a_sync() -> None:
    def make(original: Any) -> Any:
        def failed(self: Any, error: OSError) -> None:
            if os_errors.is_passing(error):
                self._write_failed(self._syncing, error)
            else:
                original(self, error)

        return failed

    replace(journal.Journal, "_sync_failed", make)


@mutant("treats a lack of file descriptors as damage")
def _damage_by_a_shortage() -> None:
    replace(segment, "is_passing", lambda _original: lambda _error: False)
    replace(index_files, "is_passing", lambda _original: lambda _error: False)


@mutant("answers a fencing read before the fence is synced")
def _early_fence() -> None:
    replace(reader.Reader, "read", lambda original: lambda self, *a, after_all: original(self, *a, after_all=False))


@mutant("denies an entry before the fence is synced")
def _early_denial() -> None:
    def make(original: Any) -> Any:
        def read(self: Any, ledger: int, entry: int, done: Any, *, after_all: bool) -> None:
            found = self._ledgers.get(ledger)
            if found is not None and after_all and found.index.last < 0:
                self._answer(found, entry, done)
            else:
                original(self, ledger, entry, done, after_all=after_all)

        return read

    replace(reader.Reader, "read", make)


@mutant("does not record the fence")
def _volatile_fence() -> None:
    def make(original: Any) -> Any:
        def note(self: Any, kind: RecordKind, *rest: Any, **how: Any) -> None:
            if kind is not RecordKind.FENCE:
                original(self, kind, *rest, **how)

        return note

    replace(Facts, "note", make)


@mutant("accepts an entry again that it holds although it is fenced")
def _fenced_repeat() -> None:
    def make(original: Any) -> Any:
        def add(self: Any, ledger: int, entry: int, body: bytes, key: bytes, *, recovery: bool, done: Any) -> None:
            found = self.inventory.ledgers.get(ledger)
            held = found is not None and found.index.get(entry)[0] > 0
            original(self, ledger, entry, body, key, recovery=recovery or held, done=done)

        return add

    replace(BookieStorage, "add", make)


@mutant("trusts records after a bad one")
def _believing() -> None:
    def make(original: Any) -> Any:
        def records(result: Any, data: bytes, at: int, end: int, seed: int) -> int:
            while at < end:
                at = original(result, data, at, end, seed)
                if at < end:
                    at += 1
            return end

        return records

    replace(scan, "_records", make)


@mutant("treats damage as the end")
def _damage_is_the_end() -> None:
    replace(scan, "certified", lambda _original: lambda headers, file: 0)
    replace(replay, "certified", lambda _original: lambda headers, file: 1 << 30 if headers else 0)


@mutant("certifies a group before it is synced")
def _early_certificate() -> None:
    def make(original: Any) -> Any:
        def encode(header: Any, salt: int, offset: int) -> bytes:
            end = offset + 44 + header.size
            data: bytes = original(replaced(header, synced_file=header.file, synced_to=end), salt, offset)
            return data

        return encode

    replace(journal, "encode_group_header", make)


@mutant("drops records that are not known to be synced")
def _drop_tail() -> None:
    replace(replay._Replay, "_repeat", lambda _original: lambda self, segment, record: None)


@mutant("removes the old segments before the new one is known to be synced")
def _early_tidy() -> None:
    replace(
        journal.Journal, "note_files", lambda original: lambda self: original(self) if not self.synced_group else None
    )


@mutant("trusts the page cache after a failed sync")
def _page_cache() -> None:
    def make(original: Any) -> Any:
        def apply(self: Any, segment: Any, result: Any, *, is_anchor: bool) -> None:
            result.synced_to = result.end
            original(self, segment, result, is_anchor=is_anchor)

        return apply

    replace(replay._Replay, "_apply", make)


@mutant("reads packets without verifying their checksum")
def _unchecked() -> None:
    replace(segment.record, "is_body_good", lambda _original: lambda head, body: len(body) == head.size)


@mutant("calls entries absent that may be missing")
def _limbo_is_absence() -> None:
    replace(reader.Reader, "absent", lambda _: lambda self, ledger: Status.NO_ENTRY if ledger else Status.NO_LEDGER)


@mutant("calls a damaged entry absent")
def _damage_is_absence() -> None:
    def make(original: Any) -> Any:
        def answer(self: Any, ledger: Any, entry: int, done: Any) -> None:
            original(self, ledger, entry, lambda status, *rest: done(
                Status.NO_ENTRY if status is Status.IO_ERROR else status, *rest))  # fmt: skip

        return answer

    replace(reader.Reader, "_answer", make)


@mutant("accepts a first add without asking")
def _unasked() -> None:
    def make(original: Any) -> Any:
        def judge(ledger: Any, **how: Any) -> WriteVerdict:
            verdict: WriteVerdict = original(ledger, **how)
            return WriteVerdict.ADMIT if verdict is WriteVerdict.ASK else verdict

        return judge

    replace(keys, "judge_add", make)


@mutant("accepts adds to a ledger in recovery")
def _any_state() -> None:
    replace(
        admission,
        "judge_by_metadata",
        lambda _: lambda metadata, bookie, key: WriteVerdict.ADMIT if metadata else WriteVerdict.FENCED,
    )


@mutant("accepts the first key that it receives as the ledger's")
def _any_key() -> None:
    replace(admission, "judge_key_by_metadata", lambda _: lambda metadata, key: WriteVerdict.ADMIT)


@mutant("accepts adds to a ledger that names others")
def _any_ensemble() -> None:
    replace(fencing, "names", lambda _original: lambda metadata, bookie: True)


@mutant("does not check again after asking")
def _stale_verdict() -> None:
    def make(original: Any) -> Any:
        def ask(self: Any, ledger: int, key: bytes, size: int, judged: Any) -> bool:
            def resume(*verdicts: WriteVerdict) -> None:
                with patched(keys.KeyChecks, "judge_add", lambda *_, **_how: WriteVerdict.ASK):
                    judged(*verdicts)

            return bool(original(self, ledger, key, size, resume))

        return ask

    replace(admission.LedgerAdmission, "ask", make)


@mutant("denies entries to every client")
def _deny() -> None:
    def deny(self: Any, status: Status, ledger: int, answer: Any) -> None:
        answer(status)

    replace(requests_module.RequestHandler, "_when_deniable", lambda _original: deny)


@mutant("serves clients that mean another bookie")
def _any_name() -> None:
    replace(service_module.BookieConnection, "_is_meant", lambda _original: lambda self, request: True)


@mutant("ignores that a sync failed")
def _deaf() -> None:
    replace(journal.Journal, "_on_sync", lambda original: lambda self, error: original(self, None))


@mutant("ignores that zeros written ahead could not be synced")
def _deaf_to_zeroes() -> None:
    def make(original: Any) -> Any:
        return lambda self, up_to, _failed: original(self, up_to, lambda _error: None)

    replace(segment.Segment, "fill", make)


@mutant("is never too busy for another add")
def _no_backpressure() -> None:
    replace(service_module.BookieConnection, "_must_wait", lambda _original: lambda self, _payload: False)


@mutant("delays all requests while many wait for the metadata store")
def _one_gate() -> None:
    replace(service_module.BookieConnection, "_may_ask", lambda _original: lambda self, _payload: True)


@mutant("keeps unlimited batches for a client that does not read")
def _any_batch() -> None:
    replace(requests_module, "has_capacity", lambda _original: lambda *_: True)


@mutant("keeps polls of a closed connection")
def _polls_that_stay() -> None:
    def make(original: Any) -> Any:
        return lambda self, *what, **how: original(self, *what, **how) and (lambda: None)

    replace(reader.Reader, "long_poll", make)


@mutant("makes all lists at once")
def _no_turns() -> None:
    replace(turns.FairQueue, "add", lambda _original: lambda self, _owner, piece: piece(lambda: None))


@mutant("treats an empty directory as its own")
def _any_directory() -> None:
    def make(original: Any) -> Any:
        def cookie_in(self: Any, directory: str, content: set[str]) -> Any:
            full = [each for each in self._directories if self._disk.exists(f"{each}/VERSION")]
            return original(self, full[0], {"VERSION"})

        return cookie_in

    replace(identity._Identification, "_cookie_in", make)


@mutant("keeps its id when all directories are empty")
def _same_incarnation() -> None:
    def make(original: Any) -> Any:
        async def establish(env: Any, *how: Any, **given: Any) -> Any:
            env.random.seed(1)
            return await original(env, *how, **given)

        return establish

    replace(identity, "establish", make)


@mutant("does not notice a restored copy")
def _any_start() -> None:
    def make(original: Any) -> Any:
        def note(self: Any, directory: str, version: int) -> str:
            original(self, directory, version)
            return ""

        return note

    replace(identity._Identification, "_doubt_of_start", make)


@mutant("drops ledgers that a listing lacks")
def _trusting() -> None:
    async def drop(self: Any) -> list[int]:
        listed = set(await self._authority.ledgers())
        gone = [ledger for ledger in sorted(self._inventory.ledgers) if ledger not in listed]
        for ledger in gone:
            self.drop(ledger)
        return gone

    replace(reclaim.Reclaimer, "drop_deleted", lambda _original: drop)


@mutant("drops ledgers with ids that the metadata store has not given yet")
def _drops_unassigned() -> None:
    replace(reclaim.Reclaimer, "_may_be_of_later_metadata", lambda _original: lambda self, ledger, counted: False)


@mutant("starts with an older copy of the metadata")
def _starts_by_older_copy() -> None:
    async def refuse_nothing(ledgers: Any, authority: Any) -> None:
        return None

    replace(node_module, "refuse_older_metadata", lambda _original: refuse_nothing)


@mutant("leaves no tombstone")
def _no_tombstone() -> None:
    def make(original: Any) -> Any:
        def fact(self: Any, kind: RecordKind, *rest: Any) -> None:
            original(self, RecordKind.DROPPED if kind is RecordKind.TOMBSTONE else kind, *rest)

        return fact

    replace(reclaim.Reclaimer, "_fact", make)


@mutant("forgets facts when it removes a segment")
def _no_facts() -> None:
    replace(reclaim.Reclaimer, "_repeat_facts", lambda _original: lambda self, segment, ledger: None)


@mutant("removes a segment before its entries are synced elsewhere")
def _early_removal() -> None:
    def make(original: Any) -> Any:
        async def free(self: Any, segment: Any) -> bool:
            segment.remove()
            return bool(await original(self, segment))

        return free

    replace(reclaim.Reclaimer, "_free", make)


@mutant("treats a segment as empty while its last sync is in progress")
def _uncounted() -> None:
    hide(journal.Journal, "synced_file", property(lambda self: self.open_group.segment.file))


@mutant("replaces a newer entry by a rewritten one")
def _stale_rewrite() -> None:
    def make(original: Any) -> Any:
        def stored(self: Any, segment: Any, ledger: Any, entry: int, offset: int, size: int) -> None:
            if not ledger.index.get(entry)[0]:
                original(self, segment, ledger, entry, offset, size)

        return stored

    replace(inventory.Inventory, "stored", make)


@mutant("abandons a damaged segment permanently")
def _stuck_for_good() -> None:
    replace(reclaim.Reclaimer, "_is_stuck", lambda _original: lambda self, segment: segment.file in self._stuck)


@mutant("keeps a list of segments beside each checkpoint")
def _lists_for_good() -> None:
    def make(original: Any) -> Any:
        return lambda disk, directory, suffix=".index": [] if suffix == ".files" else original(disk, directory, suffix)

    replace(index_files, "indexed", make)


@mutant("accepts entries with a wrong digest")
def _any_digest() -> None:
    replace(storage_module, "is_crc", lambda _original: lambda _packet, _crc: True)


@mutant("accepts a last-add-confirmed with a wrong digest")
def _any_lac() -> None:
    replace(storage_module, "lac_proves_itself", lambda _original: lambda _packet: True)


@mutant("lets copies use up a full disk")
def _copies_first() -> None:
    replace(journal, "leaves", lambda _original: lambda _use, _segment_bytes: 0)


@mutant("records the key of an add that it refuses for lack of space")
def _keys_of_refused() -> None:
    def make(original: Any) -> Any:
        def first_contact(self: Any, ledger: int, key: bytes, *, flags: int = 0, **_: Any) -> Any:
            return original(self, ledger, key, flags=flags, use=Use.FACT)

        return first_contact

    replace(Facts, "first_contact", make)


@mutant("continues as if the disk were not full")
def _never_full() -> None:
    def update(self: Any) -> None:
        self.is_full = False
        self._on_full(False)

    replace(journal.Journal, "_update_full", lambda _original: update)


@mutant("checks free space only when it creates a segment")
def _never_looks() -> None:
    replace(supply.SegmentSupply, "poll", lambda _original: lambda self: None)


def caught_by(name: str) -> str | None:
    """Return the first test that fails with the breakage; None if all pass in spite of it."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not cluster",
        "-p",
        "tests.bookie.mutants",
        "tests/bookie",
    ]
    done = subprocess.run(command, env={**os.environ, VARIABLE: name}, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        raise RuntimeError(done.stdout + done.stderr)
    if done.returncode == 0:
        return None
    if misfit := MISFIT.search(done.stdout):
        raise AssertionError(f"{name!r} does not fit the code: {misfit[0]}\n{done.stdout}")
    return next(line for line in done.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests")))

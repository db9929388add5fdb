"""Ways to break the store. The simulated cluster must notice each; `make mutants` tries them all.

Every breakage is a patch that lasts for one run; nothing in kvstore/ knows of it. Each has the faults and knobs under
which it shows soonest, because the question is if the judges notice, and how many seeds they need. Breakages that whole
clusters show too rarely are in narrower suites: the ledger client in mutants_wal.py, a leader in
tests/partition/leading/test_mutants.py, a bookie in tests/bookie/mutants.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from errno import EDQUOT
from math import inf
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvstore import os_errors
from kvstore.bookie import fencing, identity, keys
from kvstore.bookie.adds import Adds
from kvstore.bookie.fencing import WriteVerdict
from kvstore.bookie.journal.supply import SegmentSupply
from kvstore.bookie.opening import make_directory
from kvstore.env.liveness.evidence import Evidence
from kvstore.meta.cookies import encode_cookie
from kvstore.meta.history.high_water import HighWater
from kvstore.meta.history.seen import SeenVersions
from kvstore.meta.history.verifier import Verifier
from kvstore.os_errors import Meaning
from kvstore.partition.config import PartitionConfig
from kvstore.partition.election.replica import Replica
from kvstore.partition.election.retention import LogRetention
from kvstore.partition.election.role_machine import RoleMachine
from kvstore.partition.election.trials import Investigations
from kvstore.partition.leading import evaluate, record_time
from kvstore.partition.leading.leader import Leader
from kvstore.partition.leading.read_lease import ReadLease
from kvstore.partition.partition import Partition
from kvstore.partition.state import rows
from kvstore.partition.state.commands import Get, Meta
from kvstore.partition.state.entry import NOTE, Entry
from kvstore.partition.state.retry_table import RetryTable
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.transfer import StateExport
from kvstore.proto.bookkeeper import Status
from kvstore.ring import placement
from kvstore.server.clock import clock_judge
from kvstore.server.clock.clock_judge import ClockJudge, PeerClock
from kvstore.server.clock.clock_sync import JudgedClock
from kvstore.server.clock.saved_date import SavedDate
from kvstore.server.peer.proof import CalledSide
from kvstore.types import BookieId, EntryId, Position, Seq, ServerId
from kvstore.wal.leading.leader_log import LeaderLog
from kvstore.wal.tailing.tail import TailReader
from kvstore.wal.takeover import LogTakeover
from tests.sim.breakages import mutants_balance as mutants_balance
from tests.sim.breakages import mutants_reach as mutants_reach
from tests.sim.breakages.catalogue import from_wal, mutant
from tests.sim.stories.stories import (
    acks_under_way,
    holder_that_does_not_answer,
    late_add_meets_a_recovery,
    wiped_bookie_answers,
    zombie_reads,
    zombie_whose_clock_stood_still,
)
from tests.sim.stories.stories_of_damage import all_differ, leader_is_damaged
from tests.sim.stories.stories_of_dates import (
    clocks_of_most,
    cold_start,
    leader_whose_date_is_wrong,
    log_ahead,
    pin_over_a_jump,
)
from tests.sim.stories.stories_of_leads import retry_after_a_snapshot, successor_lags_behind
from tests.sim.stories.stories_of_lists import list_written_late, power_fails_before_the_sync
from tests.sim.stories.stories_of_liveness import leader_whose_disk_hangs, leader_whose_loop_is_blocked
from tests.sim.strikes.knobs import MACHINES
from tests.sim.world import death
from tests.sim.world.death import SimDeathWatch
from tests.sim.world.engines import SimEngine

ZOMBIES = ("metadata_cut", "session_expiry", "pause_leader_beyond_its_session", "isolate")
"""Faults that leave an old leader alive while a new one takes over."""


ELEVEN = (
    "ack before sync",
    "recovery reads do not fence",
    "a recovery publishes its ensemble early",
    "unknown counts as absent",
    "acknowledges while the ensemble changes",
    "the lease is not waited out",
    "new leader reads before the wait is over",
    "retry without the table",
    "the LAC is ahead",
    "the list is written without compare",
    "empty directory accepted under the old id",
)
"""The breakages that every run of `make test` must notice. `make mutants` plays the others."""


# ── bookies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@mutant("ack before sync", story=power_fails_before_the_sync)
def _ack_before_sync(patch: pytest.MonkeyPatch) -> None:
    store = Adds._store

    def store_and_ack(self: Any, ledger: Any, entry: int, body: bytes, recovery: bool, lac: int, done: Any) -> None:
        store(self, ledger, entry, body, recovery, lac, lambda _status: None)
        done(Status.OK)

    patch.setattr(Adds, "_store", store_and_ack)


@mutant("empty directory accepted under the old id", story=wiped_bookie_answers)
def _old_id(patch: pytest.MonkeyPatch) -> None:
    establish = identity._Identification._format

    async def format_as_before(self: Any, contents: Any, unfinished: Any) -> Any:
        known = [each for each in await self._cookies.bookies() if each.startswith(f"{self._config.name}-")]
        if not known:
            return await establish(self, contents, unfinished)
        cookie, version = await self._cookies.read(BookieId(known[0]))
        for directory in self._directories:
            make_directory(self._disk, directory)
            self._write(f"{directory}/{identity.VERSION}", encode_cookie(cookie))
        self._write(f"{self._config.journal_dir}/{identity.STARTS}", f"{version}\n".encode())
        return identity.BookieIdentity(cookie.bookie, False, ())

    patch.setattr(identity._Identification, "_format", format_as_before)


@mutant("a fenced bookie takes ordinary adds", *ZOMBIES)
def _no_fence(patch: pytest.MonkeyPatch) -> None:
    judge = fencing.judge_add

    def judge_kindly(ledger: Any, **rest: Any) -> WriteVerdict:
        verdict = judge(ledger, **rest)
        return WriteVerdict.ADMIT if verdict is WriteVerdict.FENCED else verdict

    patch.setattr(keys, "judge_add", judge_kindly)


# ── the metadata store ────────────────────────────────────────────────────────────────────────────────────────────────


# docs/protocol.md B29
@mutant("uses an older copy of the metadata", "older_metadata")
def _uses_an_older_copy(patch: pytest.MonkeyPatch) -> None:
    async def why_older(self: HighWater) -> str:
        return ""

    patch.setattr(HighWater, "why_older", why_older)
    patch.setattr(SeenVersions, "note", lambda self, path, stat: True)


# docs/protocol.md B29
@mutant("verifies the metadata store at the start only", "older_metadata")
def _verified_once(patch: pytest.MonkeyPatch) -> None:
    verify = Verifier._verify

    async def verify_once(self: Verifier) -> None:
        if self._verified < 0:
            return await verify(self)
        self._accept(self._store.history.generation)

    patch.setattr(Verifier, "_verify", verify_once)
    patch.setattr(SeenVersions, "note", lambda self, path, stat: True)


# docs/protocol.md B29
@mutant("a high-water mark counts without the others", "older_metadata", found_by=187)
def _confirmed_alone(patch: pytest.MonkeyPatch) -> None:
    async def members(self: HighWater) -> dict[str, int]:
        return {}

    patch.setattr(HighWater, "_members", members)


# ── sessions ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@mutant("a session does not depend on the event loop", story=leader_whose_loop_is_blocked)
def _no_evidence_of_the_loop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evidence, "watch_loop", lambda _: None)


@mutant("a session does not depend on the disks", story=leader_whose_disk_hangs)
def _no_evidence_of_disks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evidence, "watch_disk", lambda *_, **__: None)


@mutant("a quota ends the process", "quota_exceeded")
def _fatal_quota(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(os_errors._MEANING, EDQUOT, Meaning.DIRECTORY)


@mutant("an engine that has stopped is not opened again", "quota_exceeded")
def _never_resumed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimEngine, "resume", lambda _self: None)


@mutant("a bookie that a quota has refused waits for free bytes", "quota_exceeded", segment_bytes=16 << 10)
def _waits_for_bytes(patch: pytest.MonkeyPatch) -> None:
    make = SegmentSupply.make_spare

    def make_if_bytes_were_missing(self: Any) -> None:
        if not self._why_none:
            make(self)

    patch.setattr(SegmentSupply, "make_spare", make_if_bytes_were_missing)


# ── ledgers and logs ──────────────────────────────────────────────────────────────────────────────────────────────────

from_wal("recovery reads do not fence", story=late_add_meets_a_recovery)
from_wal("a recovery publishes its ensemble early", "kill_leader", "isolate", "cut_a_link", nodes=5, pace_s=0.2)
from_wal("unknown counts as absent", story=holder_that_does_not_answer)
from_wal(
    "acknowledges while the ensemble changes",
    "kill",
    "isolate",
    "metadata_trouble",
    found_by=6,
    nodes=5,
    pace_s=0.2,
)
from_wal("the lease is not waited out", story=zombie_reads, lease_ms=3000)


@mutant("an end is published while the process lives", story=zombie_reads, lease_ms=3000)
def _early_certificate(patch: pytest.MonkeyPatch) -> None:
    leave = SimDeathWatch.leave

    def rash(self: Any, message: bytes, addresses: Any) -> None:
        leave(self, message, addresses)
        self.publish()

    patch.setattr(SimDeathWatch, "leave", rash)
    patch.setattr(death, "UNPUBLISHED", 0.0)


from_wal("the LAC is ahead", *ZOMBIES, "kill_leader", "resets")
from_wal("two processes of a machine get copies of an entry", nodes=5, machines=MACHINES)


# docs/protocol.md H15
@mutant("two processes of a machine get replicas of a partition", nodes=5, machines=MACHINES)
def _process_as_machine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placement, "machine_of", lambda node: node)


from_wal("the list is written without compare", story=list_written_late, roll_entries=8)
from_wal("a takeover recovers the last ledger only", "kill_leader", "kill_all", log__roll_entries=3)
from_wal("a rolled ledger is not listed", log__roll_entries=8)


@mutant("a tail is given what is stored and not confirmed", *ZOMBIES, "kill_leader", "resets")
def _unconfirmed(patch: pytest.MonkeyPatch) -> None:
    give: Any = TailReader._give

    def rash(self: Any) -> None:
        self._end.lac = EntryId(self._next + 20)
        give(self)

    patch.setattr(TailReader, "_give", rash)


@mutant("who asks is given what rests and is not confirmed", "isolate", "kill_leader", "resets", load__readers=2)
def _unconfirmed_when_asked(patch: pytest.MonkeyPatch) -> None:
    def rash(self: Any) -> None:
        if self._taker is not None and self._reader is not None:
            self._end.lac = EntryId(self._next + 20)
            self._give()

    patch.setattr(TailReader, "give_now", rash)


@mutant("pauses that no clock sees are not waited out", story=zombie_whose_clock_stood_still(0.25), lease_ms=400)
def _no_hidden_pauses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartitionConfig, "listed_lease_ms", property(lambda self: self.lease_ms))


@mutant("new leader reads before the wait is over", story=acks_under_way, lease_ms=3000)
def _early_reads(patch: pytest.MonkeyPatch) -> None:
    """The list's compare-and-set comes before the wait, and only acknowledgements of writes wait."""
    append, init = LeaderLog.append, LeaderLog.__init__
    waits: dict[str, float] = {}

    async def note(self: Any, listed: Any, taken: Any) -> None:
        until = max((each.fenced_at for each in taken), default=-inf) + listed.lease_wait_s()
        waits[self._partition] = until - self._ports.clock.now()

    def begin(self: Any, partition: Any, opened: Any, **rest: Any) -> None:
        init(self, partition, opened, **rest)
        self.acks_from = self._loop.time() + max(0.0, waits.pop(partition, 0.0))
        self.is_started = False

    def append_and_wait(self: Any, payload: bytes, first_seq: Any, done: Any) -> None:
        first, self.is_started = not self.is_started, True

        def later(*answer: Any) -> None:
            self._loop.call_at(max(self._loop.time(), self.acks_from), done, *answer)

        append(self, payload, first_seq, done if first else later)  # type: ignore[arg-type]

    patch.setattr(LogTakeover, "_wait_out", note)
    patch.setattr(LeaderLog, "__init__", begin)
    patch.setattr(LeaderLog, "append", append_and_wait)


@mutant("trims what is applied, not what is synced", "kill_all", log__roll_entries=8, partition__flush_s=5.0)
def _trim_applied(patch: pytest.MonkeyPatch) -> None:
    floor = LogRetention.floor

    def applied(self: Any, replicas: Any, copies_min: int) -> Seq:
        return Seq(floor(self, replicas, copies_min) + 1_000_000)

    patch.setattr(LogRetention, "floor", applied)


# ── partitions ────────────────────────────────────────────────────────────────────────────────────────────────────────


@mutant("retry without the table", "kill_leader", "resets", "metadata_cut", load__counters=2)
def _no_retry_table(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RetryTable, "find", lambda self, *_: None)


@mutant("applied and shown before it is acknowledged", "kill_leader", "isolate", "cut_a_link")
def _apply_early(patch: pytest.MonkeyPatch) -> None:
    append, apply_decoded = Leader._append, ReplicaState.apply_decoded

    def append_and_apply(self: Any, made: Any, replies: Any, *arrived: Any) -> None:
        append(self, made, replies, *arrived)
        if self.serving and self._state.position is not None:
            ledger, entry = self._state.position
            apply_decoded(self._state, Position(ledger, entry + 1), made.entry, made.data_keys)

    def apply_once(self: Any, position: Any, entry: Any, data_keys: Any) -> None:
        if self.seq < entry.first_seq or not entry.keys:
            apply_decoded(self, position, entry, data_keys)

    patch.setattr(Leader, "_append", append_and_apply)
    patch.setattr(ReplicaState, "apply_decoded", apply_once)


@mutant("the second of several entries that are applied together has no effect")
def _left_out(patch: pytest.MonkeyPatch) -> None:
    apply_run = ReplicaState.apply_run

    def forgetful(self: Any, run: Any) -> None:
        first, (at, entry), *others = run
        nothing = Entry(entry.partition, entry.epoch, entry.first_seq, entry.time_ms, bytes((NOTE,)) * len(entry.keys))
        nothing.keys, nothing.requests = entry.keys, entry.requests
        apply_run(self, [first, (at, nothing), *others])

    patch.setattr(ReplicaState, "apply_run", forgetful)


@mutant("a leader reads without a lease", story=acks_under_way, lease_ms=500)
def _no_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadLease, "has_lease", lambda self, now: not self._closed)


@mutant("a read at once needs no lease", story=acks_under_way, lease_ms=500)
def _no_lease_at_once(patch: pytest.MonkeyPatch) -> None:
    def fresh_until(self: Any) -> float:
        return -inf if self._closed else inf

    patch.setattr(ReadLease, "fresh_until", property(fresh_until, lambda self, until: None), raising=False)


@mutant("the lease check is remembered", story=acks_under_way, lease_ms=500)
def _cached_lease(patch: pytest.MonkeyPatch) -> None:
    has_lease = ReadLease.has_lease

    def cached(self: Any, now: float) -> bool:
        known = getattr(self, "known", None)
        if known is None or not known[1] or now - known[0] > 3.0:
            known = self.known = (now, has_lease(self, now))
        return bool(known[1])

    patch.setattr(ReadLease, "has_lease", cached)


@mutant("a session read ignores its token", "isolate", "cut_a_link", "slow_links", load__readers=2)
def _no_token(patch: pytest.MonkeyPatch) -> None:
    answer_here = Partition._answer_here
    patch.setattr(
        Partition,
        "_answer_here",
        lambda self, op: answer_here(self, replace(op, seq=0) if isinstance(op, (Get, Meta)) else op),
    )


@mutant("a replica skips an entry after a reset", "resets", "kill", "isolate")
def _skip(patch: pytest.MonkeyPatch) -> None:
    open_ledger = TailReader._open

    async def skip(self: Any, ledger: Any, first: Any) -> None:
        await open_ledger(self, ledger, first + (first > 0))

    patch.setattr(TailReader, "_open", skip)


@mutant("one key of a batch is applied late", "kill_leader", load__banks=2)
def _torn_batch(patch: pytest.MonkeyPatch) -> None:
    decide = evaluate.Evaluator.evaluate

    def tear(self: Any, items: Any, wall_ms: int) -> Any:
        decided = decide(self, items, wall_ms)
        if decided.entry is None:
            return decided
        entry = decided.entry.entry
        if len(entry.keys) == len(entry.values) == 2 and all(k[:1] == b"{" for k in entry.keys):
            entry.values[1] = b"%d" % (int(entry.values[1]) + 1)
            made = msgspec.structs.replace(decided.entry, payload=entry.encode())
            return msgspec.structs.replace(decided, entry=made)
        return decided

    patch.setattr(evaluate.Evaluator, "evaluate", tear)


# ── a lead that changes hands ─────────────────────────────────────────────────────────────────────────────────────────


# docs/protocol.md P16
@mutant("a snapshot carries no request ids", story=retry_after_a_snapshot, roll_entries=4, lead_back_s=100.0)
def _no_request_ids(patch: pytest.MonkeyPatch) -> None:
    begin = StateExport.__init__

    def without(self: Any, state: ReplicaState) -> None:
        begin(self, state)
        given = self._rows
        self._rows = (each for each in given if not each[0].startswith(rows.ALL_RETRY[0]))

    patch.setattr(StateExport, "__init__", without)


# docs/protocol.md P26
@mutant("PREPARE waits for nothing", story=successor_lags_behind, lead_back_s=100.0)
def _prepared_at_once(patch: pytest.MonkeyPatch) -> None:
    async def at_once(_self: Replica, _asked: Any) -> bytes:
        return b"1"

    patch.setattr(Replica, "_prepare", at_once)


# ── replicas that differ ──────────────────────────────────────────────────────────────────────────────────────────────


@mutant("an outvoted leader stays", story=leader_is_damaged, lead_back_s=100.0, check_every=5)
def _outvoted_stays(patch: pytest.MonkeyPatch) -> None:
    answer = Investigations.answer

    def deaf(self: Any, server: ServerId, body: bytes) -> bytes:
        before = self.trial.since
        said = answer(self, server, body)
        self.trial.since = before
        return said

    patch.setattr(Investigations, "answer", deaf)


@mutant("a failed replica stands", story=all_differ, lead_back_s=100.0, check_every=5)
def _failed_stands(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoleMachine, "_bar", lambda self, is_barred, now: [])


# ── servers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@mutant("who says that he is a server is one", "forged_frames", load__registers=3)
def _anybody(patch: pytest.MonkeyPatch) -> None:
    def believe(self: Any, data: bytes) -> bytes:
        self._received += data
        proof = self._meeting.proof(self._own.keys[0], b"called")
        return b"+%b\r\n" % proof.hex().encode() if len(self._received) >= 32 else b""

    patch.setattr(CalledSide, "take", believe)


# ── dates ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@mutant("dates are the wall clock's", "clock_jumps", load__lodgers=4, chaos_s=6.0)
def dates_of_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JudgedClock, "date_ms", lambda self: self.wall_ms())


@mutant("removes by the wall clock", story=pin_over_a_jump, roll_entries=3)
def remove_by_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JudgedClock, "passed_ms", lambda self: self.wall_ms())
    patch.setattr(JudgedClock, "may_lead", lambda self: True)  # otherwise another replica leads first


@mutant("the first date is believed", story=cold_start)
def believe_the_first_date(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClockJudge, "_begin", lambda self, *_: self._take(self._wall_ms))


@mutant("the date follows the wall clocks of a majority at once", story=clocks_of_most)
def follow_a_majority_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clock_judge, "RATE", 1e6)


@mutant("the first date is that of wall clocks", story=clocks_of_most)
def begin_with_wall_clocks(patch: pytest.MonkeyPatch) -> None:
    begin = ClockJudge._begin

    def of_nobody(self: ClockJudge, others: Sequence[PeerClock], majority: int) -> None:
        begin(self, [each._replace(offset_ms=None) for each in others], majority)

    patch.setattr(ClockJudge, "_begin", of_nobody)


@mutant("no date is kept for the next process", story=clocks_of_most)
def keep_no_date(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SavedDate, "keep", lambda self, offset_ms: None)


@mutant("wall clocks count while a server is silent", story=clocks_of_most)
def wait_for_nobody(patch: pytest.MonkeyPatch) -> None:
    begin = ClockJudge._begin

    def at_once(self: ClockJudge, others: Sequence[PeerClock], majority: int) -> None:
        self._waited_s = clock_judge.ALONE_S
        begin(self, others, majority)

    patch.setattr(ClockJudge, "_begin", at_once)


@mutant("record time stands while it is ahead", story=log_ahead)
def stand_while_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(record_time, "AHEAD_RATE", 0.0)


@mutant("who doubts its date leads on", story=leader_whose_date_is_wrong)
def lead_in_doubt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JudgedClock, "may_lead", lambda self: True)

"""State and leader against a plain dict, with delayed acknowledgements, lost leaders, crashes and clock jumps.

The model runs each operation when the leader evaluates it, so it is ahead of the state by the operations in flight.
When a leader is lost, some of its entries in flight survive, and the model falls back to the last of them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from kvstore.errors import NotLeader, OutcomeUnknown, RequestExpired, Retryable, StoreError
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.evaluate import Decided, Item
from kvstore.partition.leading.range_delete import Reap
from kvstore.partition.state import commands as c
from kvstore.partition.state.commands import Code, Flag, Level, Op, RequestId
from kvstore.partition.state.entry import Entry
from kvstore.partition.state.state import ReplicaState
from kvstore.wal.ports import LogEntry
from tests.partition.effects import all_records, check_indexes
from tests.partition.model import Model
from tests.partition.one_partition import P1, UNKNOWN, Partition
from tests.ring import rings

KEYS = st.sampled_from([b"a", b"b", b"{t}1", b"{t}2", b"n"])
VALUES = st.sampled_from([b"", b"1", b"22", b"x"])
TTLS = st.sampled_from([0, 0, 0, 1, 50, 400])
FLAGS = st.sampled_from([0, 0, Flag.IF_ABSENT, Flag.IF_PRESENT, Flag.IF_VERSION, Flag.KEEP_TTL, Flag.RETURN_OLD,
                         Flag.RETURN_OLD | Flag.IF_ABSENT])  # fmt: skip
EXPIRE_FLAGS = st.sampled_from([0, Flag.IF_NO_TTL, Flag.IF_TTL, Flag.IF_LONGER, Flag.IF_SHORTER])
VERSIONS = st.integers(0, 12)
RELATIVE = Flag.RELATIVE_TTL

SINGLE = st.one_of(
    st.builds(c.Put, KEYS, VALUES),
    st.builds(lambda k, v, t, f, n: c.Put(k, v, t, f | RELATIVE, n), KEYS, VALUES, TTLS, FLAGS, VERSIONS),
    st.builds(c.Delete, KEYS, FLAGS, VERSIONS),
    st.builds(c.Increment, KEYS, st.integers(-2, 2)),
    st.builds(c.Append, KEYS, VALUES),
    st.builds(lambda k, t, f: c.Expire(k, t, f | RELATIVE), KEYS, TTLS, EXPIRE_FLAGS),
    st.builds(lambda k: c.Expire(k, 0), KEYS),
)
IN_BATCH = st.one_of(SINGLE, st.builds(c.Get, KEYS), st.builds(c.Meta, KEYS))
MUTATION = st.one_of(
    SINGLE,
    SINGLE,
    st.builds(
        lambda ops, f: c.Batch(ops[0].key, tuple(ops), f),
        st.lists(IN_BATCH, min_size=1, max_size=4),
        st.sampled_from([0, Flag.INDEPENDENT]),
    ),
    st.builds(c.DeleteRange, KEYS, st.sampled_from([b"", b"n", b"c"])),
)
LEVELS = st.sampled_from([Level.LINEARIZABLE, Level.LINEARIZABLE, Level.STRICT])
READ = st.one_of(
    st.builds(c.Get, KEYS, LEVELS),
    st.builds(c.Meta, KEYS, LEVELS),
    st.builds(lambda start, level: c.Scan(start, b"", 3, 0, level), KEYS, LEVELS),
    st.builds(
        lambda end, level, flags: c.Range(b"", end, 100, flags, level),
        KEYS,
        LEVELS,
        st.sampled_from([0, Flag.REVERSE, Flag.BARE, Flag.REVERSE | Flag.BARE, Flag.COUNT_ONLY]),
    ),
    st.builds(lambda level: c.ScanTokens(0, 100, level), LEVELS),
    st.builds(c.Count, LEVELS),
)
CLIENTS = [b"x" * 16, b"y" * 16]


class Leading(RuleBasedStateMachine):
    @initialize(flight=st.integers(1, 4), lease_ms=st.sampled_from([0, 500, 500]))
    def begin(self, flight: int, lease_ms: int) -> None:
        config = PartitionConfig(
            lease_ms=lease_ms, entries_in_flight_max=flight, check_every=2, retry_window_ms=2_000, expiry_sweep_s=0.7
        )
        self.p = Partition(config)
        self.model = Model()
        self.acknowledged = Model()
        self.snapshots: deque[Model] = deque()
        self.log: list[LogEntry] = []
        self.ops: dict[int, Op] = {}
        self.sequences = [0, 0]
        self.open: list[set[int]] = [set(), set()]
        """Per client: sequences without a final answer."""
        self.computed_from: dict[int, int] = {}
        """By token: the sequence that the answer depends on."""
        self.sent: list[Op] = []
        self.p.caller.on_complete = self.completed
        self.lead()

    def teardown(self) -> None:
        if hasattr(self, "p"):
            self.p.loop.close()

    def lead(self) -> None:
        evaluator = self.p.leader._evaluator
        decide = evaluator.evaluate

        def evaluate(items: list[Item], wall_ms: int) -> Decided:
            decided = decide(items, wall_ms)
            self.decided(items, wall_ms, decided)
            return decided

        evaluator.evaluate = evaluate  # type: ignore[method-assign]
        self.p.log.on_append = self.appended
        self.p.loop.create_task(self.p.leader.start())
        self.p.settle()
        self.acknowledge_one()
        self.p.settle()
        assert self.p.leader.serving

    # ── the model beside the leader ───────────────────────────────────────────────────────────────────────────────────

    def decided(self, items: list[Item], wall_ms: int, decided: Decided) -> None:
        """Evaluate the operations in the model too, because the leader has evaluated them."""
        time_ms = self.model.time_ms
        self.model.time_ms = max(time_ms, wall_ms)
        for (op, _, _), (_, _, result) in zip(items, decided.replies, strict=True):
            if isinstance(op, Reap):
                self.model.reap(op.keys)
            elif isinstance(result, RequestExpired):
                assert self.may_be_refused(op, self.model.time_ms), f"{op} was refused: {result}"
            else:
                expected = self.model.apply(op)
                assert repr(result) == repr(expected), f"{op} got {result}, want {expected}"
        self.computed_from.update({token: self.model.seq for _, token, _ in decided.replies})
        if decided.entry is None:
            self.model.time_ms = time_ms
        else:
            assert self.model.seq == decided.entry.entry.last_seq

    def may_be_refused(self, op: Op, now_ms: int) -> bool:
        """Return True for a late duplicate, or a request too old to be distinguished from one."""
        request: RequestId = op.request
        return request.seen_ms < now_ms - 2_000 or request.sequence not in self.open[CLIENTS.index(request.client)]

    def appended(self, entry: Entry) -> None:
        self.model.time_ms = entry.time_ms
        self.snapshots.append(self.model.copy())

    def acknowledge_one(self) -> None:
        self.acknowledged = self.snapshots.popleft()
        self.log.append(self.p.log.in_flight[0][0])
        self.p.log.acknowledge()

    def completed(self, token: int, result: Any) -> None:
        op = self.ops[token]
        if op.code in (Code.GET, Code.META, Code.COUNT, Code.SCAN, Code.SCAN_TOKENS, Code.RANGE):
            assert not isinstance(result, OutcomeUnknown)
            if not isinstance(result, StoreError):
                expected = self.acknowledged.read(op, max(self.p.state.record_time_ms, self.p.wall_ms()))
                found = result[0] if op.code in (Code.SCAN, Code.SCAN_TOKENS, Code.RANGE) else result
                assert found == expected, f"{op} got {found}, want {expected}"
            return
        request: RequestId | None = op.request
        if request is not None and not isinstance(result, StoreError):
            self.open[CLIENTS.index(request.client)].discard(request.sequence)
        if not isinstance(result, OutcomeUnknown | Retryable):
            assert self.computed_from[token] <= self.acknowledged.seq, f"{op} got {result} before it was true"
            assert self.computed_from[token] <= self.p.state.seq, f"{op} got {result} before it was applied"

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, ops: list[Op]) -> None:
        for offset, op in enumerate(ops):
            self.ops[self.p.tokens + offset] = op
        self.p.submit(*ops)

    @rule(ops=st.lists(st.one_of(MUTATION, MUTATION, READ), min_size=1, max_size=6))
    def operations(self, ops: list[Op]) -> None:
        self.submit(ops)

    @rule(ops=st.lists(MUTATION, min_size=1, max_size=3), who=st.integers(0, 1))
    def operations_with_request_ids(self, ops: list[Op], who: int) -> None:
        identified = []
        for op in ops:
            self.sequences[who] += 1
            self.open[who].add(self.sequences[who])
            request = RequestId(CLIENTS[who], self.sequences[who], min(self.open[who]), self.p.state.record_time_ms)
            identified.append(replace(op, request=request))
        self.sent += identified
        self.submit(identified)

    @rule(data=st.data())
    def a_retry_or_a_late_duplicate(self, data: st.DataObject) -> None:
        if self.sent:
            self.submit([data.draw(st.sampled_from(self.sent))])

    @rule(count=st.integers(1, 4))
    def entries_are_acknowledged(self, count: int) -> None:
        for _ in range(min(count, len(self.p.log.in_flight))):
            self.acknowledge_one()
        self.p.settle()

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.4, 0.6, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.p.wait(seconds)

    @rule(by_ms=st.sampled_from([-5_000, -100, 100, 1_000]))
    def the_wall_clock_jumps(self, by_ms: int) -> None:
        self.p.wall_offset_ms += by_ms

    @rule(survivors=st.integers(0, 4), crash=st.booleans(), keep=st.integers(0, 30))
    def the_leader_is_lost(self, survivors: int, crash: bool, keep: int) -> None:
        surviving = [logged for logged, _, _ in self.p.log.in_flight][:survivors]
        self.p.log.fail(UNKNOWN)
        self.p.leader.stop(NotLeader("p1"))
        self.p.settle()
        for _ in surviving:
            self.acknowledged = self.snapshots.popleft()
        self.snapshots.clear()
        self.log += surviving
        self.model = self.acknowledged.copy()
        if crash:
            self.p.engine.crash(keep)  # type: ignore[attr-defined]
            self.p.state = ReplicaState(P1, self.p.engine, self.p.config, rings.key_hash)
        for logged in self.log:
            self.p.state.apply(logged)
        self.p.open()
        self.lead()

    @rule()
    def the_leader_hands_over(self) -> None:
        release = self.p.loop.create_task(self.p.leader.release())
        self.p.settle()
        while self.p.log.in_flight:
            self.acknowledge_one()
            self.p.settle()
        assert release.done()
        assert self.p.state.released
        self.p.open()
        self.lead()

    @rule()
    def the_state_is_synced(self) -> None:
        self.p.loop.call_soon(self.p.state.submit_flush, lambda error: None)
        self.p.settle()

    @invariant()
    def the_state_is_what_is_acknowledged(self) -> None:
        state = self.p.state
        assert all_records(state) == self.acknowledged.records
        assert (state.seq, state.key_count) == (self.acknowledged.seq, len(self.acknowledged.records))
        assert state.record_time_ms == self.acknowledged.time_ms
        assert not self.p.fatal
        assert not self.p.loop.errors
        assert len(self.p.leader._evaluator._overlay.layers) == len(self.p.log.in_flight)
        check_indexes(state)


TestLeading = Leading.TestCase
TestLeading.settings = settings(max_examples=150, stateful_step_count=40)

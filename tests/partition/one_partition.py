"""A leader over a log that the test acknowledges, in virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, cast

from kvstore.env import Env
from kvstore.env.clock import Unjudged
from kvstore.env.slow_log import SlowLog
from kvstore.errors import OutcomeUnknown, StoreError
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.leader import Leader
from kvstore.partition.state.commands import NotNow, Op, Record, Sink
from kvstore.partition.state.engine import Engine
from kvstore.partition.state.entry import Entry, EntryKind, decode
from kvstore.partition.state.rows import record_of
from kvstore.partition.state.state import ReplicaState
from kvstore.types import EntryId, LedgerId, PartitionId, Position, Seq
from kvstore.wal.ports import AppendDone, LogEntry
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings
from tests.sim.world.loop import SimLoop

P1 = PartitionId("p1")
TIME_MS = 1_700_000_000_000
BASE_S = 1000.0


class _Waits(str):
    """The missing result of an operation. It has no parts, so that no test mistakes it for a tuple."""

    __slots__ = ()

    def __getitem__(self, place: object) -> str:
        raise AssertionError("the operation waits")


_WAITS = _Waits("waits")


class FakeLog:
    """A LeaderLog whose appended entries stay in flight until the test decides their fate."""

    def __init__(self, epoch: int, now: Callable[[], float]) -> None:
        self.epoch = epoch
        self.waited = True
        self.lost: StoreError | None = None
        self.in_flight: deque[tuple[LogEntry, float, AppendDone]] = deque()
        self.acknowledged: list[LogEntry] = []
        self.sealed = self.closed = False
        self.tell_lost: Callable[[StoreError], None] = lambda error: None
        self.on_append: Callable[[Entry], None] = lambda entry: None
        self._now = now
        self._appended = 0

    @property
    def recovered_end(self) -> Position:
        return Position(LedgerId(self.epoch - 1), EntryId(1 << 40))

    def append(self, payload: bytes, first_seq: Seq, done: AppendDone) -> None:
        entry = decode(payload)
        assert entry.first_seq == first_seq
        self.on_append(entry)
        logged = LogEntry(Position(LedgerId(self.epoch), EntryId(self._appended)), payload)
        self._appended += 1
        self.in_flight.append((logged, self._now(), done))

    def acknowledge(self, count: int = 1) -> None:
        """Acknowledge the oldest entries in flight."""
        for _ in range(count):
            logged, sent_at, done = self.in_flight.popleft()
            self.acknowledged.append(logged)
            done(logged.position, sent_at, None)

    def fail(self, error: StoreError) -> None:
        """Fail the oldest entry in flight, and with it all others."""
        while self.in_flight:
            _, sent_at, done = self.in_flight.popleft()
            done(None, sent_at, error)

    def close_for_good(self) -> None:
        self.closed = True

    def statistics(self) -> dict[str, int]:
        return {}

    async def seal(self) -> None:
        assert not self.in_flight
        self.sealed = True

    async def trim(self, durable_seq: Seq, older_than_ms: int) -> int:
        return 0

    def on_lost(self, lost: Callable[[StoreError], None]) -> None:
        self.tell_lost = lost


class Caller(Sink):
    """A sink that keeps its results."""

    def __init__(self) -> None:
        self.results: dict[int, Any] = {}
        self.flushed: set[int] = set()
        self.on_complete: Callable[[int, Any], None] = lambda token, result: None

    def complete(self, token: int, result: Any) -> None:
        assert token not in self.results, f"operation {token} was answered twice"
        self.results[token] = result
        self.on_complete(token, result)

    def flush(self) -> None:
        self.flushed = set(self.results)


class Partition(Unjudged):
    """One state and its successive leaders. `now` is in seconds since the beginning."""

    def __init__(
        self,
        config: PartitionConfig | None = None,
        engine: Engine | None = None,
        seed: int = 0,
        partition: PartitionId = P1,
        loop: SimLoop | None = None,
    ) -> None:
        self.loop = loop or SimLoop(Random(seed))
        self.config = config or PartitionConfig(expiry_sweep_s=0, lease_ms=500)
        self.engine = engine or MemoryEngine()
        self.state = ReplicaState(partition, self.engine, self.config, rings.key_hash)
        self.caller = Caller()
        self.wall_offset_ms = 0
        self.stopped: list[StoreError] = []
        self.fatal: list[str] = []
        self.starved = 0.0
        self.slow = SlowLog(100, self.now, self.date_ms, lambda: self.starved)
        self.epoch = 0
        self.tokens = 0
        MADE.append(self)
        self.open()

    # The clock
    def now(self) -> float:
        return BASE_S + self.loop.time()

    def wall_ms(self) -> int:
        return TIME_MS + self.wall_offset_ms + round(self.loop.time() * 1000)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def wait(self, seconds: float) -> None:
        """Let virtual time pass."""
        over = self.loop.create_future()
        self.loop.call_later(seconds, over.set_result, None)
        self.loop.run_until_complete(over)

    def settle(self) -> None:
        """Run everything that is due now."""
        self.run(_turns())

    # Leaders
    def open(self) -> None:
        """Open a new leader, without starting it."""
        self.epoch += 1
        self.log = FakeLog(self.epoch, self.now)
        env = Env(
            clock=self, random=Random(0), transport=cast(Any, None), disk=cast(Any, None), nursery=cast(Any, None),
            fatal=self.fatal.append, starved=lambda: self.starved, slow=self.slow,
        )  # fmt: skip
        self.run(self._make(env))

    async def _make(self, env: Env) -> None:
        self.leader = Leader(env, self.config, self.state, self.log, self.stopped.append)

    def start(self) -> Partition:
        """Let the leader serve."""
        started = self.loop.create_task(self.leader.start())
        self.settle()
        self.log.acknowledge()
        self.settle()
        assert started.done()
        assert started.result() is None
        return self

    def submit(self, *ops: Op) -> list[int]:
        """Submit operations together, and return their tokens."""
        tokens = list(range(self.tokens, self.tokens + len(ops)))
        self.tokens += len(ops)
        for token, op in zip(tokens, ops, strict=True):
            self.loop.call_soon(self.leader.submit, (op,), self.caller, (token,))
        self.settle()
        return tokens

    def read_now(self, key: bytes) -> Record | NotNow | None:
        """Return what a read finds that does not wait for its turn, alone or together with others."""
        rows = self.read_all_now(key)
        many = self.read_all_now(key, key)
        assert many == (rows if isinstance(rows, NotNow) else rows * 2)
        if isinstance(rows, NotNow):
            return rows
        return None if rows[0] is None else record_of(rows[0])

    def read_all_now(self, *keys: bytes) -> list[bytes | None] | NotNow:
        """Return the rows that many reads find together."""
        return self.leader.reads.now([*keys], rings.key_hash.tokens_of([*keys]), self.now())

    def do(self, *ops: Op) -> Any:
        """Submit operations, acknowledge all entries, and return the results (for one operation: its result)."""
        tokens = self.submit(*ops)
        while self.log.in_flight:
            self.log.acknowledge(len(self.log.in_flight))
            self.settle()
        results = [self.caller.results[token] for token in tokens]
        return results if len(results) > 1 else results[0]

    def result(self, token: int) -> Any:
        """Return the operation's result; the string "waits" while it has none."""
        return self.caller.results.get(token, _WAITS)

    def acknowledge(self, count: int = 1) -> None:
        self.log.acknowledge(count)
        self.settle()

    def in_flight(self) -> list[Entry]:
        return [decode(logged.payload) for logged, _, _ in self.log.in_flight]

    def sent_kinds(self) -> list[EntryKind]:
        """Return the kinds of the control records in flight."""
        return [EntryKind(entry.kinds[0]) for entry in self.in_flight() if entry.is_control]


MADE: list[Partition] = []
"""Partitions of the running test; tests/partition/conftest.py closes their loops."""


async def _turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


UNKNOWN = OutcomeUnknown("test")

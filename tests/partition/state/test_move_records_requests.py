"""Random requests while their keys move, at the level of two states: a request that was applied at the source is
recognised or refused at the target, and never applied again, despite changes of the target's leader, restarts and lost
answers (docs/protocol.md M3, M4, P12 to P15)."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from kvstore.errors import NotLeader, RequestExpired, Retryable, StoreError
from kvstore.partition.config import PartitionConfig
from kvstore.partition.moves import pages
from kvstore.partition.state import commands as c
from kvstore.partition.state import entry as entries
from kvstore.partition.state.commands import Flag, Op, RequestId, Result
from kvstore.partition.state.digest import RangeDigest
from kvstore.partition.state.entry import Requests
from kvstore.partition.state.move_records import (
    Founded,
    Freeze,
    ImportBegin,
    ImportEnd,
    ImportRows,
    MoveRecord,
    Own,
    Release,
)
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import TokenSpan
from kvstore.ring.hashing import TOKENS
from kvstore.types import PartitionId, Position
from tests.partition.effects import all_records, check_indexes
from tests.partition.one_partition import TIME_MS, UNKNOWN, Partition
from tests.ring import rings
from tests.sim.moving.moves import keys_in

pytestmark = pytest.mark.usefixtures("key_hash")

MOVING, STAYING = TokenSpan(0, TOKENS // 2 - 1), TokenSpan(TOKENS // 2, TOKENS - 1)
MOVING_KEYS, STAYING_KEYS = keys_in(MOVING, 4, b"m"), keys_in(STAYING, 3, b"s")
KEYS = MOVING_KEYS * 2 + STAYING_KEYS
P1, P2 = PartitionId("p1"), PartitionId("p2")
CLIENTS = [bytes((65 + number,)) * 16 for number in range(3)]
MOVE = 1


def log(p: Partition, record: MoveRecord, requests: Requests | None = None) -> Position:
    task = p.loop.create_task(p.leader.append_record(record, requests))
    p.settle()
    while p.log.in_flight:
        p.acknowledge(len(p.log.in_flight))
    return task.result()


def begin(p: Partition, founded: Founded | None) -> None:
    started = p.loop.create_task(p.leader.start(founded))
    p.settle()
    p.acknowledge()
    assert started.result() is None


class Story:
    """A source with active clients, and a target that copies."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        config = PartitionConfig(
            expiry_sweep_s=0,
            lease_ms=100_000,
            retry_window_ms=random.choice([3_000, 60_000]),
            retry_results_max=random.choice([4, 1024]),
        )
        self.source, self.target = Partition(config, partition=P1), Partition(config, partition=P2)
        self.target.wall_offset_ms = random.choice([-2_000, 0, 2_000])
        begin(self.source, Founded((MOVING, STAYING)))
        begin(self.target, Founded(()))
        self.sequences = [0] * len(CLIENTS)
        self.open: list[set[int]] = [set() for _ in CLIENTS]
        self.done: list[tuple[Op, Result]] = []
        self.followed = 0
        """Entries of the source's log."""

    def op(self) -> Op:
        random, key = self.random, self.random.choice(KEYS)
        match random.randrange(8):
            case 0:
                return c.Put(key, b"t", random.choice([1, 50, 2_000]), Flag.RELATIVE_TTL)
            case 1:
                return c.Delete(key)
            case 2:
                return c.Append(key, b"z")
            case 3:
                return c.Expire(key, random.choice([1, 3_000]), Flag.RELATIVE_TTL)
            case 4:
                return c.Put(key, b"n", 0, Flag.IF_ABSENT)
            case 5:
                keys = [key, *random.choices(KEYS, k=random.randrange(3))]
                ops = tuple(random.choice([c.Put(each, b"b"), c.Delete(each), c.Append(each, b"y")]) for each in keys)
                return c.Batch(key, ops, random.choice([0, Flag.INDEPENDENT]))
        return c.Put(key, b"%d" % random.randrange(99))

    def work(self, count: int) -> None:
        """Let clients send this many requests to the source."""
        random, source = self.random, self.source
        for _ in range(count):
            if random.random() < 0.1:
                source.wait(random.choice([0.01, 0.5, 2.0]))
            who = random.randrange(len(CLIENTS))
            self.sequences[who] += 1
            sequence, is_open = self.sequences[who], self.open[who]
            is_open.add(sequence)
            request = RequestId(CLIENTS[who], sequence, min(is_open), max(source.state.record_time_ms, TIME_MS))
            op = replace(self.op(), request=request)
            result = source.do(op)
            if not isinstance(result, StoreError):
                self.done.append((op, result))
                if random.random() < 0.2:
                    continue  # its answer is lost
            elif isinstance(result, Retryable):
                continue
            is_open.discard(sequence)

    def move(self) -> None:
        random, source, target = self.random, self.source, self.target
        self.work(random.randrange(30))
        pin = source.state.position
        assert pin is not None
        self.followed = len(source.log.acknowledged)
        log(target, ImportBegin(MOVE, 1, P1, MOVING, pin))
        cursor = pages.BEGINNING
        while cursor:
            self.work(random.randrange(4))
            page = pages.decode(pages.encode(pages.page_of(source.state, MOVING, cursor)))
            log(target, ImportRows(MOVE, page.keys, page.rows, page.cursor, pin), pages.requests_in(page))
            cursor = page.cursor
            if random.random() < 0.15:
                self.lead_again(is_restarted=random.random() < 0.5)
                cursor = min(cursor, pages.RETRIES) if cursor else cursor
        copied, kept = self.digest(target), self.digest(source)
        self.work(random.randrange(5))
        self.follow()
        freeze = log(source, Freeze(MOVE, P2, MOVING))
        self.follow()
        assert (copied.count, copied.hash) == (kept.count, kept.hash)
        log(target, ImportEnd(MOVE, freeze, copied.count, copied.hash))
        log(source, Release(MOVE, freeze, copied.count, P2, MOVING))
        released = source.state.ownership.released_by(MOVE)
        assert released is not None
        log(target, Own(MOVE, freeze, released.position, released.seq, released.time_ms, P1, MOVING))

    def digest(self, p: Partition) -> RangeDigest:
        digest = RangeDigest(p.engine, MOVING)
        p.state.watch(digest)
        while not digest.step():
            self.work(1)
        return digest

    def follow(self) -> None:
        """Log the changes of the source's log, some entries at a time."""
        acknowledged = self.source.log.acknowledged
        while self.followed < len(acknowledged):
            changes = pages.RangeChanges(MOVING, rings.key_hash)
            some = acknowledged[self.followed : self.followed + self.random.randrange(1, 5)]
            for logged in some:
                entry = entries.decode(logged.payload)
                if not entry.is_control:
                    changes.add(entry)
            if not changes.is_empty:
                rows = ImportRows(MOVE, changes.keys, changes.rows, b"", some[-1].position)
                log(self.target, rows, changes.requests)
            self.followed += len(some)

    def lead_again(self, *, is_restarted: bool) -> None:
        target = self.target
        target.log.fail(UNKNOWN)
        target.leader.stop(NotLeader("p2"))
        target.settle()
        if is_restarted:
            target.state = ReplicaState(P2, target.engine, target.config, rings.key_hash)
        target.open()
        begin(target, None)

    def ask_again(self) -> None:
        """Send all requests again, in any order, to the target, if it owns their keys."""
        target = self.target
        for op, first in self.random.sample(self.done, len(self.done)):
            keys = [each.key for each in op.ops] if isinstance(op, c.Batch) else [op.key]
            if not all(MOVING.holds(rings.key_hash.token_of(key)) for key in keys):
                continue
            before = all_records(target.state)
            result = target.do(op)
            assert isinstance(result, RequestExpired) or repr(result) == repr(first), f"{op} got {first}, then {result}"
            after, now_ms = all_records(target.state), target.state.record_time_ms
            gone = {key for key in before.keys() - after.keys() if not 0 < before[key].expires_ms <= now_ms}
            assert not gone, f"{op} was applied again"
            assert all(before.get(key) == record for key, record in after.items()), f"{op} was applied again"


@pytest.mark.parametrize("seed", range(16))
def test_request_done_at_the_source_is_not_repeated_at_the_target(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(seed)
    monkeypatch.setattr(pages, "PAGE_ROWS_MAX", story.random.choice([1, 2, 1000]))
    monkeypatch.setattr(pages, "RETRY_ROWS_MAX", story.random.choice([8, 200]))
    story.move()
    if story.random.random() < 0.5:
        story.lead_again(is_restarted=True)
    check_indexes(story.target.state)
    story.ask_again()
    check_indexes(story.target.state)

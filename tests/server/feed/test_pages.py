"""Readers of pages, compared with a plain list of the logged changes: random bounds and keys, trimmed ledgers, and
windows so small that every reader falls behind them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from kvstore.errors import PositionTrimmed
from kvstore.partition.state.move_records import Own, Release
from kvstore.partition.state.tokens import TokenSpan
from kvstore.proto import feed_pb2
from kvstore.server.feed import tail
from kvstore.server.grpc.feed_service import FeedService
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from tests.server.feed.logs import MemoryLog
from tests.server.feed.world import World
from tests.waiting import PATIENCE_S

P1, P2 = PartitionId("p1"), PartitionId("p2")
AT, SPAN = Position(LedgerId(1), EntryId(0)), TokenSpan(7, 9)
KEYS = [b"%02d" % number for number in range(12)]
STEPS = 80


class Logged(NamedTuple):
    sequence: int
    key: bytes
    value: bytes


class Writer:
    """Logs random changes and moves, and keeps lists of them."""

    def __init__(self, log: MemoryLog, random: Random) -> None:
        self.log, self._random = log, random
        self.changes: list[Logged] = []
        self.handovers: list[tuple[int, int]] = []
        """Sequence and ledger of each move."""
        self._living: set[bytes] = set()

    @property
    def oldest(self) -> int:
        return max(0, self.log.trimmed_seq - 1)

    def write(self) -> None:
        random, log = self._random, self.log
        what = random.choices("pdnemrt", (10, 3, 1, 1, 1, 2, 2))[0]
        if what == "p":
            items = [(random.choice(KEYS), b"x" * random.randrange(60)) for _ in range(random.randrange(1, 5))]
            items = list(dict(items).items())
            first = log.put(*items) - len(items) + 1
            self.changes += [Logged(first + number, *item) for number, item in enumerate(items)]
            self._living |= {key for key, _ in items}
        elif what == "d" and self._living:
            key = random.choice(sorted(self._living))
            self._living.discard(key)
            self.changes.append(Logged(log.delete(key), key, b""))
        elif what == "n":
            log.note()
        elif what == "e":
            log.empty()
        elif what == "m":
            self._move()
        elif what == "r" and log.entries and log.entries[-1].position.ledger == log.ledgers[-1].id:
            log.roll()
        elif what == "t" and len(log.ledgers) > 1:
            log.trim(1)

    def _move(self) -> None:
        before, number = self.log.seq, len(self.handovers)
        release = Release(number, AT, 1, P2, SPAN)
        own = Own(number, AT, AT, before + self._random.choice((0, 3)), 5, P2, SPAN)
        position = self.log.record(self._random.choice((release, own)))
        self.handovers.append((before, position.ledger))


class Reader:
    """Reads page by page, each with other bounds, and checks that no change is missing or added."""

    def __init__(self, writer: Writer, services: list[FeedService], random: Random) -> None:
        """There are two services: one may have kept the reader's position, and the other has not."""
        self._writer, self._services, self._random = writer, services, random
        self._start, self._end = random.choice(((b"", b""), (b"", b""), (b"03", b"07"), (b"11", b""), (b"zz", b"")))
        self.after = self._began = random.choice((0, writer.log.seq))
        self._moves: set[int] = set()

    async def read(self) -> None:
        random, log = self._random, self._writer.log
        until = random.choice((0, 0, self.after + random.randrange(6), log.seq + 2)) if self.after else 0
        request = feed_pb2.ChangesRequest(
            partition=P1,
            after=self.after,
            until=until if until >= self.after else 0,
            rows_max=random.choice((0, 1, 2, 5)),
            bytes_max=random.choice((0, 0, 1, 150)),
            start=self._start,
            end=self._end,
            keys_only=random.random() < 0.2,
        )
        oldest = self._writer.oldest
        try:
            page = await random.choice(self._services)._changes(request)
        except PositionTrimmed:
            if self.after >= oldest:
                raise
            self.after = oldest
            return
        self._check(request, page)
        self.after = page.next

    def _check(self, request: feed_pb2.ChangesRequest, page: feed_pb2.ChangesResponse) -> None:
        end = min(request.until or page.latest, page.latest)
        wanted = [
            each
            for each in self._writer.changes
            if self.after < each.sequence <= page.next and self._start <= each.key < (self._end or b"\xff")
        ]
        values = [b"" for _ in wanted] if request.keys_only else [each.value for each in wanted]
        assert list(page.sequences) == [each.sequence for each in wanted], (request, page)
        assert (list(page.keys), list(page.values)) == ([each.key for each in wanted], values)
        assert self.after <= page.next <= max(end, self.after), (request, page)
        assert page.next > self.after or self.after >= end, ("no way forward", request, page)
        assert len(page.keys) <= (request.rows_max or 10_000)
        assert self._writer.log.seq >= page.latest >= page.next
        assert all(each.sequence <= page.next for each in page.handovers)
        self._moves |= {each.move for each in page.handovers}

    def check_moves(self) -> None:
        """The reader was notified of every move since it started, except perhaps of moves that are trimmed by now."""
        kept = self._writer.log.ledgers[0].id
        moves = enumerate(self._writer.handovers)
        wanted = {number for number, (seq, ledger) in moves if self._began <= seq < self.after and ledger >= kept}
        assert wanted <= self._moves


@pytest.mark.parametrize("seed", range(8))
async def test_pages_contain_each_change_once_despite_trimming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random = Random(f"pages/{seed}")
    monkeypatch.setattr(tail, "WINDOW_ENTRIES", random.choice((1, 5, 50)))
    monkeypatch.setattr(tail, "BATCH_BYTES", random.choice((1, 200, 10_000)))
    async with World.open(tmp_path, "p1", "p2") as world:
        nobody: Any = None
        services = [FeedService(world.env, nobody, world.feeds, world.store) for _ in range(random.choice((1, 2)))]
        writer = Writer(world.logs["p1"], random)
        for _ in range(random.randrange(20)):
            writer.write()
        readers = [Reader(writer, services, random) for _ in range(3)]
        for _ in range(STEPS):
            for _ in range(random.choice((0, 1, 1, 5))):
                writer.write()
            await world.settle()
            await random.choice(readers).read()
        for reader in readers:
            async with asyncio.timeout(PATIENCE_S):
                while reader.after < writer.log.seq:
                    await reader.read()
            reader.check_moves()
        for service in services:
            service.close()

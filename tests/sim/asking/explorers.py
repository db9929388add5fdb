"""Users that issue every operation with every client option, alone and in frames. The judge checks each of their
answers exactly (tests/sim/judges/witness.py).

Values and suffixes are unique, so that the log identifies the operation of each write.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from kvstore.limits import KEY_BYTES_MAX
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Code, Flag, Level, Op
from kvstore.partition.state.operations import INTEGER_MAX
from kvstore.types import PartitionId
from tests.sim.clients import Worker
from tests.sim.judges.operations import Operation, Status, transaction
from tests.sim.world.env import EPOCH_MS

PREFIX, END = b"x/", b"x0"
"""All keys of explorers are between these."""
KEYS = 10
TAGGED = 8
FRESH = 5_000
FRAME_MAX = 24
LEVELS = (Level.LINEARIZABLE, Level.LINEARIZABLE, Level.STRICT, Level.SESSION, Level.STALE)
CONDITIONS = (Flag.NONE, Flag.NONE, Flag.IF_ABSENT, Flag.IF_PRESENT, Flag.IF_VERSION)
TTL_CONDITIONS = (Flag.NONE, Flag.IF_NO_TTL, Flag.IF_TTL, Flag.IF_LONGER, Flag.IF_SHORTER)


class Values(Protocol):
    """Returns a value that no operation has written before."""

    def __call__(self, worker: Worker) -> bytes: ...


class Explorer:
    """One user. `value` makes unique values."""

    def __init__(self, worker: Worker, value: Values, now: Callable[[], float], *, transacts: bool = False) -> None:
        self._worker, self._random, self._value, self._now = worker, worker.random, value, now
        worker.timeout_s = self._random.choice((2.0, 2.0, 0.02))  # a short timeout makes it retry operations in flight
        self._tag = b"{x%d}" % self._random.randrange(2)
        self._transacts = transacts
        self._versions: dict[bytes, int] = {}
        """Versions that the explorer has seen, for conditions."""

    async def explore(self) -> None:
        """Perform one operation."""
        random = self._random
        kind = random.choices(("one", "puts", "gets", "mixed", "pages", "delete_range"), (50, 14, 10, 10, 12, 4))[0]
        with_id = random.random() < 0.6
        match kind:
            case "one":
                op = self._any()
                self._note(await self._worker.do(op, with_id=with_id))
            case "puts":
                keys = random.choice((self._spread, self._spread, self._fresh))
                count = random.choice((2, 4, 8, FRAME_MAX))
                ops = [commands.Put(keys(), self._value(self._worker)) for _ in range(count)]
                for done in await self._worker.do_all(ops, with_id=with_id):
                    self._note(done)
            case "gets":
                keys = random.choice((self._spread, self._tagged, self._fresh))
                await self._worker.do_all([commands.Get(keys()) for _ in range(random.choice((2, 5, FRAME_MAX)))])
            case "mixed":
                for done in await self._worker.do_all(
                    [self._any() for _ in range(random.randint(2, 8))], with_id=with_id
                ):
                    self._note(done)
            case "pages":
                await self._pages()
            case "delete_range":
                await self._delete_range(with_id)

    # ── operations on keys ────────────────────────────────────────────────────────────────────────────────────────────

    def _any(self) -> Op:
        roll = self._random.random()
        if roll < 0.22:
            return self._transaction() if self._transacts and self._random.random() < 0.6 else self._batch()
        if roll < 0.25:
            return self._invalid()
        return self._operation(self._random.choice((self._spread, self._tagged))())

    def _operation(self, key: bytes, *, in_batch: bool = False) -> Op:
        """Return one operation on a key."""
        random = self._random
        kind = random.choices(
            ("get", "meta", "put", "delete", "increment", "append", "expire", "check"), (14, 6, 30, 8, 8, 8, 18, 6)
        )[0]
        level = Level.LINEARIZABLE if in_batch else random.choice(LEVELS)
        seq = self._token(key) if level is Level.SESSION or (not in_batch and random.random() < 0.3) else 0
        version = self._versions.get(key, 0) if random.random() < 0.8 else random.randrange(1, 50)
        match kind:
            case "get":
                return commands.Get(key, level, seq)
            case "meta":
                return commands.Meta(key, level, seq)
            case "put":
                expires_ms, flags = self._expiry()
                flags |= random.choice(CONDITIONS)
                flags |= random.choice((Flag.NONE, Flag.NONE, Flag.RETURN_OLD))
                flags |= Flag.KEEP_TTL if not expires_ms and random.random() < 0.2 else Flag.NONE
                return commands.Put(key, self._value(self._worker), expires_ms, int(flags), _asked(flags, version))
            case "delete":
                flags = random.choice(CONDITIONS[1:]) | random.choice((Flag.NONE, Flag.RETURN_OLD))
                flags &= ~Flag.IF_ABSENT
                return commands.Delete(key, int(flags), _asked(flags, version))
            case "increment":
                delta = random.choice((1, 5, -3, INTEGER_MAX))
                return commands.Increment(random.choice((key, key, b"%sn" % key)), delta)
            case "append":
                return commands.Append(key, b"~" + self._value(self._worker).rstrip(b"."))
            case "expire":
                expires_ms, flags = self._expiry()
                condition = random.choice(TTL_CONDITIONS) if expires_ms else Flag.NONE
                return commands.Expire(key, expires_ms, int(flags | condition))
        flags = random.choice(CONDITIONS[2:])
        return commands.Check(key, int(flags), _asked(flags, version))

    def _expiry(self) -> tuple[int, Flag]:
        """Return the expiry of a key: never, after a while, at a date, or in the past."""
        random, date_ms = self._random, EPOCH_MS + round(self._now() * 1000)
        roll = random.random()
        if roll < 0.55:
            return 0, Flag.NONE
        if roll < 0.75:
            return random.choice((1, 200, 2_000, 60_000)), Flag.RELATIVE_TTL
        if roll < 0.9:
            return date_ms + random.choice((300, 3_000, 600_000)), Flag.NONE
        return date_ms - random.choice((10_000, 100_000)), Flag.NONE

    def _batch(self) -> Op:
        """Return a batch of one hash tag: plain puts, or anything."""
        random = self._random
        count = random.choice((1, 2, 3, 6))
        keys = [self._tagged() for _ in range(count)]
        if random.random() < 0.3:
            keys = random.sample([self._tagged_key(number) for number in range(TAGGED)], count)
            parts = [commands.Put(key, self._value(self._worker)) for key in keys]
        else:
            parts = [self._operation(key, in_batch=True) for key in keys]
        flags = random.choice((Flag.NONE, Flag.INDEPENDENT))
        return commands.Batch(keys[0], tuple(parts), int(flags))

    def _transaction(self) -> Op:
        """Return a transaction on any keys."""
        random = self._random
        keys = [random.choice((self._spread, self._spread, self._tagged))() for _ in range(random.choice((1, 2, 3, 6)))]
        parts = [self._operation(key, in_batch=True) for key in keys]
        flags = random.choice((Flag.NONE, Flag.NONE, Flag.INDEPENDENT))
        return transaction(parts, int(flags))

    def _invalid(self) -> Op:
        """Return an operation that every server must refuse."""
        return self._random.choice(
            (
                commands.Put(PREFIX + bytes(KEY_BYTES_MAX), b"too long a key"),
                commands.Batch(self._tagged_key(0), (commands.DeleteRange(PREFIX, END),)),
                commands.Batch(self._tagged_key(0), ()),
            )
        )

    # ── ranges ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _range(self) -> tuple[bytes, bytes]:
        """Return a range of an explorer's keys."""
        whole = (PREFIX, END)
        start, end = sorted((self._spread(), self._spread()))
        return self._random.choice((whole, (start, end + b"\0"), (PREFIX + self._tag, PREFIX + self._tag + b"\xff")))

    async def _pages(self) -> None:
        """Read some pages of a range of one partition, one after the other."""
        random, partition = self._random, self._partition()
        start, end = self._range()
        limit, level = random.choice((1, 3, 1000)), random.choice(LEVELS)
        seq = self._worker.tokens.get(partition, 0) if level is Level.SESSION else 0
        kind = random.choice(("scan", "range", "range", "range", "scan_tokens", "count"))
        flags = random.choice((Flag.NONE, Flag.KEYS_ONLY))
        if kind == "range":
            flags = random.choice((Flag.NONE, Flag.KEYS_ONLY, Flag.BARE)) | random.choice((Flag.NONE, Flag.REVERSE))
            flags = random.choice((flags, flags, Flag.COUNT_ONLY))
        token = 0
        for _ in range(random.randint(1, 4)):
            match kind:
                case "scan":
                    op = commands.Scan(start, end, limit, int(flags), level, seq)
                case "range":
                    op = commands.Range(start, end, limit, int(flags), level, seq)
                case "scan_tokens":
                    op = commands.ScanTokens(token, limit, level, int(flags))
                case _:
                    op = commands.Count(level=level)
            done = await self._worker.do(op, partition=partition)
            if done.status is not Status.OK or kind == "count" or done.result[1] is None:
                return
            following: Any = done.result[1]
            if kind == "scan_tokens":
                token = following
            elif flags & Flag.REVERSE:
                end = following
            else:
                start = following

    async def _delete_range(self, with_id: bool) -> None:
        start, end = self._range()
        await self._worker.do(commands.DeleteRange(start, end), with_id=with_id, partition=self._partition())

    # ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _spread(self) -> bytes:
        return PREFIX + b"%d" % self._random.randrange(KEYS)

    def _tagged(self) -> bytes:
        return self._tagged_key(self._random.randrange(TAGGED))

    def _tagged_key(self, number: int) -> bytes:
        return PREFIX + self._tag + b"%d" % number

    def _fresh(self) -> bytes:
        return PREFIX + b"f%d" % self._random.randrange(FRESH)

    def _partition(self) -> PartitionId:
        return self._random.choice(sorted(self._worker.ring.partitions))

    def _token(self, key: bytes) -> int:
        return self._worker.tokens.get(self._worker.ring.partition_of(key), 0)

    def _note(self, done: Operation) -> None:
        """Remember the version of a key that was read or written alone."""
        if done.status is not Status.OK:
            return
        if done.code is Code.GET and done.result is not None:
            self._versions[done.key] = done.result[1]
        elif done.code is Code.PUT and isinstance(done.result, int):
            self._versions[done.key] = done.result


def _asked(flags: Flag, version: int) -> int:
    return version if flags & Flag.IF_VERSION else 0


def drawn(random: Random) -> int:
    """Return the number of explorers in a run."""
    return random.choice((1, 2, 2, 3))

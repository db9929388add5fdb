"""Load while the ring changes. Every answer is checked.

*Registers* are shared: their callers' results form a history for two linearizability checkers. *Statics* existed before
and stay: each read must find them, and each scan exactly once. *Counters* must count each increment once. *Once* keys
are written once and some are deleted: at the end they must exist, or be gone. *Steady* keys are in ranges that do not
move, with one writer each: they show how fast everything else continues.

Each caller is a closed loop with pauses: its next operation waits for the one before. So a stall of the store is one
long wait per caller, not one for each operation that it delayed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from random import Random
from typing import NamedTuple

from kvstore.client import AsyncClient
from kvstore.errors import StoreError
from loadtest.drills.registers import Outcome, Registers, differing
from tests.sim.judges.linearizable import check_search
from tests.sim.versions import Violation, check_versions

CALLERS, STEADY = 12, 6
REGISTERS = 3
"""Registers in each range that moves. A caller uses only one of them, because the checker copes with only a few callers
of a key."""
POOL = 6_000
"""Keys of each kind to choose from."""
SCANNED = 200
PAUSE_S = 0.032
"""Average pause of a caller between two operations. All callers together make about 480 operations a second. That
leaves a machine with two cores a third of its time while ranges move, so the figures show the moves and not the queue
for a processor."""
SCAN_PAUSE_S = 0.5
AIMED_TRIES = 300

Span = tuple[int, int]
"""The first and the last token of a range."""


class Wait(NamedTuple):
    """The duration of one operation, with any outcome. `ended` is a wall clock time, as in logs."""

    ended: float
    seconds: float
    is_write: bool
    token: int
    is_done: bool = True


class Aim(NamedTuple):
    """The keys of one range that moves."""

    span: Span
    registers: list[bytes]
    counter: bytes
    statics: list[bytes]


class Keys:
    """Keys of one kind, sorted by token."""

    def __init__(self, keys: Iterable[bytes], token_of: Callable[[bytes], int]) -> None:
        self._sorted = sorted((token_of(key), key) for key in keys)

    def within(self, span: Span, most: int) -> list[bytes]:
        """Return the first keys in a range, at most `most`."""
        begin = bisect_left(self._sorted, (span[0], b""))
        end = bisect_right(self._sorted, (span[1] + 1, b""))
        return [key for _, key in self._sorted[begin : min(end, begin + most)]]

    def outside(self, spans: Sequence[Span]) -> list[bytes]:
        """Return the keys outside all these ranges."""
        order = sorted(spans)
        starts = [first for first, _ in order]
        return [key for token, key in self._sorted if not _holds(order, starts, token)]


def _holds(order: Sequence[Span], starts: Sequence[int], token: int) -> bool:
    place = bisect_right(starts, token) - 1
    return place >= 0 and token <= order[place][1]


class RingLoad:
    """The load. It runs from `start` to `stop` on the ranges that `aim` names; then `verify` reports what was wrong."""

    def __init__(
        self, client: AsyncClient, statics: dict[bytes, bytes], seed: int, *, pause_s: float = PAUSE_S
    ) -> None:
        self.client, self.statics, self._pause_s = client, statics, pause_s
        self._token_of = token_of = client.cluster.token_of
        self._shared = Registers(client)
        self.history, self.errors = self._shared.history, self._shared.errors
        self.waits: list[Wait] = []
        self.steady: list[Wait] = []
        self.problems: Counter[str] = Counter()
        """Number of violations, by kind."""
        self.first_problems: list[str] = []
        self.scans = 0
        self._random = Random(seed)
        run = b"%x" % time.time_ns()
        self._registers = Keys((b"r%b-%d" % (run, number) for number in range(POOL)), token_of)
        self._counters = Keys((b"c%b-%d" % (run, number) for number in range(POOL)), token_of)
        self._steady_keys = Keys((b"s%b-%d" % (run, number) for number in range(POOL)), token_of)
        self._static_keys = Keys(statics, token_of)
        self._scanned = [b"%b-scanned-%d" % (run, number) for number in range(SCANNED)]
        self._scan_prefix = b"%b-scanned-" % run
        self._once_names = (b"u%b-%d" % (run, number) for number in itertools.count())
        self._once: dict[bytes, bool | None] = {}
        """True if the key must exist at the end; None if its last outcome is unknown."""
        self._counted: dict[bytes, list[int]] = {}
        self._unsure: Counter[bytes] = Counter()
        self._aims: list[Aim] = []
        self._focus: list[Aim] = []
        self._quiet: list[bytes] = []
        self._names = itertools.count()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def aim(self, spans: Iterable[Span]) -> None:
        """Choose keys in these ranges, which will move."""
        chosen = list(spans)
        self._aims = [aim for aim in map(self._aim_at, chosen) if aim is not None]
        self._focus = []
        self._quiet = self._steady_keys.outside(chosen)

    def _aim_at(self, span: Span) -> Aim | None:
        registers, counters = self._registers.within(span, REGISTERS), self._counters.within(span, 1)
        statics = self._static_keys.within(span, 8)
        return Aim(span, registers, counters[0], statics) if registers and counters and statics else None

    def focus(self, spans: Iterable[Span]) -> None:
        """Direct most operations to these ranges, which are moving now."""
        wanted = set(spans)
        self._focus = [aim for aim in self._aims if aim.span in wanted]

    async def start(self) -> None:
        """Start the callers. Call `aim` first."""
        await self.client.put_many({key: key for key in self._scanned}, timeout_s=30)
        work = [self._call(number) for number in range(CALLERS)]
        work += [self._go_steadily(number) for number in range(STEADY)]
        self._tasks = [asyncio.create_task(each) for each in (*work, self._scan())]

    async def stop(self) -> None:
        """Stop, wait for the operations in flight, and read every register again."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        for key in sorted(self.history.by_key()):
            await self._register("get", key, f"last{next(self._names)}")
        self.history.close()

    # ── judging ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def verify(self) -> None:
        """Count in `problems` the violations that can only be found at the end."""
        for key in await differing(self.client, self.statics):
            self._wrong("lost", f"static {key!r}")
        once = {key: key if there else None for key, there in self._once.items() if there is not None}
        for key in await differing(self.client, once):
            if once[key]:
                self._wrong("lost", f"{key!r}, which was acknowledged")
            else:
                self._wrong("resurrected", f"{key!r}, which was deleted")
        for key, counted in sorted(self._counted.items()):
            item = await self.client.get(key, timeout_s=20)
            stored, unsure = int(item.value) if item else 0, self._unsure[key]
            if len(counted) != len(set(counted)) or stored > len(counted) + unsure:
                self._wrong("doubled", f"{key!r} is {stored} after {len(counted)} increments, {unsure} unsure")
            elif stored < len(counted):
                self._wrong("lost", f"{key!r} is {stored} after {len(counted)} increments")
        for check in (check_versions, check_search):
            try:
                check(self.history)
            except (Violation, AssertionError) as error:
                self._wrong("not linearizable", f"{check.__name__}: {error}")

    def _wrong(self, what: str, which: str) -> None:
        self.problems[what] += 1
        if len(self.first_problems) < 20:
            self.first_problems.append(f"{what}: {which}"[:2_000])

    # ── callers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _call(self, number: int) -> None:
        random = Random(self._random.getrandbits(64))
        name = f"w{next(self._names)}"
        kinds = ("get", "put", "delete", "create", "count", "static", "once")
        while not self._stopping:
            aims = self._focus if self._focus and random.random() < 0.8 else self._aims
            aim = random.choice(aims)
            kind = random.choices(kinds, (30, 25, 8, 7, 10, 12, 8))[0]
            register = aim.registers[number % len(aim.registers)]
            match kind:
                case "count":
                    await self._timed(self.waits, True, aim.counter, self._count(aim.counter))
                case "static":
                    key = random.choice(aim.statics)
                    await self._timed(self.waits, False, key, self._read_static(key))
                case "once":
                    await self._do_once(random, aim)
                case _:
                    work = self._register(kind, register, name)
                    if await self._timed(self.waits, kind != "get", register, work) is Outcome.UNKNOWN:
                        name = f"w{next(self._names)}"
            await asyncio.sleep(self._pause_s * 2 * random.random())

    async def _timed(self, waits: list[Wait], is_write: bool, key: bytes, work: Awaitable[Outcome]) -> Outcome:
        began = time.perf_counter()  # the wall clock may be set meanwhile
        outcome = await work
        seconds = time.perf_counter() - began
        waits.append(Wait(time.time(), seconds, is_write, self._token_of(key), outcome.is_answer))
        return outcome

    async def _count(self, key: bytes) -> Outcome:
        counted = self._counted.setdefault(key, [])
        try:
            counted.append(await self.client.increment(key))
        except StoreError as error:
            outcome = self._shared.failed(error)
            self._unsure[key] += outcome is Outcome.UNKNOWN
            return outcome
        return Outcome.DONE

    async def _read_static(self, key: bytes) -> Outcome:
        try:
            item = await self.client.get(key)
        except StoreError as error:
            return self._shared.failed(error)
        if item is None:
            self._wrong("not found", f"{key!r}, which is there all the time")
        elif item.value != self.statics[key]:
            self._wrong("wrong value", f"{key!r}: {item.value!r}")
        return Outcome.DONE

    async def _do_once(self, random: Random, aim: Aim) -> None:
        """Write a new key, in the range if one is soon found; sometimes delete it again."""
        key = next(self._once_names)
        for _ in range(AIMED_TRIES):
            if aim.span[0] <= self._token_of(key) <= aim.span[1]:
                break
            key = next(self._once_names)
        written = self._change_once(key, self.client.put(key, key), True)
        if await self._timed(self.waits, True, key, written) is not Outcome.DONE:
            return
        if random.random() < 0.4:
            await asyncio.sleep(random.random() / 4)
            await self._timed(self.waits, True, key, self._change_once(key, self.client.delete(key), False))

    async def _change_once(self, key: bytes, change: Awaitable[int], there: bool) -> Outcome:
        before = self._once.get(key, False)
        self._once[key] = None
        try:
            await change
        except StoreError as error:
            outcome = self._shared.failed(error)
            if outcome is Outcome.REFUSED:
                self._once[key] = before
            return outcome
        self._once[key] = there
        return Outcome.DONE

    async def _register(self, kind: str, key: bytes, name: str) -> Outcome:
        value = b"%b-%d" % (name.encode(), next(self._names))
        match kind:
            case "get":
                return await self._shared.get(key, name)
            case "delete":
                return await self._shared.delete(key, name)
            case "create":
                return await self._shared.create(key, name, value)
            case _:
                return await self._shared.put(key, name, value)

    # ── what does not move, and scans ─────────────────────────────────────────────────────────────────────────────────

    async def _go_steadily(self, number: int) -> None:
        """Write keys that nobody else writes, and read them."""
        random = Random(self._random.getrandbits(64))
        held: dict[bytes, set[bytes | None]] = {}
        while not self._stopping:
            mine = self._quiet[number::STEADY]
            key = random.choice(mine[:50])
            if random.random() < 0.5:
                await self._timed(self.steady, True, key, self._write_steady(key, held))
            else:
                await self._timed(self.steady, False, key, self._read_steady(key, held))
            await asyncio.sleep(self._pause_s * 2 * random.random())

    async def _write_steady(self, key: bytes, held: dict[bytes, set[bytes | None]]) -> Outcome:
        value = b"%d" % next(self._names)
        try:
            await self.client.put(key, value)
        except StoreError as error:
            outcome = self._shared.failed(error)
            if outcome is Outcome.UNKNOWN:
                held.setdefault(key, {None}).add(value)
            return outcome
        held[key] = {value}
        return Outcome.DONE

    async def _read_steady(self, key: bytes, held: dict[bytes, set[bytes | None]]) -> Outcome:
        try:
            item = await self.client.get(key)
        except StoreError as error:
            return self._shared.failed(error)
        value = None if item is None else item.value
        if value not in held.get(key, {None}):
            self._wrong("stale", f"{key!r}: expected one of {held.get(key)}, got {value!r}")
        return Outcome.DONE

    async def _scan(self) -> None:
        """Scan the static keys: each must appear once, in order."""
        while not self._stopping:
            try:
                found = [key async for key, _ in self.client.scan(prefix=self._scan_prefix, keys_only=True)]
            except StoreError as error:
                self._shared.failed(error)
            else:
                self.scans += 1
                if len(found) != len(set(found)):
                    self._wrong("doubled", f"scan {self.scans}: {len(found) - len(set(found))} keys twice")
                if set(found) != set(self._scanned):
                    self._wrong("not found", f"scan {self.scans} has {len(found)} of {SCANNED} keys")
            await asyncio.sleep(SCAN_PAUSE_S)


def rate(waits: Sequence[Wait], since: float, until: float) -> float:
    """Return the rate of operations that ended in a time span, per second."""
    return sum(wait.is_done and since <= wait.ended < until for wait in waits) / (until - since)

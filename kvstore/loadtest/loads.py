"""The load core under asyncio: callers, the operations that they draw, and the latency of each operation.

Closed loop: `in_flight` callers, each with one operation at a time. Open loop: operations start at a fixed rate,
however long others take. Response times run from when an operation *should* have started, so waiting for a free caller
counts as latency. Service times run from when the operation did start.

`kvstore bench`, the benchmarks, the budgets and the writers in a drill use this module. Locust's users run on Locust's
own scheduler, gevent, and record in the same tallies.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvstore.client import AsyncClient, Level
from kvstore.errors import InvalidRequest, StoreError
from kvstore.loadtest.report.recorder import Tally, percentiles

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
SERVICE_PERCENTILES = (50.0, 99.0)
OPERATIONS = ("get", "put", "increment", "delete")
STOP_S = 0.5
"""Maximum interval in seconds at which a caller with a later operation checks whether the load was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """The parameters of a load."""

    seconds: float = 10.0
    warmup_s: float = 1.0
    """Operations that should start during the warm-up are not counted."""
    in_flight: int = 64
    rate: float = 0.0
    """Operations per second; 0 means a closed loop."""
    mix: tuple[tuple[str, int], ...] = (("get", 50), ("put", 50))
    """Operations and their weights."""
    keys: int = 100_000
    value_bytes: int = 100
    prefix: bytes = b"bench-"
    """Prefix of all keys; twelve digits follow. A `{tag}` in the prefix puts all keys into one partition."""
    level: Level = Level.LINEARIZABLE
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("seconds", "warmup_s", "rate"):
            if not math.isfinite(value := getattr(self, name)):
                raise InvalidRequest(f"{name.removesuffix('_s')}: expected a finite number, got {value}")


def parse_mix(text: str) -> tuple[tuple[str, int], ...]:
    """Parse a mix such as `get=95,put=5`. Raises InvalidRequest."""
    found = []
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        if name not in OPERATIONS or not weight.isdecimal() or not int(weight):
            raise InvalidRequest(
                f"expected a mix like get=95,put=5 of the operations {', '.join(OPERATIONS)}, got {text!r}"
            )
        found.append((name, int(weight)))
    return tuple(found)


@dataclass
class LoadResult:
    """The result of a load."""

    load: LoadSpec
    took_s: float = 0.0
    is_interrupted: bool = False
    """True if the load was interrupted. Operations until then are counted."""
    tallies: dict[str, Tally] = field(default_factory=dict)
    """Latencies by operation."""
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def operations(self) -> int:
        return sum(tally.responses.get_total_count() for tally in self.tallies.values())

    @property
    def rate(self) -> float:
        """Successful operations per second."""
        return self.operations / self.took_s if self.took_s else 0.0

    def record(self, name: str, response_s: float, service_s: float) -> None:
        tally = self.tallies.get(name)
        if tally is None:
            tally = self.tallies[name] = Tally()
        tally.record(response_s, service_s)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per operation; times are in milliseconds."""
        return [
            {
                "operation": name,
                "count": (count := tally.responses.get_total_count()),
                "per_s": round(count / self.took_s) if self.took_s else 0,
                **percentiles(tally.responses, PERCENTILES),
                "max_ms": tally.responses.get_max_value() / 1000,
                **{f"service_{each}": ms for each, ms in percentiles(tally.services, SERVICE_PERCENTILES).items()},
            }
            for name, tally in sorted(self.tallies.items())
        ]

    def document(self) -> dict[str, Any]:
        return {
            "operations": self.operations,
            "per_s": round(self.rate),
            "seconds": round(self.took_s, 3),
            "interrupted": self.is_interrupted,
            "errors": dict(self.errors),
            "latencies": self.rows(),
        }


Call = Callable[[bytes], Awaitable[object]]
"""One operation on a key."""


def calls_of(client: AsyncClient, load: LoadSpec) -> dict[str, Call]:
    """Return each operation of a mix as a call on a key."""
    value = value_of(load)

    async def get(key: bytes) -> object:
        return await client.get(key, level=load.level)

    async def put(key: bytes) -> object:
        return await client.put(key, value)

    async def increment(key: bytes) -> object:
        return await client.increment(b"n-" + key)

    async def delete(key: bytes) -> object:
        return await client.delete(key)

    return {"get": get, "put": put, "increment": increment, "delete": delete}


async def run_load(client: AsyncClient, load: LoadSpec) -> LoadResult:
    """Run a load with a client to its end, or until the task is cancelled."""
    return await Generator(load, calls_of(client, load)).run()


def value_of(load: LoadSpec) -> bytes:
    """Return the value that every write of the load stores."""
    return Random(load.seed).randbytes(load.value_bytes)


async def closed_loop(numbers: Iterator[int], in_flight: int, one: Callable[[int], Awaitable[object]]) -> None:
    """Call `one` with each number, `in_flight` calls at a time. Raises the first error of `one`."""

    async def caller() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(caller() for _ in range(in_flight)))


class Generator:
    """Generates a load from calls: chooses operations and keys, keeps the rate, and records latencies and errors."""

    def __init__(self, load: LoadSpec, calls: dict[str, Call]) -> None:
        self._load, self._calls = load, calls
        self.outcome = LoadResult(load)
        """The outcome that records operations from now on. Replace it to start a new measurement."""
        self._pick = _picker(load)
        self._begin = self._counted_from = self._end = 0.0

    async def run(self) -> LoadResult:
        """Run the load to its end, or until the task is cancelled; `is_interrupted` tells which."""
        load = self._load
        self._begin = time.perf_counter()
        self._counted_from = self._begin + load.warmup_s
        self._end = self._counted_from + load.seconds
        is_before_end = self._is_due_before_end if load.rate else self._is_before_end
        numbers = itertools.takewhile(is_before_end, itertools.count())
        try:
            await closed_loop(numbers, load.in_flight, self._when_due if load.rate else self._now)
        except asyncio.CancelledError:  # Ctrl-C ends the load, but its results are still reported
            self.outcome.is_interrupted = True
        self.outcome.took_s = max(0.0, time.perf_counter() - self._counted_from)
        return self.outcome

    def stop(self) -> None:
        """Start no more operations. `run` returns when operations in flight have ended."""
        self._end = time.perf_counter()

    def _is_before_end(self, _: int) -> bool:
        return time.perf_counter() < self._end

    def _is_due_before_end(self, number: int) -> bool:
        return self._due(number) < self._end

    def _due(self, number: int) -> float:
        return self._begin + number / self._load.rate

    async def _now(self, _: int) -> None:
        await self._one(time.perf_counter())

    async def _when_due(self, number: int) -> None:
        due = self._due(number)
        while (wait := min(due, self._end) - time.perf_counter()) > 0:  # noqa: ASYNC110 - an event would cost each operation
            await asyncio.sleep(min(wait, STOP_S))
        if due < self._end:
            await self._one(due)

    async def _one(self, due: float) -> None:
        outcome, (name, key) = self.outcome, self._pick()
        began = time.perf_counter()
        try:
            await self._calls[name](key)
        except StoreError as error:
            if due >= self._counted_from:
                outcome.errors[type(error).__name__] += 1
            return
        if due >= self._counted_from:
            now = time.perf_counter()
            outcome.record(name, now - due, now - began)


def _picker(load: LoadSpec) -> Callable[[], tuple[str, bytes]]:
    """Return a function that draws an operation and a key. The seed makes the sequence repeatable."""
    random = Random(load.seed)
    names = [name for name, _ in load.mix]
    weights = list(itertools.accumulate(weight for _, weight in load.mix))
    only = names[0] if len(names) == 1 else ""

    def pick() -> tuple[str, bytes]:
        name = only or random.choices(names, cum_weights=weights)[0]
        return name, b"%b%012d" % (load.prefix, random.randrange(load.keys))

    return pick

"""Load on a cluster, and how long its operations took.

Closed loop: so many callers, each with one operation at a time. Open loop: operations begin at a rate, whatever the
store does, and each is measured from when it *should* have begun: waiting for a free caller is latency too. Service
times are from when it did begin.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hdrh.histogram import HdrHistogram

from kvstore.client import AsyncClient, Level
from kvstore.errors import InvalidRequest, StoreError

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
SERVICE_PERCENTILES = (50.0, 99.0)
LATENCY_US_MAX = 60_000_000
OPERATIONS = ("get", "put", "increment", "delete")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load: its operations, their number and its length."""

    seconds: float = 10.0
    warmup_s: float = 1.0
    """Its operations are not counted."""
    in_flight: int = 64
    rate: float = 0.0
    """Operations per second; 0: closed loop."""
    mix: tuple[tuple[str, int], ...] = (("get", 50), ("put", 50))
    """Operations and their weights."""
    keys: int = 100_000
    value_bytes: int = 100
    prefix: bytes = b"bench-"
    """What keys begin with; twelve digits follow. A `{tag}` in it brings all of them to one partition."""
    level: Level = Level.LINEARIZABLE
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("seconds", "warmup_s", "rate"):
            if not math.isfinite(value := getattr(self, name)):
                raise InvalidRequest(f"{name.removesuffix('_s')}: want a number, got {value}")


def parse_mix(text: str) -> tuple[tuple[str, int], ...]:
    """`get=95,put=5`. Raises InvalidRequest."""
    found = []
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        if name not in OPERATIONS or not weight.isdecimal() or not int(weight):
            raise InvalidRequest(f"want a mix like get=95,put=5 of {', '.join(OPERATIONS)}, got {text!r}")
        found.append((name, int(weight)))
    return tuple(found)


@dataclass
class Outcome:
    """The result of a load."""

    load: Load
    took_s: float = 0.0
    is_interrupted: bool = False
    """It was told to end before its time; what was done until then is counted."""
    latencies: dict[str, Any] = field(default_factory=dict)
    """Operation → histogram in microseconds, from when each should have begun."""
    services: dict[str, Any] = field(default_factory=dict)
    """The same from when it did begin."""
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def operations(self) -> int:
        return sum(histogram.get_total_count() for histogram in self.latencies.values())

    @property
    def rate(self) -> float:
        """Operations that succeeded, per second."""
        return self.operations / self.took_s if self.took_s else 0.0

    def record(self, name: str, seconds: float, service_s: float) -> None:
        if name not in self.latencies:
            self.latencies[name] = HdrHistogram(1, LATENCY_US_MAX, 3)
            self.services[name] = HdrHistogram(1, LATENCY_US_MAX, 3)
        self.latencies[name].record_value(_us(seconds))
        self.services[name].record_value(_us(service_s))

    def rows(self) -> list[dict[str, Any]]:
        """One for each kind of operation; times in milliseconds."""
        return [
            {
                "operation": name,
                "count": histogram.get_total_count(),
                "per_s": round(histogram.get_total_count() / self.took_s) if self.took_s else 0,
                **{f"p{each:g}_ms": histogram.get_value_at_percentile(each) / 1000 for each in PERCENTILES},
                "max_ms": histogram.get_max_value() / 1000,
                **{
                    f"service_p{each:g}_ms": self.services[name].get_value_at_percentile(each) / 1000
                    for each in SERVICE_PERCENTILES
                },
            }
            for name, histogram in sorted(self.latencies.items())
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


async def run_load(client: AsyncClient, load: Load) -> Outcome:
    """Run a load to its end, or until the task is cancelled: the outcome says so."""
    return await run_calls(load, calls_of(client, load))


async def run_calls(load: Load, calls: dict[str, Call]) -> Outcome:
    """The same with calls of another kind."""
    return await Generator(load, calls).run()


def calls_of(client: AsyncClient, load: Load) -> dict[str, Call]:
    """Each operation of a mix as a call on a key."""
    value = Random(load.seed).randbytes(load.value_bytes)

    async def get(key: bytes) -> object:
        return await client.get(key, level=load.level)

    async def put(key: bytes) -> object:
        return await client.put(key, value)

    async def increment(key: bytes) -> object:
        return await client.increment(b"n-" + key)

    async def delete(key: bytes) -> object:
        return await client.delete(key)

    return {"get": get, "put": put, "increment": increment, "delete": delete}


class Generator:
    """Callers that share a clock and a supply of keys."""

    def __init__(self, load: Load, calls: dict[str, Call]) -> None:
        self._load, self._calls = load, calls
        self._outcome = Outcome(load)
        self._numbers = itertools.count()

    async def run(self) -> Outcome:
        load = self._load
        begin = time.perf_counter()
        counted_from = begin + load.warmup_s
        end = counted_from + load.seconds
        caller = self._open if load.rate else self._closed
        try:
            await asyncio.gather(*(caller(each, begin, counted_from, end) for each in range(load.in_flight)))
        except asyncio.CancelledError:  # Ctrl-C ends the load, not what there is to tell of it
            self._outcome.is_interrupted = True
        self._outcome.took_s = max(0.0, time.perf_counter() - counted_from)
        return self._outcome

    async def _closed(self, caller: int, begin: float, counted_from: float, end: float) -> None:
        pick = self._picker(caller)
        now = time.perf_counter()
        while now < end:
            now = await self._one(*pick(), now, counted_from)

    async def _open(self, caller: int, begin: float, counted_from: float, end: float) -> None:
        pick = self._picker(caller)
        while True:
            intended = begin + next(self._numbers) / self._load.rate
            if intended >= end:
                return
            wait = intended - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            await self._one(*pick(), intended, counted_from)

    async def _one(self, name: str, key: bytes, begin: float, counted_from: float) -> float:
        """One operation; returns when it ended."""
        began = time.perf_counter()
        try:
            await self._calls[name](key)
        except StoreError as error:
            if begin >= counted_from:
                self._outcome.errors[type(error).__name__] += 1
            return time.perf_counter()
        now = time.perf_counter()
        if begin >= counted_from:
            self._outcome.record(name, now - begin, now - began)
        return now

    def _picker(self, caller: int) -> Callable[[], tuple[str, bytes]]:
        """Draws operations and keys; each caller has its own luck, repeatable by the seed."""
        load, random = self._load, Random(self._load.seed * 1_000_003 + caller)
        names = [name for name, _ in load.mix]
        weights = list(itertools.accumulate(weight for _, weight in load.mix))
        only = names[0] if len(names) == 1 else ""

        def pick() -> tuple[str, bytes]:
            name = only or random.choices(names, cum_weights=weights)[0]
            return name, b"%b%012d" % (load.prefix, random.randrange(load.keys))

        return pick


def _us(seconds: float) -> int:
    return min(max(1, int(seconds * 1e6)), LATENCY_US_MAX)

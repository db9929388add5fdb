"""The workloads of a simulated cluster. Each workload is a few workers that run until they are stopped.
tests/sim/judges/checks.py checks their histories.

Values are unique, so that each read identifies the write that it saw.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag, Level
from tests.sim.asking.explorers import Explorer
from tests.sim.clients import Identity, Population, Worker
from tests.sim.judges.operations import Status

ACCOUNTS = 4
DEPOSIT = 100
"""The initial balance of each account of a bank."""
REGISTERS = 6
COUNTERS = 3


@dataclass(frozen=True, slots=True)
class Load:
    """The amount of load."""

    registers: int = 3
    """Workers of each kind."""
    counters: int = 2
    banks: int = 2
    readers: int = 2
    explorers: int = 2
    """Users of every operation: tests/sim/asking/explorers.py."""
    lodgers: int = 1
    """Users whose keys have a time to live: tests/sim/clocks/lodgers.py."""
    transactors: int = 0
    """Users of transactions: tests/sim/transacting/transactors.py. If there are any, explorers use transactions too."""
    pause_s: float = 0.03
    """Mean time in seconds between two operations of a worker."""
    value_bytes: int = 40


class Workload:
    """All users of one run."""

    def __init__(self, cluster: Population, random: Random, load: Load) -> None:
        self._cluster, self._random, self._load = cluster, random, load
        self._stopping = False
        self._numbers: dict[str, int] = {}
        self.workers: list[Coroutine[Any, Any, None]] = []
        self._add(load.registers, "register", self._register)
        self._add(load.counters, "counter", self._counter)
        self._add(load.banks, "bank", self._bank)
        self._add(load.readers, "reader", self._reader)
        explorers: dict[str, Explorer] = {}

        async def explore(worker: Worker) -> None:
            if worker.name not in explorers:
                now, transacts = asyncio.get_running_loop().time, load.transactors > 0
                explorers[worker.name] = Explorer(worker, self._value, now, transacts=transacts)
            await explorers[worker.name].explore()

        self._add(load.explorers, "explorer", explore)

    def lodgers(self) -> list[Worker]:
        """Users for tests/sim/clocks/lodgers.py."""
        random = [Random(self._random.getrandbits(64)) for _ in range(self._load.lodgers)]
        return [Worker(self._cluster, f"lodger{n}", each, Identity(each)) for n, each in enumerate(random)]

    def stop(self) -> None:
        """Stop every worker after its current operation."""
        self._stopping = True

    def _add(self, count: int, kind: str, work: Callable[[Worker], Coroutine[Any, Any, None]]) -> None:
        """Start workers of one kind. Some share an identity, so that one client has several requests in flight."""
        identity = Identity(self._random)
        for number in range(count):
            if self._random.random() < 0.5:
                identity = Identity(self._random)
            random = Random(self._random.getrandbits(64))
            self.workers.append(self._live(Worker(self._cluster, f"{kind}{number}", random, identity), work))

    async def _live(self, worker: Worker, work: Callable[[Worker], Coroutine[Any, Any, None]]) -> None:
        while not worker.identity.seen_ms and not self._stopping:
            await worker.do(commands.Get(worker.random.randbytes(4)))  # learns the leaders' time
        while not self._stopping:
            await work(worker)
            await asyncio.sleep(worker.random.expovariate(1 / self._load.pause_s))

    def _value(self, worker: Worker) -> bytes:
        """Return a value that no operation has written before."""
        number = self._numbers[worker.name] = self._numbers.get(worker.name, 0) + 1
        return f"{worker.name}-{number}".encode().ljust(self._load.value_bytes, b".")

    # ── registers: every kind of write on few keys ────────────────────────────────────────────────────────────────────

    async def _register(self, worker: Worker) -> None:
        random = worker.random
        key = b"r%d" % random.randrange(REGISTERS)
        level = random.choice((Level.LINEARIZABLE, Level.LINEARIZABLE, Level.STRICT))
        kind = random.choices(
            ("get", "put", "delete", "swap", "create", "expiring", "append", "fresh"), (30, 25, 8, 12, 8, 5, 6, 6)
        )[0]
        with_id = random.random() < 0.7
        match kind:
            case "get":
                await worker.do(commands.Get(key, level, worker.tokens.get(self._cluster.ring.partition_of(key), 0)))
            case "put":
                await worker.do(commands.Put(key, self._value(worker)), with_id=with_id)
            case "delete":
                await worker.do(commands.Delete(key))
            case "swap":
                await self._swap(worker, key, level)
            case "create":
                await worker.do(commands.Put(key, self._value(worker), flags=Flag.IF_ABSENT), with_id=with_id)
            case "expiring":
                flags, expires_ms = Flag.RELATIVE_TTL, random.randint(1, 2000)
                await worker.do(commands.Put(b"t" + key, self._value(worker), expires_ms, flags), with_id=with_id)
                await worker.do(commands.Get(b"t" + key, level))
            case "append":
                await worker.do(commands.Append(b"a" + key, b"%d," % random.randrange(100)))
            case "fresh":
                await worker.do(commands.Put(random.randbytes(6), self._value(worker)), with_id=with_id)

    async def _swap(self, worker: Worker, key: bytes, level: Level) -> None:
        """Compare and set."""
        found = await worker.do(commands.Get(key, level))
        if found.status is not Status.OK or found.result is None:
            return
        version = found.result[1]
        if worker.random.random() < 0.3:
            await worker.do(commands.Delete(key, Flag.IF_VERSION, version))
        else:
            await worker.do(commands.Put(key, self._value(worker), flags=Flag.IF_VERSION, version=version))

    # ── counters: each increment once ─────────────────────────────────────────────────────────────────────────────────

    async def _counter(self, worker: Worker) -> None:
        key = b"c%d" % worker.random.randrange(COUNTERS)
        if worker.random.random() < 0.8:
            await worker.do(commands.Increment(key, worker.random.randint(1, 5)))
        else:
            await worker.do(commands.Get(key))

    # ── a bank: batches that move money ───────────────────────────────────────────────────────────────────────────────

    async def _bank(self, worker: Worker) -> None:
        random = worker.random
        bank = b"{bank%d}" % random.randrange(2)
        partition = self._cluster.ring.partition_of(bank)
        level = Level.STRICT if random.random() < 0.2 else Level.LINEARIZABLE
        found = await worker.do(commands.Scan(bank, bank + b"\xff", 100, level=level), partition=partition)
        if found.status is not Status.OK:
            return
        accounts = dict(found.result[0])
        if not accounts:
            await self._open_bank(worker, bank)
            return
        giver, taker = random.sample(sorted(accounts), 2)
        amount = random.randint(1, 20)
        parts = tuple(
            commands.Put(key, b"%d" % (int(accounts[key][0]) + change), 0, Flag.IF_VERSION, accounts[key][1])
            for key, change in ((giver, -amount), (taker, amount))
        )
        await worker.do(commands.Batch(giver, parts))

    async def _open_bank(self, worker: Worker, bank: bytes) -> None:
        keys = [bank + b"%d" % number for number in range(ACCOUNTS)]
        parts = tuple(commands.Put(key, b"%d" % DEPOSIT, 0, Flag.IF_ABSENT) for key in keys)
        await worker.do(commands.Batch(keys[0], parts))

    # ── readers: what any replica may answer ──────────────────────────────────────────────────────────────────────────

    async def _reader(self, worker: Worker) -> None:
        random = worker.random
        key = random.choice((b"r%d" % random.randrange(REGISTERS), b"c%d" % random.randrange(COUNTERS)))
        partition = self._cluster.ring.partition_of(key)
        choice = random.random()
        if choice < 0.5:
            await worker.do(commands.Get(key, Level.SESSION, worker.tokens.get(partition, 0)))
        elif choice < 0.7:
            await worker.do(commands.Get(key, Level.STALE))
        elif choice < 0.75:
            await worker.do(commands.Count(), partition=partition)
        else:
            mine = b"m-%s" % worker.name.encode()
            await worker.do(commands.Put(mine, self._value(worker)))
            partition = self._cluster.ring.partition_of(mine)
            await worker.do(commands.Get(mine, Level.SESSION, worker.tokens.get(partition, 0)))

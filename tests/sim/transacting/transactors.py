"""Users of transactions over any keys: transfers between accounts, members of circles who must not all be present,
appends to lists, reads of all of these, keys that expire, and plain operations on the same keys. The judges are
tests/sim/judges/transactions.py and cycles.py.

Values and items are unique, so that answers identify the operations that they show.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

from kvstore.errors import StoreError
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag, Level, Op, Record, Transact
from tests.sim.asking.calls import Call, Frame
from tests.sim.clients import Identity, Population, Worker
from tests.sim.judges.operations import Operation, Status, transaction
from tests.sim.judges.probes import declare, probe
from tests.sim.judges.transactions import ACCOUNTS, CIRCLES, DEPOSIT, EXPIRING, LISTS, REGISTERS

declare("transact.doubled", "transact.doubled_answer")

KINDS = {
    "transfer": 22,
    "blind transfer": 14,
    "circle": 14,
    "append": 20,
    "append to what was read": 10,
    "registers": 8,
    "expiring": 6,
    "audit": 14,
    "plain": 14,
}
LEVELS = (Level.LINEARIZABLE, Level.LINEARIZABLE, Level.STRICT, Level.SESSION, Level.STALE)
HOT = 0.3
"""Share of the transfers in which the first account takes part."""


class Doubling(Worker):
    """A worker that sends some of its transactions twice at the same time, through two nodes. Both must get the same
    answer, and the transaction happens once."""

    doubled = 0.1
    """The share of transactions that are sent twice."""

    def __init__(self, cluster: Population, name: str, random: Random, identity: Identity) -> None:
        super().__init__(cluster, name, random, identity)
        self._twice: set[int] = set()
        """Numbers of operations that were sent twice."""

    def _end(self, operation: Operation, status: Status, result: Any) -> None:
        # A refusal says nothing about the other copy.
        if operation.number in self._twice and (status is Status.FAIL or isinstance(result, StoreError)):
            status = Status.INFO
        super()._end(operation, status, result)

    def _send(self, operations: list[Operation]) -> list[Call]:
        calls = super()._send(operations)
        for call in calls:
            operation = call.operation
            if isinstance(operation.op, Transact) and operation.request and self.random.random() < self.doubled:
                probe("transact.doubled")
                self._twice.add(operation.number)
                node = self.random.choice(self._cluster.endpoints)
                second = Frame(self._cluster.network, self.name, node, [operation], self.ring.routed).calls[0]
                second.answer.add_done_callback(lambda answer, first=call: _compare(first, answer))  # type: ignore[misc]
        return calls


def _compare(first: Call, answer: asyncio.Future[Any]) -> None:
    if answer.cancelled() or answer.exception() is not None:
        return
    if not first.answer.done() or first.answer.cancelled() or first.answer.exception() is not None:
        return
    one, other = first.answer.result().result, answer.result().result
    if not isinstance(one, Exception) and not isinstance(other, Exception):
        probe("transact.doubled_answer")
        assert comparable(one) == comparable(other), f"{first.operation} is answered {one} and {other}"


def comparable(result: Any) -> Any:
    """Return a result with lists as tuples, errors as text and the partitions in order."""
    if isinstance(result, (tuple, list)):
        return tuple(map(comparable, result))
    return repr(result) if isinstance(result, Exception) else result


class Transactors:
    """All users of transactions in one run."""

    def __init__(self, cluster: Population, random: Random, count: int, pause_s: float) -> None:
        self._cluster, self._random, self._pause_s = cluster, random, pause_s
        self._stopping = False
        self._numbers = 0
        self._is_open = False
        self.workers = [self._live(number, Random(random.getrandbits(64))) for number in range(count)]

    def calm_down(self) -> None:
        """Work more slowly from now on."""
        self._pause_s = max(self._pause_s, 0.3)

    def stop(self) -> None:
        """Stop each worker after its current operation."""
        self._stopping = True

    async def _live(self, number: int, random: Random) -> None:
        worker = Doubling(self._cluster, f"transactor{number}", random, Identity(random))
        worker.timeout_s = random.choice((2.0, 2.0, 5.0, 0.05))  # a short timeout makes it retry what is under way
        while not worker.identity.seen_ms and not self._stopping:
            await worker.do(commands.Get(random.randbytes(4)))
        while not self._stopping:
            await self._do_something(worker)
            await asyncio.sleep(random.expovariate(1 / self._pause_s))

    async def read_all(self, patience_s: float) -> list[Operation]:
        """Return the last reads, one transaction for each group of keys, when everything has come to rest. Raises
        AssertionError."""
        if not self.workers:
            return []
        worker = Worker(self._cluster, "last transactor", self._random, Identity(self._random))
        loop = asyncio.get_running_loop()
        deadline, found = loop.time() + patience_s, []
        for keys in (ACCOUNTS, LISTS, *CIRCLES, REGISTERS, EXPIRING):
            while (done := await worker.do(reads(keys))).status is not Status.OK:
                assert loop.time() < deadline, f"the last read failed: {done}"
            found.append(done)
        return found

    # ── what they do ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _do_something(self, worker: Worker) -> None:
        if not self._is_open:
            await self._open(worker)
            return
        kind = worker.random.choices(list(KINDS), list(KINDS.values()))[0]
        works: dict[str, Callable[[Worker], Coroutine[Any, Any, Any]]] = {
            "transfer": self._transfer,
            "blind transfer": self._blind_transfer,
            "circle": self._circle,
            "append": self._append,
            "append to what was read": self._append_to_what_was_read,
            "registers": self._set_registers,
            "expiring": self._expiring,
            "audit": self._audit,
            "plain": self._plain,
        }
        await works[kind](worker)

    async def _transact(self, worker: Worker, ops: Sequence[Op], flags: int = 0) -> Operation:
        """Perform a transaction. Its key is the first one that it writes."""
        op = transaction(ops, flags)
        with_id = worker.random.random() < 0.9
        return await worker.do(op, with_id=with_id)

    async def _open(self, worker: Worker) -> None:
        """Open all accounts, in one transaction."""
        ops = [commands.Put(key, b"%d" % DEPOSIT, 0, Flag.IF_ABSENT) for key in ACCOUNTS]
        done = await self._transact(worker, worker.random.sample(ops, len(ops)))
        self._is_open = self._is_open or done.status is Status.OK

    async def _transfer(self, worker: Worker) -> None:
        """Read some accounts and move money between two of them if they are unchanged."""
        random = worker.random
        chosen = self._accounts(random, random.choice((2, 2, 2, 3)))
        if random.random() < 0.4:
            done = await worker.do(reads(chosen))
            if done.status is not Status.OK:
                return
            found = dict(zip(chosen, done.result, strict=True))
        else:
            gets = [self._get(worker, key) for key in chosen]
            done_gets = await worker.do_all(gets)
            if any(each.status is not Status.OK for each in done_gets):
                return
            found = {each.key: each.result for each in done_gets}
        if None in found.values():
            return
        amount = random.randint(1, 20)
        ops: list[Op] = []
        for key, change in zip(chosen, (-amount, amount, 0), strict=False):
            record = Record(*found[key])
            if not change:
                ops.append(commands.Check(key, Flag.IF_VERSION, record.version))
                continue
            value = b"%d" % (int(record.value) + change)
            ops.append(commands.Put(key, value, 0, Flag.IF_VERSION, record.version))
        await self._transact(worker, random.sample(ops, len(ops)))

    async def _blind_transfer(self, worker: Worker) -> None:
        random = worker.random
        giver, *takers = self._accounts(random, random.choice((2, 2, 3)))
        amount = random.randint(1, 20)
        ops: list[Op] = [commands.Increment(giver, -amount * len(takers))]
        ops += [commands.Increment(taker, amount) for taker in takers]
        await self._transact(worker, random.sample(ops, len(ops)))

    async def _circle(self, worker: Worker) -> None:
        """Each member of a circle joins only while the next member is absent. So the last one never joins: all of them
        together would be write skew."""
        random = worker.random
        circle = random.choice(CIRCLES)
        place = random.randrange(len(circle))
        own, following = circle[place], circle[(place + 1) % len(circle)]
        roll = random.random()
        if roll < 0.25:
            await worker.do(commands.Delete(own))
        elif roll < 0.35:
            await self._transact(worker, [commands.Delete(key) for key in circle])
        elif roll < 0.5:
            await worker.do(reads(circle))
        else:
            ops = [commands.Put(own, self._value(worker), 0, Flag.IF_ABSENT), commands.Check(following, Flag.IF_ABSENT)]
            await self._transact(worker, random.sample(ops, 2))

    async def _append(self, worker: Worker) -> None:
        """Append to some lists and read others, in one transaction; or one of both alone."""
        random = worker.random
        ops: list[Op] = []
        for _ in range(random.choice((1, 2, 2, 3, 4))):
            key = random.choice(LISTS)
            is_append = random.random() < 0.6
            ops.append(commands.Append(key, self._item(worker)) if is_append else commands.Get(key))
        if len(ops) == 1 and random.random() < 0.8:
            await worker.do(ops[0])
            return
        appended = [each.key for each in ops if isinstance(each, commands.Append)]
        if appended and random.random() < 0.15:
            ops.append(commands.Increment(random.choice(appended), 1))  # refused alone: a list is no number
            await self._transact(worker, ops, Flag.INDEPENDENT)
            return
        await self._transact(worker, ops)

    async def _append_to_what_was_read(self, worker: Worker) -> None:
        """Read some lists, and append to others if those are unchanged."""
        random = worker.random
        chosen = random.sample(LISTS, random.choice((2, 3)))
        seen = await worker.do_all([self._get(worker, key) for key in chosen])
        ops: list[Op] = []
        for each in seen[1:]:
            if each.status is Status.OK and each.result is not None:
                ops.append(commands.Check(each.key, Flag.IF_VERSION, each.result[1]))
        ops.append(commands.Append(chosen[0], self._item(worker)))
        await self._transact(worker, random.sample(ops, len(ops)))

    async def _set_registers(self, worker: Worker) -> None:
        """Write several registers at once, by any operation."""
        random = worker.random
        ops: list[Op] = []
        for key in random.sample(REGISTERS, random.choice((1, 2, 3))):
            kind = random.choice(("put", "put", "delete", "old", "get", "meta"))
            if kind == "put":
                ops.append(commands.Put(key, self._value(worker)))
            elif kind == "old":
                ops.append(commands.Put(key, self._value(worker), 0, Flag.RETURN_OLD | Flag.IF_PRESENT))
            elif kind == "delete":
                ops.append(commands.Delete(key, random.choice((0, int(Flag.RETURN_OLD)))))
            else:
                ops.append(commands.Get(key) if kind == "get" else commands.Meta(key))
        await self._transact(worker, ops)

    async def _expiring(self, worker: Worker) -> None:
        """Write a key that expires together with an item, or depend on one."""
        random = worker.random
        key, item = random.choice(EXPIRING), commands.Append(random.choice(LISTS), self._item(worker))
        ttl_ms = random.choice((1, 100, 600, 60_000))
        roll = random.random()
        if roll < 0.5:
            write = commands.Put(key, self._value(worker), ttl_ms, Flag.RELATIVE_TTL)
            await self._transact(worker, random.sample([write, item], 2))
        elif roll < 0.75:
            await self._transact(worker, [item, commands.Check(key, Flag.IF_PRESENT)])
        elif roll < 0.9:
            await self._transact(worker, [item, commands.Expire(key, ttl_ms, Flag.RELATIVE_TTL)])
        else:
            await self._transact(worker, [item, commands.Delete(key)])

    async def _audit(self, worker: Worker) -> None:
        await worker.do(reads(worker.random.choice((ACCOUNTS, ACCOUNTS, LISTS, REGISTERS, *CIRCLES))))

    async def _plain(self, worker: Worker) -> None:
        """Perform an operation on one key, outside of any transaction."""
        random = worker.random
        kind = random.choice(("get", "get", "get", "put", "delete", "touch", "append", "expiring"))
        match kind:
            case "get":
                await worker.do(self._get(worker, random.choice((*ACCOUNTS, *LISTS, *REGISTERS, *EXPIRING))))
            case "put":
                await worker.do(commands.Put(random.choice(REGISTERS), self._value(worker)))
            case "delete":
                await worker.do(commands.Delete(random.choice(REGISTERS)))
            case "touch":
                await worker.do(commands.Increment(random.choice(ACCOUNTS), 0))
            case "append":
                await worker.do(commands.Append(random.choice(LISTS), self._item(worker)))
            case "expiring":
                ttl_ms = random.choice((1, 100, 600))
                await worker.do(commands.Put(random.choice(EXPIRING), self._value(worker), ttl_ms, Flag.RELATIVE_TTL))

    # ── parts of it ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _get(self, worker: Worker, key: bytes) -> Op:
        """Return a read at any level. Levels do not matter to a transaction that checks versions."""
        level = worker.random.choice(LEVELS)
        token = worker.tokens.get(worker.ring.partition_of(key), 0) if level is Level.SESSION else 0
        return commands.Get(key, level, token)

    def _accounts(self, random: Random, count: int) -> list[bytes]:
        chosen = random.sample(ACCOUNTS, count)
        if random.random() < HOT and ACCOUNTS[0] not in chosen:
            chosen[random.randrange(count)] = ACCOUNTS[0]
        return chosen

    def _item(self, worker: Worker) -> bytes:
        """Return an item that nobody has appended."""
        return b"%s," % self._value(worker)

    def _value(self, worker: Worker) -> bytes:
        self._numbers += 1
        return b"%s.%d" % (worker.name.removeprefix("transactor").encode(), self._numbers)


def reads(keys: Sequence[bytes]) -> Transact:
    """Return a transaction that reads these keys."""
    return Transact(keys[0], tuple(map(commands.Get, keys)))

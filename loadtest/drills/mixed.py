"""Clients of the Redis listener for a drill with faults. They use registers, counters, lists and pairs through every
node, send each operation once, and often set timeouts that are too short. Their results form a history, which the
drill checks for a possible order.

The outcome of an operation without a reply is unknown. The outcome of an operation that was refused, or could not be
sent because the connection failed, is known: it was not done.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from kvstore.env.transport import join_address
from kvstore.loadtest.resp import AsyncRespConnection, Lost, connect
from tests.sim.judges.history import History, Kind, Pending

CALLERS = 4
"""Number of callers of each key, on the nodes in turn."""
PAUSE_S = 0.12
"""Average pause between two operations of a caller."""
CONNECT_S = 1.0
TIMEOUTS_S = (0.3, 2.0, 5.0, 8.0)
TORN = b"torn"
"""The value that a reader reports for a pair whose halves differ. It is never written."""


class NotDone(Exception):
    """The operation was certainly not done: it was not sent, or it was refused."""


class Unknown(Exception):
    """The operation was sent and may have been done."""


def _error_of(text: str) -> Exception:
    return Unknown(text) if text.startswith("UNKNOWN") else NotDone(text)


class Endpoint:
    """One connection to a node's Redis listener, opened again when it is needed."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = join_address(*address)
        self._connection: AsyncRespConnection | None = None

    async def ask(self, *commands: Sequence[bytes], timeout_s: float) -> Any:
        """Return the last command's reply. Raises NotDone or Unknown."""
        last = (await self.ask_all(*commands, timeout_s=timeout_s))[-1]
        for each in last if isinstance(last, list) else [last]:
            if isinstance(each, NotDone | Unknown):
                raise each
        return last

    async def ask_all(self, *commands: Sequence[bytes], timeout_s: float) -> list[Any]:
        """Return every command's reply; an error reply is a NotDone or an Unknown among them. Raises NotDone or
        Unknown."""
        if self._connection is None or self._connection.is_lost:
            try:
                self._connection = await connect(self._address, timeout_s=CONNECT_S, error_of=_error_of)
            except (OSError, TimeoutError) as error:
                raise NotDone(f"not connected: {error}") from error
        try:
            return await self._connection.ask_all(commands, timeout_s=timeout_s)
        except Lost as error:
            self.close()
            raise Unknown(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class MixedLoad:
    """The load. It runs from `start` to `stop`; each of `tags` belongs to one partition."""

    def __init__(self, addresses: Sequence[tuple[str, int]], tags: Sequence[bytes], now: Callable[[], float]) -> None:
        self.history = History(now)
        self.errors: Counter[str] = Counter()
        self._addresses, self._tags = addresses, tags
        self._random = Random(1)
        self._values, self._incarnations = itertools.count(1), itertools.count(1)
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, run: bytes) -> None:
        """Start the callers. Every key contains `run`."""
        works = (self._register, self._counter, self._list, self._pair)
        for tag, (place, work) in itertools.product(self._tags, enumerate(works)):
            key = b"{%b}mixed-%b-%d" % (tag, run, place)
            for caller in range(CALLERS):
                endpoint = Endpoint(self._addresses[(caller + place) % len(self._addresses)])
                self._tasks.append(asyncio.create_task(self._call(work, endpoint, key, f"{key.decode()}/{caller}")))

    async def stop(self) -> None:
        """Stop, and wait for the operations in flight."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        self.history.close()

    async def _call(self, work: Callable[..., Any], endpoint: Endpoint, key: bytes, name: str) -> None:
        process = name
        while not self._stopping:
            pending: Pending | None = None
            try:
                pending, commands, done = work(process, key)
                done(pending, await endpoint.ask(*commands, timeout_s=self._random.choice(TIMEOUTS_S)))
            except NotDone as error:
                self._note(error)
                if pending is not None:
                    pending.fail()
            except Unknown as error:
                self._note(error)
                if pending is not None:
                    pending.info()
                process = f"{name}#{next(self._incarnations)}"
            await asyncio.sleep(PAUSE_S * 2 * self._random.random())
        endpoint.close()

    def _note(self, error: Exception) -> None:
        self.errors[" ".join(str(error).split()[:2])] += 1

    # ── what is asked: (the operation, its commands, what to make of the reply) ──

    def _register(self, process: str, key: bytes) -> tuple[Pending, list[list[bytes]], Callable[..., None]]:
        value, begin = b"%d" % next(self._values), self.history.begin
        match self._random.choice(("GET", "GET", "SET", "DEL", "GETSET", "GETDEL", "SETNX", "SETEX", "MSET")):
            case "GET":
                return begin(process, Kind.GET, key), [[b"GET", key]], Pending.ok
            case "SET":
                return begin(process, Kind.PUT, key, value), [[b"SET", key, value]], _done
            case "SETEX":
                return begin(process, Kind.PUT, key, value), [[b"SET", key, value, b"EX", b"3600"]], _done
            case "MSET":
                return begin(process, Kind.PUT, key, value), [[b"MSET", key, value]], _done
            case "DEL":
                return begin(process, Kind.DEL, key), [[b"DEL", key]], _done
            case "GETSET":
                return begin(process, Kind.SWAP, key, value), [[b"GETSET", key, value]], Pending.ok
            case "GETDEL":
                return begin(process, Kind.SWAP, key), [[b"GETDEL", key]], Pending.ok
            case _:
                return begin(process, Kind.CAS, key, value), [[b"SETNX", key, value]], _done_if_one

    def _counter(self, process: str, key: bytes) -> tuple[Pending, list[list[bytes]], Callable[..., None]]:
        if self._random.random() < 0.3:
            return self.history.begin(process, Kind.GET, key), [[b"GET", key]], _counted
        delta = self._random.choice((1, 1, 1, 10))
        pending = self.history.begin(process, Kind.INCR, key, delta=delta)
        return pending, [[b"INCRBY", key, b"%d" % delta]], Pending.ok

    def _list(self, process: str, key: bytes) -> tuple[Pending, list[list[bytes]], Callable[..., None]]:
        match self._random.choice(("GET", "GET", "APPEND", "APPEND", "APPEND", "GETDEL")):
            case "GET":
                return self.history.begin(process, Kind.GET, key), [[b"GET", key]], Pending.ok
            case "APPEND":
                value = b"%d," % next(self._values)
                return self.history.begin(process, Kind.APPEND, key, value), [[b"APPEND", key, value]], Pending.ok
            case _:
                return self.history.begin(process, Kind.SWAP, key), [[b"GETDEL", key]], Pending.ok

    def _pair(self, process: str, key: bytes) -> tuple[Pending, list[list[bytes]], Callable[..., None]]:
        """Return an operation on two keys that are only changed together."""
        halves = [key + b"-a", key + b"-b"]
        if self._random.random() < 0.5:
            reads = [[b"MULTI"], *([b"GET", half] for half in halves), [b"EXEC"]]
            return self.history.begin(process, Kind.GET, key), reads, _both
        value = b"%d" % next(self._values)
        pending = self.history.begin(process, Kind.PUT, key, value)
        return pending, [[b"MULTI"], *([b"SET", half, value] for half in halves), [b"EXEC"]], _done


def _done(pending: Pending, reply: Any) -> None:
    pending.ok()


def _done_if_one(pending: Pending, reply: Any) -> None:
    if reply == 1:
        pending.ok()
    else:
        pending.fail(condition_failed=True)


def _counted(pending: Pending, reply: Any) -> None:
    pending.ok(None if reply is None else int(reply))


def _both(pending: Pending, reply: Any) -> None:
    one, other = reply
    pending.ok(one if one == other else TORN)

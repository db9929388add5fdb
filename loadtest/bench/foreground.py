"""Somebody who writes at a steady rate while something else goes on, in a process of its own: small SETs by Redis'
protocol, begun when they are due whatever has become of those before; how long each took from then on, by phases.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple, cast

import uvloop

KEYS = 10_000
VALUE = b"x" * 100
TICK_S = 0.001
ANSWER_S = 1.0
"""How long the last writes may take: what has no answer then is an error."""


class Latencies(NamedTuple):
    """Of one phase, in milliseconds."""

    writes: int
    p50: float
    p99: float
    worst: float
    errors: int

    def __str__(self) -> str:
        errors = f", {self.errors} errors" if self.errors else ""
        return f"{self.writes} writes, p50 {self.p50:.1f} ms, p99 {self.p99:.1f} ms, worst {self.worst:.0f} ms{errors}"


class Foreground:
    """The process, from outside."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def phase(self, name: str) -> None:
        """What is due from now on counts for it; "" counts for none."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Latencies]:
        """Of all phases."""
        output, _ = self._process.communicate(timeout=60)
        return {name: Latencies(*each) for name, each in json.loads(output).items()}


@contextmanager
def writing(addresses: Sequence[str], rate: float) -> Iterator[Foreground]:
    """`rate` writes a second, to `host:port`s in turn."""
    command = [sys.executable, "-m", "loadtest.bench.foreground", str(rate), *addresses]
    # A session of its own: what the machine gives to sessions (autogroup) it does not share with its caller.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield Foreground(process)
    finally:
        process.kill()
        process.wait()


class Connection(asyncio.Protocol):
    """To one server: answers come in the order of the writes."""

    def __init__(self, taken: dict[str, list[float]], errors: dict[str, int]) -> None:
        self._taken, self._errors = taken, errors
        self._due: list[tuple[str, float]] = []
        self._left = b""
        self.transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)

    def write(self, number: int, phase: str, due: float) -> None:
        key = b"meanwhile%06d" % (number * 7919 % KEYS)
        self._due.append((phase, due))
        self.transport.write(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(VALUE), VALUE))

    def data_received(self, data: bytes) -> None:
        now = asyncio.get_running_loop().time()
        *answers, self._left = (self._left + data).split(b"\r\n")
        for answer, (phase, due) in zip(answers, self._due[: len(answers)], strict=True):
            if answer == b"+OK":
                self._taken.setdefault(phase, []).append(now - due)
            else:
                self._errors[phase] = self._errors.get(phase, 0) + 1
        del self._due[: len(answers)]

    def give_up(self) -> None:
        """What has no answer yet has failed."""
        for phase, _ in self._due:
            self._errors[phase] = self._errors.get(phase, 0) + 1


async def write(rate: float, addresses: Sequence[str]) -> dict[str, Latencies]:
    """Until standard input ends."""
    loop = asyncio.get_running_loop()
    taken: dict[str, list[float]] = {}
    errors: dict[str, int] = {}
    connections = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        _, made = await loop.create_connection(lambda: Connection(taken, errors), host, int(port))
        connections.append(made)
    phase, ended = "", asyncio.Event()

    def told() -> None:
        nonlocal phase
        line = sys.stdin.readline()
        phase = line.strip()
        if not line:
            ended.set()

    loop.add_reader(sys.stdin.fileno(), told)
    began = loop.time()
    for number in count():
        due = began + number / rate
        if loop.time() < due:
            await asyncio.sleep(max(due - loop.time(), TICK_S))
        if ended.is_set():
            break
        connections[number % len(connections)].write(number, phase, due)
    await asyncio.sleep(ANSWER_S)
    for each in connections:
        each.give_up()
    return {name: _of(sorted(taken.get(name, ())), errors.get(name, 0)) for name in {*taken, *errors} if name}


def _of(found: Sequence[float], errors: int) -> Latencies:
    if not found:
        return Latencies(0, 0.0, 0.0, 0.0, errors)
    p50, p99, worst = (1000 * found[min(len(found) - 1, int(len(found) * share))] for share in (0.5, 0.99, 1.0))
    return Latencies(len(found), p50, p99, worst, errors)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(write(float(sys.argv[1]), sys.argv[2:]))))

"""A separate process that writes at a steady rate during another measurement: small SETs by the Redis protocol. Each
write begins when it is due, even if earlier writes are not done. Durations count from that time and are grouped by
phase.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import NamedTuple

import uvloop

from kvstore.errors import OutcomeUnknown
from kvstore.loadtest.loads import Generator, LoadResult, LoadSpec, value_of
from kvstore.loadtest.resp import Lost, ReplyError, connect

KEYS = 10_000
IN_FLIGHT = 256
"""Maximum number of writes in flight. Further writes wait for one to end, and the wait counts."""
ENDLESS_S = 1e9
ANSWER_S = 1.0
"""Maximum time for the last writes. A write without a reply by then counts as an error."""


class Latencies(NamedTuple):
    """The latencies of one phase, in milliseconds."""

    writes: int
    p50: float
    p99: float
    worst: float
    errors: int

    def __str__(self) -> str:
        errors = f", {self.errors} errors" if self.errors else ""
        return f"{self.writes} writes, p50 {self.p50:.1f} ms, p99 {self.p99:.1f} ms, worst {self.worst:.0f} ms{errors}"


class Foreground:
    """A handle on the writing process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def phase(self, name: str) -> None:
        """Begin a phase. Operations that are due from now on belong to it; with "" they belong to no phase."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Latencies]:
        """End the process, and return the latencies of all phases."""
        output, _ = self._process.communicate(timeout=60)
        return {name: Latencies(*each) for name, each in json.loads(output).items()}


@contextmanager
def writing(addresses: Sequence[str], rate: float) -> Iterator[Foreground]:
    """Write `rate` times a second, to each of the `host:port`s in turn."""
    command = [sys.executable, "-m", "loadtest.bench.foreground", str(rate), *addresses]
    # A separate session: what the machine gives to sessions (autogroup) it does not share with its caller.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield Foreground(process)
    finally:
        process.kill()
        process.wait()


async def write(rate: float, addresses: Sequence[str]) -> dict[str, Latencies]:
    """Write until standard input ends."""
    loop = asyncio.get_running_loop()
    load = LoadSpec(
        seconds=ENDLESS_S, warmup_s=0, rate=rate, in_flight=IN_FLIGHT, mix=(("put", 1),), keys=KEYS, prefix=b"meanwhile"
    )
    connections = [await connect(address, timeout_s=ANSWER_S) for address in addresses]
    turns, value = cycle(connections), value_of(load)

    async def put(key: bytes) -> None:
        try:
            await next(turns).call(b"SET", key, value)
        except (Lost, ReplyError) as error:
            raise OutcomeUnknown(str(error)) from None

    generator, phases, ended = Generator(load, {"put": put}), dict[str, LoadResult](), asyncio.Event()

    def told() -> None:
        line = sys.stdin.readline()
        if line:
            generator.outcome = phases.setdefault(line.strip(), LoadResult(load))
        else:
            ended.set()

    loop.add_reader(sys.stdin.fileno(), told)
    writing = asyncio.create_task(generator.run())
    await ended.wait()
    generator.stop()
    await asyncio.wait({writing}, timeout=ANSWER_S)
    for each in connections:
        each.close()
    await writing
    return {name: _of(outcome) for name, outcome in phases.items() if name}


def _of(outcome: LoadResult) -> Latencies:
    errors = outcome.errors.total()
    for row in outcome.rows():
        return Latencies(row["count"], row["p50_ms"], row["p99_ms"], row["max_ms"], errors)
    return Latencies(0, 0.0, 0.0, 0.0, errors)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(write(float(sys.argv[1]), sys.argv[2:]))))

"""Count the calls from one file of kvstore/ into another that one operation makes: the files that a reader must follow.

    make hops                                                            # a table: medians over 20 operations
    PYTHONPATH=$PWD .venv/bin/python scripts/hops.py --path              # and the files of each operation, in order
    PYTHONPATH=/path/to/another/tree .venv/bin/python scripts/hops.py    # of that tree

Three nodes run in the simulation. A SET goes to the Redis port of a node that does not lead. A GET goes to the leader's
Redis port just after a write, so that the lease is valid. Causes show which calls belong to the operation: each
callback of the event loop remembers the callback that scheduled it, also across the network and the disk, which are
callbacks in the simulation.

    path    the callbacks that the answer comes from: the one that brought it, the one that scheduled that, and so on
            back to the request. Timers, heartbeats and the tails of other replicas are on no such chain; of a quorum
            only the bookie whose answer was awaited is.
    caused  all that the request has set going until its answer came, on all nodes: the other bookies too, and long
            polls of tails that the new entry answers. Timers and heartbeats that run meanwhile are not.

A hop is a call into a file from another file, the nearest of kvstore/ on the stack. A coroutine that continues is not a
call. Calls that tests/ makes by itself do not count. Turns are the callbacks in which code of kvstore/ ran.
"""

from __future__ import annotations

import argparse
import asyncio
import dis
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

OPERATIONS = 20
WARM_UP = 50
SECONDS_MAX = 60.0

MODULES = {
    "cluster": ("tests.sim.cluster",),
    "env": ("tests.sim.world.env", "tests.sim.env"),
    "knobs": ("tests.sim.strikes.knobs", "tests.sim.knobs"),
    "loop": ("tests.sim.world.loop", "tests.sim.loop"),
    "network": ("tests.sim.world.network", "tests.sim.network"),
    "nodes": ("tests.sim.nodes",),
    "run": ("tests.sim.run",),
}
"""Where the simulation's modules are, the latest place first."""
RESUME = dis.opmap["RESUME"]


def module(name: str) -> Any:
    for place in MODULES[name]:
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not place.startswith(error.name or "-"):
                raise
    raise SystemExit(f"no {name} in {MODULES[name]}: is PYTHONPATH the top of a tree?")


@dataclass(eq=False)
class Turn:
    """One callback of the loop."""

    cause: Turn | None
    node: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """(file that called, or nothing where the loop did; file called)."""

    def path_to_answer(self) -> list[Turn]:
        """The turns that led here, the first one first."""
        found: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            found.append(turn)
            turn = turn.cause
        return found[::-1]


@dataclass(frozen=True)
class Measured:
    """One operation in one scope."""

    turns: list[Turn]

    @property
    def steps(self) -> list[tuple[str, str]]:
        return [call for turn in self.turns for call in turn.calls]

    def figures(self) -> tuple[int, int, int, int]:
        """(hops, files, calls, turns)."""
        hops = sum(source not in ("", target) for source, target in self.steps)
        files = {target for _, target in self.steps}
        return hops, len(files), len(self.steps), sum(bool(turn.calls) for turn in self.turns)

    def path(self) -> Iterator[str]:
        """A line for each turn: its node, and the files in the order in which they are entered (returns are not)."""
        for turn in self.turns:
            if turn.calls:
                yield f"{turn.node}: " + " > ".join(file for file, _ in groupby(target for _, target in turn.calls))


class Profile:
    """Knows which turn runs and what it calls, while an operation is traced."""

    def __init__(self, loop: Any, current_node: Any) -> None:
        import kvstore

        self._root = str(Path(kvstore.__file__).parent) + "/"
        self._node = current_node
        self._turn: Turn | None = None
        self._first: Turn | None = None
        self.caused: list[Turn] = []
        for name in ("call_soon", "call_at"):
            self._wrap(loop, name)

    def _wrap(self, loop: Any, name: str) -> None:
        """Let the loop's callbacks remember their cause."""
        schedule = getattr(loop, name)
        position = name == "call_at"

        def remembering(*args: Any, context: Any = None) -> Any:
            if self._turn is None:
                return schedule(*args, context=context)
            before, callback, rest = args[:position], args[position], args[position + 1 :]
            turn = Turn(self._turn)
            return schedule(*before, lambda *given: self._run(turn, callback, given), *rest, context=context)

        setattr(loop, name, remembering)

    def _run(self, turn: Turn, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self._first is None or turn.path_to_answer()[0] is not self._first:
            callback(*args)
            return
        process = self._node.get()
        turn.node = process.name if process is not None else "kernel"
        self.caused.append(turn)
        self._turn = turn
        if process is not None and process.name.startswith("n"):
            sys.setprofile(self._saw)
        try:
            callback(*args)
        finally:
            sys.setprofile(None)
            self._turn = None

    def begin(self, send: Callable[[], object]) -> None:
        """Send the operation with `send`, and count what follows."""
        self.caused = []
        self._first = self._turn = Turn(None, "client")
        try:
            send()
        finally:
            self._turn = None

    def end(self) -> tuple[Measured, Measured]:
        """In the turn that brings the answer: the path to it, and all that was caused."""
        assert self._turn is not None, "an answer that nothing traced has caused"
        self._first = None
        return Measured(self._turn.path_to_answer()), Measured(self.caused)

    def _saw(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or self._turn is None:
            return
        code = frame.f_code
        if not code.co_filename.startswith(self._root) or is_resumed(frame):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self._root):
            caller = caller.f_back
        source = caller.f_code.co_filename.removeprefix(self._root) if caller is not None else ""
        self._turn.calls.append((source, code.co_filename.removeprefix(self._root)))


def is_resumed(frame: FrameType) -> bool:
    """Return True if a coroutine or generator continues; a call event only shows that it runs."""
    at, code = frame.f_lasti, frame.f_code.co_code
    return at >= 0 and code[at] == RESUME and code[at + 1] != 0


class Client:
    """A raw connection to a Redis port, one command at a time."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._answer: asyncio.Future[bytes] | None = None
        self.measured: tuple[Measured, Measured] | None = None
        self.stream: Any = None
        self._is_traced = False

    async def do(self, *words: bytes, traced: bool = False) -> bytes:
        self._answer = asyncio.get_running_loop().create_future()
        self._is_traced = traced
        data = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
        if traced:
            self._profile.begin(lambda: self.stream.write(data))
        else:
            self.stream.write(data)
        return await self._answer

    def connection_made(self, transport: Any) -> None:
        self.stream = transport

    def data_received(self, data: bytes) -> None:
        if self._is_traced:
            self._is_traced = False
            self.measured = self._profile.end()
        assert self._answer is not None
        self._answer.set_result(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        assert exc is None, exc

    def pause_writing(self) -> None:
        """It sends little."""

    def resume_writing(self) -> None:
        """It sends little."""


Results = dict[str, list[tuple[Measured, Measured]]]


async def measure(world: Any, cluster: Any, profile: Profile) -> Results:
    await cluster.found()
    await module("run").all_serve(cluster, SECONDS_MAX)
    await asyncio.sleep(2.0)
    (partition,) = cluster.partitions
    leading = cluster.leader(partition)
    other = next(node for node in cluster.nodes if node is not leading)
    clients = {}
    for name, node in (("far", other), ("near", leading)):
        clients[name] = client = Client(profile)
        await world.env("client").transport.connect(f"{node.name}:6401", client)
    for number in range(WARM_UP):
        assert await clients["far"].do(b"SET", b"key", b"%d" % number) == b"+OK\r\n"
        assert (await clients["near"].do(b"GET", b"key")).endswith(b"\r\n%d\r\n" % number)
    results: Results = {"SET, forwarded": [], "GET, at the leader": []}
    for number in range(OPERATIONS):
        await asyncio.sleep(0.05)
        assert await clients["far"].do(b"SET", b"key", b"%d" % number, traced=True) == b"+OK\r\n"
        await asyncio.sleep(0.05)
        assert (await clients["near"].do(b"GET", b"key", traced=True)).endswith(b"\r\n%d\r\n" % number)
        assert cluster.leader(partition) is leading
        for operation, client in zip(results, clients.values(), strict=True):
            assert client.measured is not None
            results[operation].append(client.measured)
    return results


def run(seed: int) -> Results:
    nodes = module("nodes")
    if hasattr(nodes, "check_after_each_event"):
        nodes.check_after_each_event = lambda machine: None  # what tests call by themselves does not count
    whole = module("network").NetworkConfig(recut_chance=0.0)  # an answer comes in one piece
    with module("env").SimWorld(seed, network=whole) as world:
        profile = Profile(world.loop, module("loop").current_node)
        cluster = module("cluster").Cluster(world, module("knobs").Knobs(nodes=3, partitions=1))
        results: Results = world.run(measure(world, cluster, profile), limit_s=SECONDS_MAX * 3)
        return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--path", action="store_true", help="also print the files on the path to the answer, turn by turn"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the simulation")
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    results = run(chosen.seed)
    print(f"{'operation':<20} {'scope':<7} {'hops':>6} {'files':>6} {'calls':>6} {'turns':>6}")
    for operation, each in results.items():
        for scope, all_measured in zip(("path", "caused"), zip(*each, strict=True), strict=True):
            columns = zip(*(measured.figures() for measured in all_measured), strict=True)
            print(f"{operation:<20} {scope:<7}" + "".join(f" {median(column):>6.0f}" for column in columns))
    if chosen.path:
        for operation, each in results.items():
            print(f"\n{operation}")
            paths = sorted((found for found, _ in each), key=lambda found: found.figures())
            print("\n".join(paths[len(paths) // 2].path()))


if __name__ == "__main__":
    main()

"""The simulated world: one seed, one schedule, one outcome.

    def test_something(seed: int) -> None:
        with SimWorld(seed) as world:
            for name in ("b1", "b2", "b3"):
                world.node(name).start(bookie_main)      # async def bookie_main(env: Env): its return ends the process
            world.run(scenario(world, world.env("client")))

tests/sim/world/example.py is a complete example.

The coroutine given to `run` is the test itself: it belongs to no node, never crashes, and may use the Env of a node
that runs no main. Everything that a node starts belongs to the node: after a crash, no line of it runs any more.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any, NoReturn, TextIO, TypeVar

from kvstore.env import Env
from kvstore.env.clock import Unjudged
from kvstore.env.nursery import TaskNursery
from tests.sim.trace import Trace
from tests.sim.world.death import SimDeathWatch
from tests.sim.world.disk import DiskConfig, SimDisk
from tests.sim.world.liveness import SimLiveness
from tests.sim.world.loop import Process, ProcessDied, SimLoop
from tests.sim.world.network import NetworkConfig, SimNetwork, SimTransport

T = TypeVar("T")
Main = Callable[[Env], Coroutine[Any, Any, Any]]

EPOCH_MS = 1_790_000_000_000


class TimeUp(AssertionError):
    """The run did not end within its virtual time limit."""


class NodeCrashed(Exception):
    """The node crashed before a call on it returned."""


class SimulationFailed(AssertionError):
    """A callback or a task that no code awaits failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockConfig:
    drift_max: float = 200e-6
    """Maximum rate error of a clock, in seconds per second."""
    wall_skew_ms_max: int = 900
    """Maximum offset of a wall clock in milliseconds. Two clocks with it differ by less than dates may differ
    (kvstore.server.clock.clock_judge.BOUND_MS)."""


class SimClock(Unjudged):
    """The Clock port of one machine. It restarts at each boot, drifts, and has its own date."""

    def __init__(self, loop: SimLoop, random: Random, config: ClockConfig) -> None:
        self._loop = loop
        self._random = random
        self._config = config
        self._stepped_ms = 0
        self._skew_ms = random.randint(-config.wall_skew_ms_max, config.wall_skew_ms_max)
        self._stands_since: float | None = None
        self._hidden_s = 0.0
        self._boots = 0
        self.boot()

    def boot(self) -> None:
        """Restart the clock."""
        self._boots += 1
        self.boot_id = f"boot{self._boots}"
        self.resume()
        self._booted = self._seen() - self._random.uniform(1, 100)
        self._rate = 1 + self._random.uniform(-self._config.drift_max, self._config.drift_max)

    def now(self) -> float:
        if self._stands_since is None:  # by far the most frequent call of a run
            return (self._loop.now - self._hidden_s - self._booted) * self._rate
        return (self._seen() - self._booted) * self._rate

    def wall_ms(self) -> int:
        return EPOCH_MS + self._skew_ms + int(self._seen() * 1000)

    def stand_still(self) -> None:
        """Stop the clock until `resume`, as the clock of a machine that moves to another host may stop."""
        if self._stands_since is None:
            self._stands_since = self._loop.time()

    def resume(self) -> None:
        if self._stands_since is not None:
            self._hidden_s += self._loop.time() - self._stands_since
            self._stands_since = None

    def _seen(self) -> float:
        now = self._loop.time() if self._stands_since is None else self._stands_since
        return now - self._hidden_s

    def step_wall(self, ms: int) -> None:
        """Set the date forward or, if `ms` is negative, back."""
        self._skew_ms += ms
        self._stepped_ms += ms

    def set_right(self) -> None:
        """Undo all steps."""
        self.step_wall(-self._stepped_ms)

    @property
    def is_stepped(self) -> bool:
        return self._stepped_ms != 0


class SimNode:
    """A machine: a name, a clock and a disk that persist, and processes that come and go, one at a time."""

    def __init__(self, world: SimWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.clock = SimClock(world.loop, world.fork(f"clock/{name}"), world.clock_config)
        self.disk = SimDisk(world.fork(f"disk/{name}"), world.disk_config, name=name, trace=world.trace)
        self.incarnation = 0
        self.process: Process | None = None
        self.death: SimDeathWatch
        """The death watch of the process that runs, or ran last."""
        self.liveness: SimLiveness
        """The liveness of the process that runs, or ran last."""
        self._env: Env | None = None
        self._main: Main | None = None
        self._task: asyncio.Task[None] | None = None
        """Kept because an event loop holds tasks weakly."""

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.alive

    @property
    def env(self) -> Env:
        """The ports of the running process. A process without a main is started if there is none."""
        if not self.is_running:
            self._boot()
        assert self._env is not None
        return self._env

    def start(self, main: Main) -> None:
        """Run `main` in a new process. When it returns or raises, the process ends with everything that it started."""
        assert not self.is_running, f"{self.name} is running"
        self._main = main
        env = self._boot()
        self.world.trace.event(self.name, "start", self.incarnation)
        assert self.process is not None
        process = self.process
        work = self._live(process, main, env)
        self._task = self.world.loop.create_task(work, name=self.name, context=process.context.copy())

    def restart(self) -> None:
        """Restart the same main. If it still runs, crash it first."""
        assert self._main is not None, f"{self.name} was never started"
        self.crash()
        self.start(self._main)

    def crash(self, *, power: bool = False, silent: bool = False) -> None:
        """End the process at once: kill -9, or with `power` a power cut, which loses unsynced data. Peers see a
        reset, or with `silent` nothing until the next start. Does nothing if no process runs."""
        if self.is_running:
            assert self.process is not None
            self.world.trace.event(self.name, "crash", power, silent)
            self._end(self.process, silent=silent)
            if not (power or silent):
                self.death.publish()
        if power:
            self.disk.power_cut()
            self.clock.boot()

    def pause(self, *, hidden: bool = False) -> None:
        """Stop the process as SIGSTOP does. Its kernel continues: connections stay open and bytes wait. With
        `hidden`, the machine's clocks stop too, as those of a guest that moves to another host may."""
        assert self.process is not None
        self.world.trace.event(self.name, "pause", hidden)
        if hidden:
            self.clock.stand_still()
        self.world.loop.pause(self.process)

    def block(self) -> None:
        """Block the event loop of the process until `resume`. Its other threads continue and keep its session alive."""
        assert self.process is not None
        self.world.trace.event(self.name, "block")
        self.process.blocked = True
        self.world.loop.pause(self.process)
        self.liveness.look()

    def hang(self, path: str) -> None:
        """Let no sync of files in the directory end until `self.disk.thaw()`. An empty path hangs the whole disk."""
        self.disk.hang(path)
        if self.is_running:
            self.liveness.look()

    def resume(self) -> None:
        """Resume the process as SIGCONT does."""
        assert self.process is not None
        self.world.trace.event(self.name, "resume")
        self.clock.resume()
        self.world.loop.resume(self.process)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` as a task of this node and return its result. Raises NodeCrashed if the node dies before."""
        self.env  # noqa: B018 - starts a process if there is none
        assert self.process is not None
        loop, process = self.world.loop, self.process
        answer: asyncio.Future[T] = loop.create_future()
        task = loop.create_task(work, name=f"{self.name}/call", context=process.context.copy())

        def pass_on(task: asyncio.Task[T]) -> None:
            if not answer.done():
                if task.cancelled():
                    answer.cancel()
                elif (error := task.exception()) is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(task.result())

        def give_up() -> None:
            if not answer.done():
                answer.set_exception(NodeCrashed(self.name))

        task.add_done_callback(pass_on)
        process.on_death.append(give_up)
        try:
            return await answer
        finally:
            process.on_death.remove(give_up)
            if process.alive:
                task.cancel()

    def on_death(self, callback: Callable[[], object]) -> None:
        """Call back, outside of all nodes, when the current process has ended."""
        self.env  # noqa: B018
        assert self.process is not None
        self.process.on_death.append(callback)

    def _boot(self) -> Env:
        world = self.world
        self.incarnation += 1
        self.process = process = world.loop.process(self.name)
        world.network.host_up(self.name)

        def fatal(message: str) -> NoReturn:
            world.fatal(self, process, message)

        random = world.fork(f"death/{self.name}/{self.incarnation}")
        self.death = SimDeathWatch(world.loop, world.network, self.name, random)
        self.liveness = SimLiveness(world.loop, process, self.disk)
        if self.disk.is_hung(""):
            self.liveness.look()
        self._env = Env(
            clock=self.clock,
            random=world.fork(f"{self.name}/{self.incarnation}"),
            transport=SimTransport(world.network, process),
            disk=self.disk,
            nursery=TaskNursery(self.name, on_error=world.task_failed, context=process.context),
            fatal=fatal,
            starved=self._starved(),
            liveness=self.liveness,
            death=self.death,
        )
        return self._env

    def _starved(self) -> Callable[[], float]:
        """Return the starvation source of a process: it is starved never, a part of the time, or always."""
        share = self.world.fork(f"starved/{self.name}/{self.incarnation}").choice([0.0, 0.15, 1.0])
        return lambda: share

    async def _live(self, process: Process, main: Main, env: Env) -> None:
        try:
            await main(env)
        except Exception as error:  # noqa: BLE001 - the root of the process: recorded, and fails the run
            self.world.task_failed(self.name, error)
        self.world.trace.event(self.name, "exit")
        self._end(process, silent=False)
        self.death.publish()

    def _end(self, process: Process, *, silent: bool) -> None:
        self.world.loop.kill(process)
        self.clock.resume()
        self.world.network.process_died(process, silent=silent)
        self.disk.kill()


class SimWorld:
    """Owns the seed, the loop, the network and the nodes. TRACE=1 in the environment prints every event."""

    def __init__(
        self,
        seed: int,
        *,
        network: NetworkConfig | None = None,
        disk: DiskConfig | None = None,
        clock: ClockConfig | None = None,
        text: TextIO | None = None,
    ) -> None:
        self.seed = seed
        self.replay = f"make sim SEED={seed}"
        """The command that a failure names."""
        self.disk_config = disk or DiskConfig()
        self.clock_config = clock or ClockConfig()
        self.loop = SimLoop(self.fork("loop"))
        text = text or (sys.stderr if os.environ.get("TRACE") else None)
        self.trace = Trace(self.loop.time, text, order=lambda: self.loop.order)
        self.network = SimNetwork(self.loop, self.fork, self.trace, network)
        self.random = self.fork("test")
        self.fatals: list[tuple[str, str]] = []
        """(node, message) of each process that has ended itself."""
        self.errors: list[tuple[str, BaseException]] = []
        """(task, error) of errors that left tasks. They fail the run at its end unless the test removes them."""
        self._nodes: dict[str, SimNode] = {}
        self._time_up = False

    def fork(self, name: str) -> Random:
        """Return a separate generator for `name`, so that a draw in one place changes nothing in another."""
        return Random(f"{self.seed}/{name}")

    def node(self, name: str) -> SimNode:
        """Return the node of this name; created at the first call."""
        if name not in self._nodes:
            self._nodes[name] = SimNode(self, name)
        return self._nodes[name]

    def env(self, name: str) -> Env:
        """Return the ports of the process that runs on the node now."""
        return self.node(name).env

    @property
    def nodes(self) -> list[SimNode]:
        """All nodes, in the order in which they were first named."""
        return list(self._nodes.values())

    def power_cut(self) -> None:
        """Cut the power of all nodes at once."""
        for node in self.nodes:
            node.crash(power=True)

    def run(self, work: Coroutine[Any, Any, T], *, limit_s: float = 600.0) -> T:
        """Run the test's own coroutine to its end. Raises TimeUp after `limit_s` virtual seconds, and
        SimulationFailed if an error left a callback or a task that no code awaits."""
        self._time_up = False
        self.loop.now_max = self.loop.time() + limit_s
        self.loop.on_time_up = self._end_of_time
        collecting = gc.isenabled()
        gc.disable()  # finalizers would run at moments that no seed determines
        try:
            result = self.loop.run_until_complete(work)
            self.check()
        except RuntimeError as error:
            problem = self._time_is_up(limit_s) if self._time_up else error
            self._note(problem)
            raise problem from None
        except BaseException as error:
            self._note(error)
            raise
        finally:
            if collecting:
                gc.enable()
        return result

    def check(self) -> None:
        """Raise SimulationFailed if an error left a callback or a task since the last check."""
        problems = [*self.errors, *((where, error or message) for where, message, error in self.loop.errors)]
        self.errors.clear()
        self.loop.errors.clear()
        if problems:
            first = problems[0][1]
            raise SimulationFailed(problems) from (first if isinstance(first, BaseException) else None)

    def fatal(self, node: SimNode, process: Process, message: str) -> NoReturn:
        """Record that a process has ended itself."""
        self.fatals.append((node.name, message))
        self.trace.event(node.name, "fatal", message)
        if process.alive:
            node.crash()
        raise ProcessDied(message)

    def task_failed(self, name: str, error: BaseException) -> None:
        if not isinstance(error, ProcessDied):
            self.errors.append((name, error))

    def close(self) -> None:
        """End everything; nothing of the world runs afterwards."""
        for node in self.nodes:
            if node.process is not None:
                self.loop.kill(node.process)
        self.loop.close()

    def __enter__(self) -> SimWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_of_time(self) -> None:
        self._time_up = True
        self.loop.stop()

    def _time_is_up(self, limit_s: float) -> TimeUp:
        return TimeUp(f"not over after {limit_s} virtual seconds; waiting:\n{self.loop.describe()}")

    def _note(self, error: BaseException) -> None:
        error.add_note(f"seed {self.seed} at {self.loop.time():.6f} s: {self.replay}")

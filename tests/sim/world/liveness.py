"""The watchdog of a simulated process: the real judge (kvstore.env.liveness.evidence) beside the loop.

It ticks only from a fault until the evidence is back, so that runs without such faults schedule nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING

from kvstore.env.liveness.evidence import LOOP, TICK_S, Evidence, Sign
from kvstore.env.liveness.port import GiveUp, Hung, Liveness
from tests.sim.judges.probes import declare, probe
from tests.sim.world.loop import Process, SimLoop

if TYPE_CHECKING:
    from tests.sim.world.disk import SimDisk

declare("liveness.failed", "liveness.back", "liveness.directory_given_up")


class SimLiveness(Liveness):
    """The watchdog of one process, outside of its event loop."""

    def __init__(self, loop: SimLoop, process: Process, disk: SimDisk) -> None:
        self._loop, self._process, self._disk = loop, process, disk
        self._evidence = Evidence()
        self._evidence.watch_loop()
        self._paths: dict[str, Hung | None] = {}
        self._sessions: list[GiveUp] = []
        self._has_beaten = True
        self._is_ticking = False

    @property
    def failure(self) -> str:
        return self._evidence.failure

    def watch_disk(self, path: str, on_hung: Hung | None = None) -> None:
        self._paths[path] = on_hung
        self._evidence.watch_disk(path, is_spare=on_hung is not None)

    def add_session(self, give_up: GiveUp) -> Callable[[], None]:
        self._sessions.append(give_up)
        return lambda: self._sessions.remove(give_up)

    def look(self) -> None:
        """Tick from now on, because something may hang."""
        if not self._is_ticking:
            self._is_ticking = True
            self._later()

    def _later(self) -> None:
        self._has_beaten = False
        self._loop.call_soon(self._beat, context=self._process.context.copy())
        self._loop.call_at(self._loop.time() + TICK_S, self._tick, context=Context())

    def _beat(self) -> None:
        self._has_beaten = True

    def _tick(self) -> None:
        if not self._process.alive:
            return
        if not self._process.paused or self._process.blocked:  # otherwise the watchdog is stopped, too
            before = self.failure
            signs = {path: Sign(not self._disk.is_hung(path)) for path in self._paths}
            for path in self._evidence.tick(TICK_S, signs | {LOOP: Sign(self._has_beaten)}):
                self._give_up_directory(path)
            if self.failure and not before:
                probe("liveness.failed")
            elif before and not self.failure:
                probe("liveness.back")
            if self.failure:
                for give_up in list(self._sessions):
                    give_up()
        if self.failure or self._process.blocked or any(map(self._disk.is_hung, self._paths)):
            self._later()
        else:
            self._is_ticking = False

    def _give_up_directory(self, path: str) -> None:
        probe("liveness.directory_given_up")
        on_hung = self._paths.pop(path)
        assert on_hung is not None, "only spare directories are abandoned"
        self._loop.call_soon(on_hung, "its disk hangs", context=self._process.context.copy())

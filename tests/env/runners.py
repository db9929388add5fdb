"""Ways to run a coroutine function: on the real loops and in the simulation. One contract, every driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from tests.sim.world.env import SimWorld

Work = Callable[[], Coroutine[Any, Any, None]]


def on_asyncio(work: Work) -> None:
    asyncio.run(work())


def on_uvloop(work: Work) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


def on_simulation(work: Work) -> None:
    with SimWorld(1) as world:
        world.run(work())
        assert world.errors == []


LOOPS = {"asyncio": on_asyncio, "uvloop": on_uvloop, "simulation": on_simulation}

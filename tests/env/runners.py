"""Ways to run a coroutine function: on the real loops and in the simulation. One contract, every driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from typing import Any

import pytest
import uvloop

from tests.sim.world.env import SimWorld

DEADLINE_S = 60
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


def on_both(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on asyncio's loop and on uvloop, on each for at most DEADLINE_S seconds."""

    @wraps(test)
    async def bounded(**fixtures: Any) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test(**fixtures)

    return run_by([on_asyncio, on_uvloop])(bounded)


def run_by(
    runners: Iterable[Callable[[Any], None]], given: str = ""
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Let each of the runners run a test. `given`: the parameter of the test that its runner passes."""

    def decorated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @wraps(test)
        def ran(run: Callable[[Any], None], **fixtures: Any) -> None:
            run(partial(test, **fixtures))

        own = [each for each in signature(test).parameters.values() if each.name != given]
        vars(ran)["__signature__"] = Signature([Parameter("run", Parameter.POSITIONAL_OR_KEYWORD), *own])
        return pytest.mark.parametrize("run", runners)(ran)

    return decorated

"""Catching up with the log is fast although a bookie is dead. A candidate does it while all clients wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.errors import BookieError
from kvstore.types import BookieId
from kvstore.wal.ports import ReadAnswer
from tests.sim.ledgers_and_logs.bench import B2, Bench, run
from tests.sim.ledgers_and_logs.logs import NEVER, Writer, numbers, opened, read_all

pytestmark = pytest.mark.sim

ENTRIES = 400


def test_only_first_of_many_entries_wait_for_silent_bookie() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        await writer.append(ENTRIES, gap_s=0.001)
        read = bench.bookies.read

        async def read_but_of(bookie: BookieId, *args: Any, **more: Any) -> ReadAnswer:
            if bookie == B2:
                await asyncio.sleep(2)
                raise BookieError(f"{bookie} does not answer")
            return await read(bookie, *args, **more)

        bench.bookies.read = read_but_of  # type: ignore[method-assign]
        began = bench.env.clock.now()
        assert await read_all(bench.logs(), ENTRIES) == numbers(1, ENTRIES)
        assert bench.env.clock.now() - began < 0.5, "batches of eight that each wait for the silent bookie take 2.5 s"

    run(case)

"""The last readable entry of an open ledger, with as many bookies as necessary (docs/protocol.md L7)."""

from __future__ import annotations

from itertools import combinations
from typing import Any, cast

import pytest

from kvstore.errors import BookieError
from kvstore.types import BookieId, EntryId
from kvstore.wal.coverage import is_covered
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.seek import Seeker
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, LEDGER, NAMES, Bench, appended, run

pytestmark = pytest.mark.sim


@pytest.mark.parametrize(("size", "write", "ack"), [(3, 3, 2), (4, 2, 2), (5, 3, 2), (6, 3, 2)], ids=str)
def test_end_is_found_exactly_when_every_write_set_is_covered(size: int, write: int, ack: int) -> None:
    async def case(bench: Bench) -> None:
        metadata = await bench.ledger(*NAMES[:size], write=write, ack=ack)
        await appended(bench, bench.handle(metadata), 10)
        seeker = Seeker(bench.ports, cast(Any, None), bench.env.nursery)
        for away in (some for count in range(size) for some in combinations(range(size), count)):
            names = [NAMES[place] for place in away]
            _set_down(bench, names, is_down=True)
            reader = EntryReader(metadata, bench.bookies, bench.env.nursery)
            if is_covered({*range(size)}.difference(away), metadata.quorum):
                last = await seeker._confirmed(reader)
                assert (last, (await reader.read(last)).payload) == (9, b"entry 9"), names
            else:
                with pytest.raises(BookieError, match="too few bookies report"):
                    await seeker._confirmed(reader)
            _set_down(bench, names, is_down=False)

    run(case, bookies=size)


# docs/protocol.md L7, B7
def test_end_for_good_ignores_a_bookie_that_may_lack_entries() -> None:
    async def case(bench: Bench) -> None:
        metadata = await bench.ledger()
        handle = bench.handle(metadata)
        bench.bookies.at[B2].holds_adds = True
        await appended(bench, handle, 10)
        del handle
        for entry in range(5, 10):  # B1 was set back to a copy, B2 never had any, B3 is away
            del bench.bookies.at[B1].entries[LEDGER, EntryId(entry)]
        bench.bookies.at[B1].lacs[LEDGER] = EntryId(3)
        bench.bookies.at[B1].is_in_limbo = bench.bookies.at[B3].is_down = True
        seeker = Seeker(bench.ports, cast(Any, None), bench.env.nursery)
        reader = EntryReader(metadata, bench.bookies, bench.env.nursery)
        assert await seeker._confirmed(reader) == 3
        with pytest.raises(BookieError, match="too few bookies report"):
            await seeker._confirmed(reader, for_good=True)
        bench.bookies.at[B3].is_down = False
        assert await seeker._confirmed(reader, for_good=True) == 9

    run(case)


def _set_down(bench: Bench, names: list[BookieId], *, is_down: bool) -> None:
    for name in names:
        bench.bookies.at[name].is_down = is_down

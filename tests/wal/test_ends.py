"""The last entry of an open ledger that may be read, by as many of its bookies as it takes (docs/protocol.md L7)."""

from __future__ import annotations

from itertools import combinations
from typing import Any, cast

import pytest

from kvstore.errors import BookieError
from kvstore.types import BookieId
from kvstore.wal.coverage import is_covered
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.seek import Seeker
from tests.sim.ledgers_and_logs.bench import NAMES, Bench, appended, run

pytestmark = pytest.mark.sim


@pytest.mark.parametrize(("size", "write", "ack"), [(3, 3, 2), (4, 2, 2), (5, 3, 2), (6, 3, 2)], ids=str)
def test_the_end_is_told_while_every_write_set_is_covered_and_not_else(size: int, write: int, ack: int) -> None:
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
                with pytest.raises(BookieError, match="too few bookies tell"):
                    await seeker._confirmed(reader)
            _set_down(bench, names, is_down=False)

    run(case, bookies=size)


def _set_down(bench: Bench, names: list[BookieId], *, is_down: bool) -> None:
    for name in names:
        bench.bookies.at[name].is_down = is_down

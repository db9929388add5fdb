"""Every caller that waits for a ledger's entries is notified of each entry, even if another caller's callback fails."""

import pytest

from kvstore.errors import OutcomeUnknown, StoreError
from kvstore.types import Position
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, Appended, Bench, run

pytestmark = pytest.mark.sim


def test_error_of_one_waiting_caller_does_not_affect_later_ones() -> None:
    """Entries that are confirmed together, and entries of a lost ledger: each caller is notified of its own entry."""

    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        entries = Appended()

        def fails(position: Position | None, sent_at: float, error: StoreError | None) -> None:
            raise ZeroDivisionError

        bench.store.freeze()
        bench.bookies.stop(B3)
        for done in (fails, entries.done, entries.done):
            handle.append(b"a", done)
        await bench.pass_time()
        assert entries.confirmed == []
        bench.store.thaw()
        await bench.pass_time()
        assert [position.entry for position in entries.confirmed] == [1, 2]
        handle.append(b"b", entries.done)
        await bench.pass_time()
        assert [position.entry for position in entries.confirmed] == [1, 2, 3]
        bench.bookies.stop(B1, B2)
        for done in (fails, entries.done):
            handle.append(b"c", done)
        handle.stop(OutcomeUnknown("stopped"))
        assert len(entries.errors) == len(bench.halted) == 1
        assert [type(error) for _, _, error in bench.world.loop.errors] == [ZeroDivisionError] * 2
        bench.world.loop.errors.clear()

    run(case, bookies=4)

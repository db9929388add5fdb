"""Whose ledgers are, as a node's leaders remember it."""

import pytest

from kvstore.types import LedgerId, LedgerMetadata, PartitionId, Seq
from kvstore.wal.leading import owners as owners_module
from kvstore.wal.leading.owners import Owners
from tests.sim.ledgers_and_logs.bench import Bench, run
from tests.sim.ledgers_and_logs.logs import SMALL

P, Q = PartitionId("p"), PartitionId("q")
ONE, TWO, THREE = (LedgerId(number) for number in (1, 2, 3))


def test_owners_report_a_foreign_ledger_only_if_known() -> None:
    owners = Owners()
    owners.note(ONE, P)
    owners.note(TWO, None)
    assert [owners.is_anothers(each, P) for each in (ONE, TWO, THREE)] == [False, True, False]
    assert [owners.is_anothers(each, Q) for each in (ONE, TWO, THREE)] == [True, True, False]


def test_owners_forget_gone_ledgers_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners_module, "OWNERS_MAX", 2)
    owners = Owners()
    for ledger in (ONE, TWO, THREE):
        owners.note(ledger, Q)
    assert not owners.is_anothers(THREE, P), "there was no room for it"
    owners.keep({TWO, THREE})
    owners.note(THREE, Q)
    assert [owners.is_anothers(each, P) for each in (ONE, TWO, THREE)] == [False, True, True]


@pytest.mark.sim
def test_leaders_of_one_node_read_the_owner_of_a_ledger_once() -> None:
    async def case(bench: Bench) -> None:
        others = [
            (await bench.logs()._creator.create(PartitionId(f"other-{number}"), after=LedgerId(-1))).ledger
            for number in range(20)
        ]
        logs = bench.logs(SMALL)
        for name in ("p1", "p2", "p3"):
            await logs.open_as_leader(PartitionId(name), 0, lambda: Seq(1))
        read, asked = logs._ledgers.read, []

        async def counted(ledger: LedgerId) -> tuple[LedgerMetadata, int]:
            asked.append(ledger)
            return await read(ledger)

        logs._ledgers.read = counted  # type: ignore[method-assign]
        await bench.pass_time(35)  # several sweeps of each
        assert sorted(set(others).intersection(asked)) == sorted(each for each in asked if each in others) == others

    run(case)

"""The bookies that the auditor considers lost, and the ledgers that it then marks (docs/protocol.md, A4, A5, A6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.autorecovery import auditor as auditors
from kvstore.autorecovery.auditor_role import AuditorRole
from kvstore.errors import MetadataUnavailable
from kvstore.meta import paths
from kvstore.meta.auditor_votes import auditor_or_none
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.memory import MemoryStore
from kvstore.types import BookieId, LedgerId
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, B4, B5
from tests.sim.recovering.audits import AuditBench, later, run

pytestmark = pytest.mark.sim


async def three_ledgers(bench: AuditBench) -> None:
    await bench.ledger(7, B1, B2, B3, entries=5)
    await bench.ledger(8, B2, B3, B4)
    await bench.ledger(2**40, B1, B2, B4, entries=1)


def test_every_ledger_of_absent_bookie_is_marked_after_delay() -> None:
    async def case(bench: AuditBench) -> None:
        await three_ledgers(bench)
        candidate = bench.candidate("n1")
        await later(5)
        assert await bench.settings.lost_bookie_delay_s() == 60, "for Apache's tools too"
        await bench.stop(B4)
        await later(59)
        assert await bench.marked() == {}
        await later(2)
        assert await bench.marked() == {8: [B4], 2**40: [B4]}
        assert candidate.numbers["bookies_lost"] == 1
        assert candidate.numbers["marked_lost_total"] == 2

    run(case)


def test_bookie_that_returns_in_time_has_nothing_marked() -> None:
    async def case(bench: AuditBench) -> None:
        await three_ledgers(bench)
        bench.candidate("n1")
        await later(5)
        for _ in range(3):
            await bench.stop(B4)
            await later(59)
            await bench.start(B4)
            await later(1)
        await later(600)
        assert await bench.marked() == {}

    run(case)


def test_restarting_all_bookies_one_by_one_marks_nothing() -> None:
    async def case(bench: AuditBench) -> None:
        await three_ledgers(bench)
        bench.candidate("n1")
        await later(5)
        for bookie in bench.names:
            await bench.stop(bookie)
            await later(30)
            await bench.start(bookie)
        for pair in ((B1, B2), (B3, B4)):
            await bench.stop(*pair)
            await later(50)
            await bench.start(*pair)
        await later(7_200)
        assert await bench.marked() == {}

    run(case)


def test_two_absent_bookies_wait_as_long_as_one() -> None:
    async def case(bench: AuditBench) -> None:
        await three_ledgers(bench)
        bench.candidate("n1")
        await later(5)
        await bench.stop(B3, B4)
        await later(58)
        assert await bench.marked() == {}
        await later(3)
        assert await bench.marked() == {7: [B3], 8: [B3, B4], 2**40: [B4]}

    run(case)


def test_read_only_bookie_counts_as_present() -> None:
    async def case(bench: AuditBench) -> None:
        await three_ledgers(bench)
        bench.candidate("n1")
        await bench.stop(B4)
        await bench.start(B4, readonly=True)
        await later(600)
        assert await bench.marked() == {}

    run(case)


@pytest.mark.parametrize("by_cookie", [True, False])
def test_auditor_started_after_death_knows_of_dead_bookie(by_cookie: bool) -> None:
    async def case(bench: AuditBench) -> None:
        await three_ledgers(bench)
        await bench.stop(B4)
        if not by_cookie:
            await CookieStore(bench.store).delete(B4, 0)
        bench.candidate("n1")
        await later(75)
        assert await bench.marked() == {8: [B4], 2**40: [B4]}

    run(case)


def test_delay_can_be_changed_at_any_time() -> None:
    async def case(bench: AuditBench) -> None:
        await three_ledgers(bench)
        bench.candidate("n1")
        await later(5)
        await bench.settings.set_lost_bookie_delay_s(1_000)
        await bench.stop(B4)
        await later(900)
        assert await bench.marked() == {}
        await bench.settings.set_lost_bookie_delay_s(0)
        await later(1)
        assert sorted(await bench.marked()) == [8, 2**40]

    run(case)


def test_nothing_is_marked_while_autorecovery_is_off_nor_when_it_resumes() -> None:
    async def case(bench: AuditBench) -> None:
        await three_ledgers(bench)
        candidate = bench.candidate("n1")
        await later(5)
        await bench.stop(B4)
        await later(30)
        await bench.settings.disable()
        await later(600)
        assert (await bench.marked(), candidate.numbers["enabled"]) == ({}, 0)
        await bench.settings.enable()
        await later(55)
        assert await bench.marked() == {}
        await later(20)
        assert sorted(await bench.marked()) == [8, 2**40]

    run(case)


def test_nothing_is_marked_while_no_bookie_is_registered() -> None:
    async def case(bench: AuditBench) -> None:
        await three_ledgers(bench)
        bench.candidate("n1")
        await later(5)
        await bench.stop(*bench.names)
        await later(600)
        assert await bench.marked() == {}

    run(case)


def test_next_candidate_continues_where_auditor_died() -> None:
    async def case(bench: AuditBench) -> None:
        await three_ledgers(bench)
        first = bench.candidate("n1")
        await later(1)
        second = bench.candidate("n2")
        await later(5)
        assert (first.numbers["active"], second.numbers["active"]) == (1, 0)
        await bench.stop(B4)
        await later(30)
        first.store.suspend()  # killed: it does nothing more, and its session ends a little later
        await later(5)
        bench.tree.end_session(first.store._session)
        await later(58)
        assert await bench.marked() == {}, "the next auditor has not observed the absence for long enough"
        await later(15)
        assert sorted(await bench.marked()) == [8, 2**40]
        assert await auditor_or_none(bench.store) == "n2"
        assert second.numbers["marked_lost_total"] == 2

    run(case)


def test_time_that_auditor_could_not_observe_does_not_count() -> None:
    async def case(bench: AuditBench) -> None:
        await three_ledgers(bench)
        only = bench.candidate("n1")
        await bench.stop(B4)
        await later(40)
        only.store.suspend()
        await later(30)
        only.store.resume()
        await later(55)
        assert await bench.marked() == {}
        await later(20)
        assert sorted(await bench.marked()) == [8, 2**40]

    run(case)


def test_stopped_auditor_resigns_at_once() -> None:
    async def case(bench: AuditBench) -> None:
        first = bench.candidate("n1")
        await later(1)
        second = bench.candidate("n2")
        await later(5)
        await first.auditor.close()
        await later(1)
        assert second.numbers["active"] == 1

    run(case)


def test_auditor_stops_marking_when_its_session_ends() -> None:
    async def case(bench: AuditBench) -> None:
        for number in range(200):
            await bench.ledger(number, B2, B3, B4, entries=1)
        first = bench.candidate("n1")
        await later(5)
        await bench.stop(B4)
        created: list[str] = []

        def changed(path: str, old: bytes | None, new: bytes | None) -> None:
            if paths.marked_of(path) is not None and old is None:
                created.append(path)
                if len(created) == 50:
                    first.store.expire()
                    first.store.resume()

        bench.tree.observers.append(changed)
        later_store = MemoryStore(bench.tree)
        await later_store.create(paths.join(paths.AUDITOR_VOTES, "V_"), b"", ephemeral=True, sequential=True)
        await later(70)
        assert len(created) < 50 + auditors.MARKS_AT_ONCE, "only marks in flight are added"
        assert first.numbers["active"] == 0

    run(case)


def test_mark_removed_while_its_bookie_is_lost_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditors, "AUDIT_AGAIN_S", 100.0)

    async def case(bench: AuditBench) -> None:
        await bench.ledger(7, B1, B2, B4, entries=1)
        bench.candidate("n1")
        await bench.stop(B4)
        await later(75)
        assert await bench.marked() == {7: [B4]}
        _, stat = await bench.store.get(paths.mark(7))  # type: ignore[arg-type]
        await bench.store.delete(paths.mark(7), stat.version)  # type: ignore[arg-type]
        await later(50)
        assert await bench.marked() == {}
        await later(100)
        assert await bench.marked() == {7: [B4]}

    run(case)


def test_bookie_that_returns_during_marking_has_no_more_ledgers_marked() -> None:
    async def case(bench: AuditBench) -> None:
        for number in range(3_000):
            await bench.ledger(number, B2, B3, B4, entries=1)
        bench.candidate("n1")
        await later(20)
        await bench.stop(B4)
        await later(61)
        await bench.start(B4)
        await later(60)
        assert 0 < len(await bench.marked()) < 2_000

    run(case)


def test_bookie_that_returns_only_briefly_during_marking_has_all_marked() -> None:
    """Ledgers that the traversal passed at that moment are visited again as soon as the bookie is lost again."""

    async def case(bench: AuditBench) -> None:
        for number in range(3_000):
            await bench.ledger(number, B3, B4, B5)
        bench.candidate("n1")
        await bench.settings.set_lost_bookie_delay_s(2)
        await later(20)
        await bench.stop(B4, B5)
        await later(6)
        await bench.start(B4)
        await later(2)
        await bench.stop(B4)
        await later(3)
        first = await bench.marked()
        assert first[0] == [B4, B5]
        assert [B5] in first.values(), "the bookie was registered"
        assert len(first) < 3_000, "the bookie is lost again before the traversal ends"
        await later(60)
        assert await bench.marked() == {number: [B4, B5] for number in range(3_000)}

    run(case, bookies=5)


def test_one_audit_marks_all_and_is_not_repeated() -> None:
    async def case(bench: AuditBench) -> None:
        for number in range(3_000):
            await bench.ledger(number, B2, B3, B4, entries=1)
        candidate = bench.candidate("n1")
        await later(20)
        await bench.stop(B4)
        reads = 0
        read = candidate.store.get

        async def counted(path: str) -> object:
            nonlocal reads
            reads += paths.ledger_of(path) is not None
            return await read(path)

        candidate.store.get = counted  # type: ignore[method-assign,assignment]
        await later(120)
        assert len(await bench.marked()) == 3_000
        assert reads <= 2 * 3_000, "one read to audit each ledger, one to mark it"

    run(case)


def test_slow_answer_does_not_prolong_absence_of_bookie() -> None:
    async def case(bench: AuditBench) -> None:
        await three_ledgers(bench)
        candidate = bench.candidate("n1")
        await later(5)
        children, waits = candidate.store.children, asyncio.Event()

        async def slow_once(path: str) -> list[str]:
            if path == paths.COOKIES and not waits.is_set():
                waits.set()
                await later(25)
            return await children(path)

        candidate.store.children = slow_once  # type: ignore[method-assign]
        await waits.wait()
        await later(23)
        await bench.stop(B4)
        await later(57)
        assert await bench.marked() == {}
        await later(20)
        assert sorted(await bench.marked()) == [8, 2**40]

    run(case)


def test_very_many_ledgers_are_marked_in_batches_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marking a hundred thousand ledgers one by one takes an hour, because each waits for the metadata store seven
    times."""
    count, in_flight, most, at = 60, 0, 0, list[float]()
    mark = AuditorRole.mark

    async def marked(role: AuditorRole, *arguments: Any) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.01)
        await mark(role, *arguments)
        at.append(asyncio.get_running_loop().time())
        in_flight -= 1

    monkeypatch.setattr(AuditorRole, "mark", marked)

    async def case(bench: AuditBench) -> None:
        for number in range(count):
            await bench.ledger(100 + number, B1, B2, B3)
        bench.candidate("n1")
        await later(5)
        await bench.stop(B3)
        await later(70)
        assert await bench.marked() == {100 + number: [B3] for number in range(count)}

    run(case)
    assert most == auditors.MARKS_AT_ONCE
    assert at[-1] - at[0] >= (count - 2 * auditors.MARKS_AT_ONCE) / auditors.MARKS_PER_S


def test_failed_mark_is_made_by_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[LedgerId] = []
    mark = AuditorRole.mark

    async def marked(role: AuditorRole, ledger: LedgerId, missing: list[BookieId], why: str) -> None:
        if ledger == 8 and not failed:
            failed.append(ledger)
            raise MetadataUnavailable("for once")
        await mark(role, ledger, missing, why)

    monkeypatch.setattr(AuditorRole, "mark", marked)

    async def case(bench: AuditBench) -> None:
        await three_ledgers(bench)
        bench.candidate("n1")
        await later(5)
        await bench.stop(B4)
        await later(70)
        assert failed == [8]
        assert await bench.marked() == {8: [B4], 2**40: [B4]}

    run(case)

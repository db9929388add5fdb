"""Lookups of names: bounded in time, threads and memory, with answers that are remembered for a while."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstore.env.dns import names
from kvstore.env.dns.names import FOUND_S, NAMES_MAX, STALE_S, THREADS_MAX, Names, NoAnswer
from kvstore.env.transport import TcpTransport
from tests.env.runners import on_asyncio, on_uvloop
from tests.env.test_transport import Recorder
from tests.waiting import PATIENCE_S, wait_until_blocking

V4, V6 = socket.AF_INET, socket.AF_INET6
ABSENT = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
AGAIN = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
SHORT_S = 0.1


class Service:
    """The system's lookup, scripted. A lookup that hangs ends when the service is released."""

    def __init__(self) -> None:
        self.answers: dict[Any, list[str] | OSError | None] = {V4: ["127.0.0.1"], V6: ABSENT}
        """None: the lookup hangs."""
        self.asked: Counter[str] = Counter()
        self.let_go = threading.Event()
        self.now = 100.0
        self.names = Names(self.lookup, lambda: self.now)

    def lookup(self, host: str, family: socket.AddressFamily) -> Sequence[str]:
        self.asked[host] += 1
        answer = self.answers[family]
        if answer is None:
            assert self.let_go.wait(PATIENCE_S)
            answer = ABSENT
        if isinstance(answer, OSError):
            raise answer
        return answer


class TickingService(Service):
    """Look up, and let time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Names(self.lookup)


@pytest.fixture
def service() -> Any:
    made = Service()
    yield made
    made.let_go.set()


@pytest.fixture
def ticking() -> Any:
    made = TickingService()
    yield made
    made.let_go.set()


def test_address_needs_no_lookup(service: Service) -> None:
    for address in ("10.0.0.1", "::1", "fe80::1%lo"):
        assert service.names.find(address) == (address,)
    assert not service.asked


def test_answer_is_used_for_a_while_and_then_looked_up_again(service: Service) -> None:
    assert service.names.find("n1") == ("127.0.0.1",)
    service.answers[V4] = ["127.0.0.2"]
    assert service.names.find("n1") == ("127.0.0.1",)
    assert service.asked["n1"] == 2
    service.now += FOUND_S
    assert service.names.find("n1") == ("127.0.0.2",)


def test_absence_is_returned_and_forgotten_soon(service: Service) -> None:
    service.answers[V4] = ABSENT
    for _ in range(3):
        with pytest.raises(socket.gaierror, match="n1: no such host"):
            service.names.find("n1")
    assert service.asked["n1"] == 2
    service.answers[V4] = ["127.0.0.1"]
    service.now += names.ABSENT_S
    assert service.names.find("n1") == ("127.0.0.1",)


def test_old_answer_is_used_while_the_name_service_fails(service: Service) -> None:
    service.names.find("n1")
    service.answers[V4] = service.answers[V6] = AGAIN
    service.now += FOUND_S
    assert service.names.find("n1") == ("127.0.0.1",)
    service.now += STALE_S
    with pytest.raises(NoAnswer, match=r"n1: expected its addresses from the name service, got: .*Temporary failure"):
        service.names.find("n1")


def test_old_answer_is_not_used_when_the_name_was_deleted(service: Service) -> None:
    service.names.find("n1")
    service.answers[V4] = ABSENT
    service.now += FOUND_S
    with pytest.raises(socket.gaierror, match="no such host"):
        service.names.find("n1")


def test_family_that_hangs_does_not_delay_the_other(ticking: TickingService) -> None:
    ticking.answers[V6] = None
    begun = time.monotonic()
    for _ in range(20):
        assert ticking.names.find("n1", PATIENCE_S) == ("127.0.0.1",)
    assert time.monotonic() - begun < PATIENCE_S / 2
    assert ticking.asked["n1"] == 2, "the hanging lookup is awaited, not repeated"


def test_lookup_that_hangs_ends_in_time_for_all_callers(ticking: TickingService) -> None:
    ticking.answers[V4] = ticking.answers[V6] = None

    async def both() -> None:
        with pytest.raises(NoAnswer, match=r"n1: expected its addresses from the name service within 0.1 s"):
            await ticking.names.find_soon("n1", SHORT_S)

    on_uvloop(both)
    with pytest.raises(NoAnswer, match=r"within 0\.1 s"):
        ticking.names.find("n1", SHORT_S)
    assert ticking.asked["n1"] == 2


def test_old_answer_is_used_soon_while_a_lookup_hangs(ticking: TickingService) -> None:
    ticking.names.find("n1")
    ticking.answers[V4] = ticking.answers[V6] = None
    for asked in ticking.names._names["n1"].families.values():
        asked.ended_at -= FOUND_S
    begun = time.monotonic()
    assert ticking.names.find("n1", PATIENCE_S) == ("127.0.0.1",)
    assert time.monotonic() - begun < PATIENCE_S / 2


def test_hanging_lookups_are_bounded(ticking: TickingService) -> None:
    ticking.answers[V4] = ticking.answers[V6] = None
    for number in range(THREADS_MAX):
        with pytest.raises(NoAnswer):
            ticking.names.find(f"n{number}", 0.01)
    assert sum(ticking.asked.values()) == THREADS_MAX
    with pytest.raises(NoAnswer, match="lookups of other names do not end"):
        ticking.names.find("another")
    assert ticking.asked["another"] == 0


def test_names_that_hang_repeatedly_leave_half_of_the_lookups_to_others() -> None:
    gates, ahead_s = [threading.Event()], [0.0]

    def lookup(host: str, family: socket.AddressFamily) -> Sequence[str]:
        if host.startswith("dead"):
            assert gates[-1].wait(PATIENCE_S)
            raise AGAIN
        return ["10.0.0.1"] if family is V4 else []

    def ask_the_dead() -> None:
        for number in range(THREADS_MAX // 2):
            with pytest.raises(NoAnswer):
                made.find(f"dead{number}", 0.01)

    made = Names(lookup, lambda: time.monotonic() + ahead_s[0])
    ask_the_dead()
    ahead_s[0] += names.LOOKUP_S
    gates[-1].set()
    wait_until_blocking(lambda: not made._running, what="the end of the lookups")
    gates.append(threading.Event())
    ahead_s[0] += names.ABSENT_S
    ask_the_dead()
    assert made.find("healthy") == ("10.0.0.1",)
    gates[-1].set()


def test_remembered_names_are_bounded(service: Service) -> None:
    for number in range(NAMES_MAX + 10):
        service.names.find(f"n{number}")
    assert len(service.names._names) == NAMES_MAX


def test_child_of_a_fork_looks_names_up_itself(ticking: TickingService) -> None:
    ticking.answers[V4] = ticking.answers[V6] = None
    with pytest.raises(NoAnswer):
        ticking.names.find("n1", 0.01)
    ticking.answers[V4] = ["127.0.0.1"]
    ticking.answers[V6] = ABSENT
    ticking.names.after_fork_in_child()
    assert ticking.names.find("n1") == ("127.0.0.1",)


@pytest.mark.parametrize("run", [on_asyncio, on_uvloop])
def test_failed_lookup_of_a_cancelled_caller_is_no_error_of_the_loop(
    run: Callable[[Any], None], ticking: TickingService, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop's own lookup left "Future exception was never retrieved" behind for each connection that was
    cancelled while its name was looked up."""
    ticking.answers[V4] = ticking.answers[V6] = None
    problems: list[Any] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SHORT_S):
                await TcpTransport(names=ticking.names).connect("n1:1", Recorder())
        ticking.let_go.set()
        with pytest.raises(socket.gaierror):
            await ticking.names.find_soon("n1", PATIENCE_S)
        gc.collect()

    with caplog.at_level(logging.ERROR):
        run(scenario)
    assert problems == []
    assert caplog.records == []

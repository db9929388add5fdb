"""Maintains the cluster time of this server. It samples the server's clocks, asks the other servers, and lets
clock_judge.py judge."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvstore.env import Clock, Env
from kvstore.errors import InvalidRequest, StoreError
from kvstore.ring.ring import Ring
from kvstore.server.clock.clock_judge import ANSWER_S, ClockJudge, PeerClock
from kvstore.server.clock.saved_date import SavedDate
from kvstore.server.listeners import Listeners
from kvstore.server.peer_calls import PeerCalls
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)

DATES = PartitionId("@dates")
"""The id under which servers ask each other for dates. No partition has this name."""
SAMPLE_S = 0.25
ASK_S = 1.0
ASK_UNKNOWN_S = 0.2
"""Interval of polling by a server without a date."""
CALL_S = 1.0
"""Timeout of a question. A slower answer says nothing about the date, because half of the duration is the possible
error."""
ASKED_MAX = 8
"""Maximum number of servers asked per round. In a larger cluster each round asks the next servers."""


class ClockReport(NamedTuple):
    """The state of the clocks that servers report to each other."""

    date_ms: int
    is_sure: bool
    doubt: str = ""
    drift_ms: float = 0.0
    """How far the wall clock is ahead of the date, in ms."""
    has_date: bool | None = None
    """True if elapsed time explains the date. None from a server of an earlier release, which does not report it."""
    behind_ms: float = 0.0
    """How far the wall clocks of a majority are ahead of the date, in ms."""


REPORTS_MORE = b"has_date"
"""The question of a server that understands the last fields. Earlier releases accept no longer array."""
decode = msgspec.msgpack.Decoder(ClockReport).decode
encode = msgspec.msgpack.Encoder().encode


class JudgedClock:
    """A Clock whose date is the cluster time."""

    def __init__(self, raw: Clock, server: ServerId, kept_ms: float | None = None) -> None:
        """`kept_ms` is the offset of the date that the previous process used. It is None if the machine has rebooted
        since."""
        self.now, self.wall_ms, self.boot_id = raw.now, raw.wall_ms, raw.boot_id
        self.judge = ClockJudge(server, raw.now(), raw.wall_ms(), kept_ms)
        self.servers: Callable[[], frozenset[ServerId]] = frozenset
        """Returns the servers of the ring, once there is a ring."""
        self._listeners = Listeners()

    def date_ms(self) -> int:
        return int(self.now() * 1000 + self.judge.offset_ms)

    def shown_ms(self) -> int:
        return self.judge.shown_ms(self.now())

    def passed_ms(self) -> int:
        return self.date_ms() if self.judge.may_remove else 0

    def may_lead(self) -> bool:
        self.poll()
        return self.judge.may_lead

    def has_date(self) -> bool:
        return self.judge.is_known

    def on_date_judged(self, changed: Callable[[], None]) -> Callable[[], None]:
        return self._listeners.add(changed)

    def poll(self) -> None:
        """Judge the date again if something may have changed."""
        judge, now, wall_ms = self.judge, self.now(), self.wall_ms()
        if judge.is_calm(now, wall_ms):
            return
        servers = self.servers()
        before = judge.may_lead, judge.is_known
        rounds = -(-len(servers) // ASKED_MAX)
        judge.poll(now, wall_ms, servers, ANSWER_S + rounds * ASK_S)
        if (judge.may_lead, judge.is_known) != before:
            self._listeners.notify()


class ClockSync:
    """Synchronizes the clock of one server with the other servers."""

    def __init__(
        self, env: Env, server: ServerId, clock: JudgedClock, links: PeerCalls, ring: Callable[[], Ring]
    ) -> None:
        self.clock = clock
        self._kept = SavedDate(env.disk, clock)
        self._server, self._links, self._ring = server, links, ring
        self._nursery, self._beat = env.nursery.child("clock_sync"), env.beat
        self._known: tuple[int, frozenset[ServerId]] = -1, frozenset()
        self._asked: set[ServerId] = set()
        """Servers with an unanswered question."""
        self._next = 0
        self._was_sure = True
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        clock.servers = self.servers

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sample()
        self._nursery.spawn(self._ask_now_and_then(), name="ask for dates")

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._nursery.close()

    def servers(self) -> frozenset[ServerId]:
        """Return the servers to which the ring assigns replicas."""
        ring = self._ring()
        if self._known[0] != ring.version:
            found = frozenset(server for member in ring.partitions.values() for server in member.replicas)
            self._known = ring.version, found
        return self._known[1]

    def statistics(self) -> dict[str, float]:
        judge = self.clock.judge
        return {
            "date_doubtful": int(not judge.is_sure),
            "date_removes": int(judge.may_remove),
            "date_drift_s": judge.drift_ms / 1000,
            "date_behind_s": judge.behind_ms / 1000,
            "dates_taken_over_total": judge.taken_over,
        }

    def answer(self, server: ServerId, method: str, body: bytes) -> bytes:
        """Answer another server with this server's date. Raises InvalidRequest."""
        if method != "date":
            raise InvalidRequest(f"expected the method date, got {method!r}")
        report = self.report()
        return encode(report) if body == REPORTS_MORE else encode(report[:4])

    def report(self) -> ClockReport:
        self.clock.poll()
        judge = self.clock.judge
        date_ms = judge.reported_ms(self.clock.now())
        return ClockReport(date_ms, judge.is_sure, judge.doubt, judge.drift_ms, judge.has_date, judge.behind_ms)

    def _sample(self) -> None:
        self._timer = self._loop.call_later(self._beat.delay_s(SAMPLE_S), self._sample)
        self.clock.poll()
        judge = self.clock.judge
        if judge.has_date:
            self._kept.keep(judge.offset_ms)
        if judge.is_sure is not self._was_sure:
            self._was_sure = judge.is_sure
            if judge.is_sure:
                log.info("server=%s is sure of its date again: %d", self._server, self.clock.date_ms())
            else:
                log.warning(
                    "server=%s is not sure of its date, other servers should lead: %s", self._server, judge.doubt
                )

    async def _ask_now_and_then(self) -> None:
        while True:
            others = sorted(self.servers() - {self._server})
            is_known = self.clock.judge.is_known
            for server in self._some_of(others) if is_known else others:
                if server not in self._asked:
                    self._asked.add(server)
                    self._nursery.spawn(self._ask(server), name=f"ask {server} for its date")
            await self._beat.pause(ASK_S if is_known else ASK_UNKNOWN_S)

    def _some_of(self, others: list[ServerId]) -> list[ServerId]:
        if len(others) <= ASKED_MAX:
            return others
        turned = others[self._next % len(others) :] + others[: self._next % len(others)]
        self._next += ASKED_MAX
        return turned[:ASKED_MAX]

    async def _ask(self, server: ServerId) -> None:
        asked_at = self.clock.now()
        try:
            report = decode(await self._links.call(server, DATES, "date", REPORTS_MORE, CALL_S))
        except (StoreError, msgspec.MsgspecError) as error:
            log.debug("server=%s did not report its date: %r", server, error)
            return
        finally:
            self._asked.discard(server)
        now = self.clock.now()
        if now - asked_at <= CALL_S:
            self.clock.judge.note_answer(server, _clock_of(report, (asked_at + now) / 2, asked_at))
            self.clock.poll()


def _clock_of(report: ClockReport, at: float, asked_at: float) -> PeerClock:
    """Return the clocks of an answer. A server that is not sure reports its wall clock and its drift. The answer counts
    from the time of its question, because it may have been given before the clocks here moved apart."""
    offset_ms = report.date_ms - at * 1000
    date_ms, wall_ms = offset_ms - report.drift_ms, offset_ms
    if report.is_sure:
        date_ms, wall_ms = offset_ms, offset_ms + report.drift_ms
    has_date = report.is_sure if report.has_date is None else report.has_date
    return PeerClock(date_ms if has_date else None, wall_ms, report.is_sure, asked_at)

"""Keeps the date that this server goes by: samples its clocks, asks the other servers, and lets dates.py judge."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from kvstore.env import Clock, Env
from kvstore.errors import InvalidRequest, StoreError
from kvstore.ring.ring import Ring
from kvstore.server.control.dates import HEARD_S, Heard, Judge
from kvstore.server.listeners import Listeners
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)

DATES = PartitionId("@dates")
"""No partition has this name: calls under it are for the server."""
SAMPLE_S = 0.25
ASK_S = 1.0
ASK_UNKNOWN_S = 0.2
"""Between two rounds of questions, by one that has taken over no date yet."""
CALL_S = 1.0
"""What took longer to answer says nothing about the date: half of it is how wrong it may be."""
ASKED_MAX = 8
"""Servers in one round; of more than that, each round asks the next ones."""


class Told(NamedTuple):
    """The dates that servers tell each other."""

    date_ms: int
    is_sure: bool
    doubt: str = ""
    drift_ms: float = 0.0
    """What its wall clock is ahead."""


told_of = msgspec.msgpack.Decoder(Told).decode
encode = msgspec.msgpack.Encoder().encode


class Calls(Protocol):
    """kvstore.server.peer.links.PeerLinks."""

    async def call(
        self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float
    ) -> bytes: ...


class JudgedClock:
    """The Clock port with a judged date."""

    def __init__(self, raw: Clock, server: ServerId) -> None:
        self.now, self.wall_ms = raw.now, raw.wall_ms
        self.judge = Judge(server, raw.now(), raw.wall_ms())
        self.servers: Callable[[], frozenset[ServerId]] = frozenset
        """Those of the ring, once there is one."""
        self._listeners = Listeners()

    def date_ms(self) -> int:
        return int(self.now() * 1000 + self.judge.offset_ms)

    def shown_ms(self) -> int:
        return self.judge.shown_ms(self.now())

    def passed_ms(self) -> int:
        return self.date_ms() if self.judge.may_remove else 0

    def may_lead(self) -> bool:
        self.look()
        return self.judge.may_lead

    def has_date(self) -> bool:
        return self.judge.is_known

    def on_date_judged(self, changed: Callable[[], None]) -> Callable[[], None]:
        return self._listeners.add(changed)

    def look(self) -> None:
        """Judge anew, if something may have changed."""
        judge, now, wall_ms = self.judge, self.now(), self.wall_ms()
        if judge.is_calm(now, wall_ms):
            return
        servers = self.servers()
        before = judge.may_lead, judge.is_known
        rounds = -(-len(servers) // ASKED_MAX)
        judge.look(now, wall_ms, servers, HEARD_S + rounds * ASK_S)
        if (judge.may_lead, judge.is_known) != before:
            self._listeners.tell()


class Dating:
    """The dating of one server: it keeps the date that the server goes by."""

    def __init__(self, env: Env, server: ServerId, clock: JudgedClock, links: Calls, ring: Callable[[], Ring]) -> None:
        self.clock = clock
        self._server, self._links, self._ring = server, links, ring
        self._nursery, self._beat = env.nursery.child("dating"), env.beat
        self._known: tuple[int, frozenset[ServerId]] = -1, frozenset()
        self._asked: set[ServerId] = set()
        """Who has not answered yet."""
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
        """All that the ring gives replicas."""
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
            "dates_taken_over_total": judge.taken_over,
        }

    def answer(self, server: ServerId, method: str, body: bytes) -> bytes:
        """Answer another server with this one's date. Raises InvalidRequest."""
        if method != "date":
            raise InvalidRequest(f"want the method date, got {method!r}")
        return encode(self.told())

    def told(self) -> Told:
        self.clock.look()
        judge = self.clock.judge
        return Told(judge.told_ms(self.clock.now()), judge.is_sure, judge.doubt, judge.drift_ms)

    def _sample(self) -> None:
        self._timer = self._loop.call_later(self._beat.delay_s(SAMPLE_S), self._sample)
        self.clock.look()
        judge = self.clock.judge
        if judge.is_sure is not self._was_sure:
            self._was_sure = judge.is_sure
            if judge.is_sure:
                log.info("server=%s is sure of its date again: %d", self._server, self.clock.date_ms())
            else:
                log.warning("server=%s is not sure of its date, others shall lead: %s", self._server, judge.doubt)

    async def _ask_now_and_then(self) -> None:
        while True:
            others = sorted(self.servers() - {self._server})
            is_known = self.clock.judge.is_known
            for server in self._some_of(others) if is_known else others:
                if server not in self._asked:
                    self._asked.add(server)
                    self._nursery.spawn(self._ask(server), name=f"ask {server} for its date")
            await self._beat.rest(ASK_S if is_known else ASK_UNKNOWN_S)

    def _some_of(self, others: list[ServerId]) -> list[ServerId]:
        if len(others) <= ASKED_MAX:
            return others
        turned = others[self._next % len(others) :] + others[: self._next % len(others)]
        self._next += ASKED_MAX
        return turned[:ASKED_MAX]

    async def _ask(self, server: ServerId) -> None:
        asked_at = self.clock.now()
        try:
            told = told_of(await self._links.call(server, DATES, "date", b"", CALL_S))
        except (StoreError, msgspec.MsgspecError) as error:
            log.debug("server=%s does not tell its date: %r", server, error)
            return
        finally:
            self._asked.discard(server)
        now = self.clock.now()
        if now - asked_at <= CALL_S:
            offset_ms = told.date_ms - (asked_at + now) / 2 * 1000
            self.clock.judge.hear(server, Heard(offset_ms, told.is_sure, now))
            self.clock.look()

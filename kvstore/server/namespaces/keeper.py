"""Maintains the usage of namespaces on a server. It counts the partitions that are led here, exchanges usage with
the other servers, and takes this server's share of each rate."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from kvstore.env import Env
from kvstore.errors import StoreError
from kvstore.namespaces import Book, NamespaceTable
from kvstore.namespaces.book import PartitionUsage, UsageAnswer, decode, encode
from kvstore.namespaces.rates import Rates
from kvstore.server.peer_calls import PeerCalls
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)

NAMESPACES = PartitionId("@namespaces")
"""The id under which servers ask each other for usage. No partition has this name."""
TICK_S = 0.5
"""Interval of the exchange. A quota can be exceeded by what leaders on other servers admit in this time."""
CALL_S = 2.0
Refusals = dict[str, dict[str, int]]
"""Number of refusals by namespace and exceeded limit."""


class Rated(Protocol):
    """The dispatcher of clients' operations, which applies the rates. Implemented by
    kvstore.server.routing.dispatch.Dispatcher."""

    rates: Rates | None


class Keeper:
    """Maintains usage and rates. Does nothing while there are no namespaces."""

    def __init__(
        self,
        env: Env,
        server: ServerId,
        rated: Rated,
        links: PeerCalls,
        servers: Callable[[], Iterable[ServerId]],
        partitions: Callable[[], Iterable[PartitionId]],
    ) -> None:
        """`servers` returns the running servers, and `partitions` the partitions of the ring."""
        self.book = Book()
        self.rates = Rates(env.clock.now, self.book.refused)
        self._env, self._server, self._rated, self._links = env, server, rated, links
        self._servers, self._partitions = servers, partitions
        self._nursery = env.nursery.child("namespaces' keeper")
        self.reread: Callable[[], None] = lambda: None
        """Rereads the namespace table soon."""
        self._answers: dict[ServerId, UsageAnswer] = {}
        self._asking: set[ServerId] = set()
        self._wanted: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._is_counting = False
        self._own_refusals: Refusals = {}
        self._refused_at: dict[tuple[str, str], float] = {}
        """Time of the last known refusal, by namespace and exceeded limit."""

    def take(self, table: NamespaceTable) -> None:
        """Apply this table from now on."""
        if self.book.take(table):
            self.rates.take(table.namespaces)
            self._rated.rates = self.rates if self.rates.prefixes.all else None
            names = {each.name for each in table.namespaces}
            self._refused_at = {each: at for each, at in self._refused_at.items() if each[0] in names}
            self._changed.set()

    def take_own(self, table: NamespaceTable) -> None:
        """Apply a table that this server has just written. The table is also read again, because a later one may
        have been applied before."""
        self.take(table)
        self.reread()

    def start(self) -> None:
        """Start maintaining usage and rates."""
        self._nursery.spawn(self._keep(), name="keep")

    async def close(self) -> None:
        await self._nursery.close()

    def answer(self, server: ServerId, method: str, body: bytes) -> bytes:
        """Answer another server with the usage of the partitions that this server leads."""
        return encode(UsageAnswer(self.book.reports(), self._wanted, self.book.refusals(), self.book.marks()))

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Return numbers by namespace for the partitions that this server leads. The sum over all servers is the
        usage of the cluster."""
        amounts = self.book.led_amounts()
        found: dict[str, dict[str, Any]] = {}
        for each in self.book.table.namespaces:
            amount = amounts.get(each.name)
            refused = self.book.refused
            found[each.name] = {
                "keys": amount.keys if amount is not None else 0,
                "bytes": amount.bytes if amount is not None else 0,
                "keys_max": each.keys_max,
                "bytes_max": each.bytes_max,
                "rate_max": each.ops_per_s,
                "operations_total": self.rates.passed[each.name],
                "refused_keys_total": refused[each.name, "keys"],
                "refused_bytes_total": refused[each.name, "bytes"],
                "refused_operations_total": refused[each.name, "operations"],
            }
        return found

    def refusals(self) -> Refusals:
        """Return the number of refusals at all servers, as far as they have reported it, by namespace and exceeded
        limit."""
        found: Refusals = {}
        for refused in (self.book.refusals(), *(self._answers[server].refused for server in sorted(self._answers))):
            for name, counts in refused.items():
                sums = found.setdefault(name, {})
                for quota, count in counts.items():
                    sums[quota] = sums.get(quota, 0) + count
        return found

    def refused_ago_s(self) -> dict[str, dict[str, float]]:
        """Return the seconds since the last known refusal, by namespace and exceeded limit."""
        self._note_own()
        found: dict[str, dict[str, float]] = {}
        for (name, quota), at in sorted(self._refused_at.items()):
            found.setdefault(name, {})[quota] = max(0.0, self._env.clock.now() - at)
        return found

    def _note_own(self) -> None:
        before, self._own_refusals = self._own_refusals, self.book.refusals()
        self._note(before, self._own_refusals)

    def _note(self, before: Refusals, now: Refusals) -> None:
        """Record the time of refusals whose count has risen since the last report."""
        for name, counts in now.items():
            for quota, count in counts.items():
                if count > before.get(name, {}).get(quota, 0) and self.book.table.find_or_none(name) is not None:
                    self._refused_at[name, quota] = self._env.clock.now()

    def uncounted(self) -> list[PartitionId]:
        """Return the partitions whose leaders have not finished counting, or have not reported the result."""
        return self.book.uncounted(self._partitions())

    async def _keep(self) -> None:
        while True:
            if self.book.prefixes.all:
                self.poll()
                await self._env.beat.pause(TICK_S)
            else:
                self._changed.clear()
                await self._changed.wait()

    # docs/protocol.md N2
    def poll(self) -> None:
        """Count, exchange usage with the other servers, and distribute the rates. No step waits for another, because
        counting can take minutes."""
        self.book.keep_only(set(self._partitions()))
        self._note_own()
        if not self._is_counting and self._uncounted():
            self._is_counting = True
            self._nursery.spawn(self._count(), name="count")
        others = set(self._servers()) - {self._server}
        self._answers = {server: answer for server, answer in self._answers.items() if server in others}
        for server in sorted(others - self._asking):
            self._asking.add(server)
            self._nursery.spawn(self._ask(server), name=f"ask {server}")
        if self._rated.rates is not None:
            self._wanted = self.rates.wanted()
            self.rates.deal(
                self._wanted, [self._answers[each].wanted if each in self._answers else {} for each in sorted(others)]
            )

    def _uncounted(self) -> list[tuple[PartitionId, PartitionUsage]]:
        """Return the usage objects of partitions led here that are not counted yet."""
        return [(partition, usage) for partition, usage in sorted(self.book.led.items()) if not usage.is_counted]

    async def _count(self) -> None:
        """Count the partitions that this server leads, in turns, so that a large partition does not delay the
        others."""
        failed = set[PartitionUsage]()
        try:
            while uncounted := [each for each in self._uncounted() if each[1] not in failed]:
                for partition, usage in uncounted:
                    try:
                        usage.count_some()
                    except OSError as error:  # the leader notices it itself
                        log.warning("partition=%s cannot count the usage of namespaces now: %s", partition, error)
                        failed.add(usage)
                    await asyncio.sleep(0)
        finally:
            self._is_counting = False

    async def _ask(self, server: ServerId) -> None:
        try:
            answer = decode(await self._links.call(server, NAMESPACES, "usage", b"", CALL_S))
        except (StoreError, msgspec.MsgspecError) as error:
            log.debug("server=%s did not report the usage of namespaces: %r", server, error)
        else:
            if server in self._answers:
                self._note(self._answers[server].refused, answer.refused)
            self._answers[server] = answer
            self.book.take_reports(answer.reports, answer.marks)
        finally:
            self._asking.discard(server)

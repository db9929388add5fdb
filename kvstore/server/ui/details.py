"""Serves the pages about one subject: a node, a partition, a bookie, and what the servers keep themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore.errors import InvalidRequest, StoreError
from kvstore.meta.snapshots import SnapshotRecord
from kvstore.proto.admin_pb2 import AccessResponse, AuditReport, ClientsReport, SlowLogResponse, TransactionsResponse
from kvstore.proto.data_pb2 import PinsResponse
from kvstore.rpc.http.messages import HttpRequest, HttpResponse, text_response
from kvstore.server.status.ledger_survey import LedgerSurvey
from kvstore.server.status.surveyor import Detail, Surveyor
from kvstore.server.ui import local, subjects
from kvstore.server.ui.ledgers import NEWEST, bookie_ledgers_page_of, ledgers_page_of
from kvstore.server.ui.pages import HEADERS, Pages
from kvstore.types import LedgerId, PartitionId

READ_S = 8.0
"""Time after which a page shows what it has without the metadata store's answer."""
LEDGER_DIGITS_MAX = 19
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class NodeDetails:
    """The parts of one node that its pages read. Calls that read the metadata store raise StoreError."""

    pins: Callable[[PartitionId], Awaitable[PinsResponse]]
    access: Callable[[], Awaitable[AccessResponse]]
    snapshots: Callable[[], Awaitable[Sequence[tuple[str, SnapshotRecord]]]]


class DetailPages:
    """The pages about one subject. Only one of them reads the metadata store at a time, for any number of clients."""

    def __init__(self, surveyor: Surveyor, ledgers: LedgerSurvey, details: NodeDetails, pages: Pages) -> None:
        self._surveyor, self._ledgers, self._details, self._pages = surveyor, ledgers, details, pages
        self._turn = asyncio.Lock()
        self._pages_of: dict[str, Callable[[HttpRequest], Awaitable[HttpResponse]]] = {
            "ledgers": self._ledgers_page,
            "partition": self._partition,
            "bookie": self._bookie,
            "clients": self._clients,
            "transactions": self._transactions,
            "snapshots": self._snapshots,
            "users": self._users,
            "slow": self._slow,
        }

    async def page(self, name: str, request: HttpRequest) -> HttpResponse:
        """Return one of DETAILS."""
        return await self._pages_of[name](request)

    async def node(self, id_: str) -> HttpResponse:
        report = await self._surveyor.take()
        node = next((each for each in report.nodes if each.id == id_), None)
        if node is None:
            return _missing("node", id_, [each.id for each in report.nodes])
        return self._html("node", subjects.node_page(report, node))

    async def _partition(self, request: HttpRequest) -> HttpResponse:
        id_, report = request.parameter("id"), await self._surveyor.take()
        partition = next((each for each in report.partitions if each.id == id_), None)
        if partition is None:
            return _missing("partition", id_, [each.id for each in report.partitions])
        ledgers = await self._read(lambda: self._ledgers.ledgers(id_, newest=subjects.LEDGERS_SHOWN))
        pins = await self._read(lambda: self._details.pins(PartitionId(id_)))
        return self._html("partition", subjects.partition_page(report, partition, ledgers, pins))

    async def _bookie(self, request: HttpRequest) -> HttpResponse:
        id_, report = request.parameter("id"), await self._surveyor.take()
        bookie = next((each for each in report.bookies if each.id == id_), None)
        if bookie is None:
            return _missing("bookie", id_, [each.id for each in report.bookies])
        return self._html("bookie", subjects.bookie_page(report, bookie))

    async def _ledgers_page(self, request: HttpRequest) -> HttpResponse:
        """Return the page with the ledgers of a partition's log, or a page of the ledgers of a bookie."""
        partition, bookie = request.parameter("partition"), request.parameter("bookie")
        server = self._surveyor.server
        if not partition and not bookie:
            return text_response("400: expected ?partition=ID, for example p1, or ?bookie=ID, got none\n", 400, HEADERS)
        try:
            async with self._turn:
                if partition:
                    found = await self._ledgers.ledgers(partition, newest=NEWEST)
                    return self._html("ledgers", ledgers_page_of(found, partition, server))
                first = request.parameter("first") or "0"
                if not (first.isascii() and first.isdigit() and len(first) <= LEDGER_DIGITS_MAX):
                    return text_response(f"400: expected a ledger as first, got {first[:20]!r}\n", 400, HEADERS)
                return self._html(
                    "ledgers",
                    bookie_ledgers_page_of(await self._ledgers.page(LedgerId(int(first))), bookie, server),
                )
        except InvalidRequest as error:
            return text_response(f"404: {error}\n", 404, HEADERS)
        except StoreError as error:
            return text_response(f"503: {error}\n", 503, HEADERS)

    async def _clients(self, _: HttpRequest) -> HttpResponse:
        return await self._of_all(local.CLIENTS, ClientsReport, local.clients_page)

    async def _transactions(self, _: HttpRequest) -> HttpResponse:
        found, silent = await self._surveyor.details_of_all(local.TRANSACTIONS, TransactionsResponse)
        page = local.transactions_page(await self._surveyor.take(), found, silent)
        return self._html("transactions", page)

    async def _slow(self, _: HttpRequest) -> HttpResponse:
        return await self._of_all(local.SLOW, SlowLogResponse, local.slow_page)

    async def _snapshots(self, _: HttpRequest) -> HttpResponse:
        report, records = await self._surveyor.take(), await self._read(self._details.snapshots)
        return self._html("snapshots", local.snapshots_page(report, records))

    async def _users(self, _: HttpRequest) -> HttpResponse:
        found, report = await self._read(self._details.access), await self._surveyor.take()
        audited, silent = await self._surveyor.details_of_all(local.AUDIT, AuditReport)
        page = local.users_page(found, audited, silent, report.date_ms)
        return self._html("users", {**page, "server": report.server})

    async def _of_all(
        self, name: str, kind: type[Detail], page: Callable[[Mapping[str, Detail], Mapping[str, str]], dict[str, Any]]
    ) -> HttpResponse:
        """Return a page of what each server reports by the method with the page's name."""
        found, silent = await self._surveyor.details_of_all(name, kind)
        return self._html(name, {**page(found, silent), "server": self._surveyor.server})

    async def _read(self, work: Callable[[], Awaitable[T]]) -> T | str:
        """Return the result of `work`, which reads the metadata store, or the reason why there is none."""
        try:
            async with asyncio.timeout(READ_S), self._turn:
                return await work()
        except StoreError as error:
            return str(error) or repr(error)
        except TimeoutError:
            return f"the metadata store did not answer within {READ_S:g} s"

    def _html(self, name: str, page: Mapping[str, Any]) -> HttpResponse:
        return self._pages.html("detail.html", {"page": name, **page})


def _missing(what: str, id_: str, known: Sequence[str]) -> HttpResponse:
    text = f"404: no {what} {id_[:60]!r}; expected ?id= with one of {', '.join(known[:20])}\n"
    return text_response(text, 404, HEADERS)

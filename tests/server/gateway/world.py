"""A gateway at a real HTTP port, in front of leaders and logs in memory, and a client that sends exactly what a test
gives it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import aiohttp
import orjson
from yarl import URL

from kvstore.access import AccessTable
from kvstore.devcluster.zookeeper import free_port
from kvstore.env.beat import Beat
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.http_authenticator import HttpAuthenticator
from kvstore.server.access.identities import Access
from kvstore.server.access.logins import Logins
from kvstore.server.gateway.gateway import Gateway
from kvstore.server.grpc.session import Sessions
from kvstore.server.http.listener import HttpListener
from kvstore.server.routing.scan_slots import ScanSlots
from kvstore.server.ui.dashboard import Dashboard
from kvstore.server.ui.key_pages import KeyPages
from tests.audited import KeptLines
from tests.server.access.tables import PASSWORD
from tests.server.backends import OneServer, one_server
from tests.server.feed.world import World as Feeds
from tests.server.http.test_listener import Shown
from tests.waiting import PATIENCE_S

CONNECTIONS_MAX = 32
CLIENT = "00112233445566778899aabbccddeeff"


class ResponseKind(NamedTuple):
    """A response."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


def login_of(user: str) -> str:
    """Return the Authorization header of a user of tests/server/access/tables.py."""
    return "Basic " + base64.b64encode(b"%b:%b" % (user.encode(), PASSWORD)).decode()


class World:
    """The gateway of one server."""

    def __init__(
        self, url: str, backend: OneServer, feeds: Feeds, gateway: Gateway, access: Access, http: aiohttp.ClientSession,
        audit: KeptLines,
    ) -> None:  # fmt: skip
        self.url, self.backend, self.feeds, self.gateway, self.access = url, backend, feeds, gateway, access
        self.http, self.audit = http, audit

    async def ask(self, method: str, target: str, data: Any = None, *, user: str = "", **headers: str) -> ResponseKind:
        """Send a request. `target` is sent unchanged. Underscores in names of headers become dashes."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if user:
            sent["Authorization"] = login_of(user)
        url = URL(f"{self.url}{target}", encoded=True)
        async with asyncio.timeout(PATIENCE_S), self.http.request(method, url, data=data, headers=sent) as answer:
            return ResponseKind(answer.status, await answer.read(), answer.headers)

    async def batch(
        self, *operations: Mapping[str, Any], user: str = "", path: str = "/v1/batch", **more: Any
    ) -> ResponseKind:
        data = orjson.dumps({"operations": operations, **more})
        return await self.ask("POST", path, data, user=user, Content_Type="application/json")

    def request_id(self, sequence: int, **more: int) -> str:
        """Return a request id of a client that knows the current time."""
        seen = max(each.state.record_time_ms for each in self.backend.partitions.values()) or 1
        parts = {"client": CLIENT, "sequence": sequence, "seen": seen, **more}
        return "; ".join(f"{name}={value}" for name, value in parts.items())


@asynccontextmanager
async def gateway_world(
    root: Path, table: AccessTable | None = None, *, connections_max: int = CONNECTIONS_MAX
) -> AsyncIterator[World]:
    """Open a gateway. With a table, access control is on."""
    async with one_server(root / "server") as (env, backend), Feeds.open(root / "feeds", "p1", "p2") as feeds:
        lines = KeptLines()
        audit = AuditLog(env.clock.now, env.clock.date_ms, lines)
        access = Access(table, audit)
        logins = Logins(env, access, audit)
        listener = HttpListener(Shown(), env.transport, Beat(), connections_max=connections_max)
        listener.authenticator = authenticator = HttpAuthenticator(access, logins)
        batches = Sessions(backend, env.clock).batches
        gateway = Gateway(env, backend, "n1", feeds.feeds, batches, authenticator, connections_max)
        listener.gateway = gateway
        scans = ScanSlots(env.clock.now)
        keys = KeyPages(env.clock, "n1", backend, scans, authenticator, listener.pages)
        listener.dashboard = cast("Dashboard", SimpleNamespace(keys=keys))
        address = f"127.0.0.1:{free_port()}"
        await listener.open(address)
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        try:
            yield World(f"http://{address}", backend, feeds, gateway, access, session, lines)
        finally:
            await session.close()
            gateway.close()
            await listener.close()
            logins.close()

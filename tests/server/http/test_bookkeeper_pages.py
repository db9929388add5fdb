"""Apache BookKeeper's admin pages at the HTTP endpoint, compared with what Apache's own services print
(org.apache.bookkeeper.server.http.service of BookKeeper 4.18)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstore.bookie import BookieState
from kvstore.devcluster.zookeeper import free_port
from kvstore.env.beat import Beat
from kvstore.env.transport import TcpTransport
from kvstore.errors import MetadataUnavailable
from kvstore.meta import paths
from kvstore.meta.bookie_summary import BookieSummary, read_summary
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.cookies import Cookie
from kvstore.meta.layout import LayoutStore
from kvstore.meta.memory import MemoryStore
from kvstore.meta.recovery_settings import RecoverySettings
from kvstore.meta.registration import BookieRegistration
from kvstore.meta.underreplication import Underreplication
from kvstore.server.http import bookkeeper_pages
from kvstore.server.http.listener import HttpListener
from kvstore.types import BookieId, LedgerId
from tests.meta.drivers import TestNursery
from tests.server.http.test_listener import Shown, fetch
from tests.waiting import PATIENCE_S

INFO = BookieSummary("b1", False, True, bookies=10, writable=6, readonly=3)
STATE = """{
  "running" : true,
  "readOnly" : false,
  "shuttingDown" : false,
  "availableForHighPriorityWrites" : true
}"""
CLUSTER_INFO = """{
  "auditorElected" : true,
  "auditorId" : "b1",
  "clusterUnderReplicated" : false,
  "ledgerReplicationEnabled" : true,
  "totalBookiesCount" : 10,
  "writableBookiesCount" : 6,
  "readonlyBookiesCount" : 3,
  "unavailableBookiesCount" : 1
}"""
EXPECTED = {
    "/heartbeat": "OK\n",
    "/api/v1/bookie/is_ready": "OK",
    "/api/v1/bookie/state": STATE,
    "/api/v1/bookie/state/readonly": """{\n  "readOnly" : false\n}""",
    "/api/v1/bookie/info": """{\n  "freeSpace" : 30,\n  "totalSpace" : 100\n}""",
    "/api/v1/bookie/cluster_info": CLUSTER_INFO,
}


class Node(Shown):
    """A node with a bookie."""

    def __init__(self) -> None:
        self.state: BookieState | None = BookieState(is_running=True)
        self.reads = 0
        self.store_answers = asyncio.Event()
        self.store_answers.set()

    def bookie_state(self) -> BookieState | None:
        return self.state

    async def cluster_info(self) -> BookieSummary:
        self.reads += 1
        await self.store_answers.wait()
        return INFO


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
async def url(node: Node) -> AsyncIterator[str]:
    address = f"127.0.0.1:{free_port()}"
    listener = HttpListener(node, TcpTransport(), Beat())
    await listener.open(address)
    yield f"http://{address}"
    await listener.close()


async def test_every_page_prints_what_apaches_bookie_prints(url: str) -> None:
    found = {path: await fetch(f"{url}{path}") for path in EXPECTED}
    assert found == {path: (200, text.encode()) for path, text in EXPECTED.items()}


async def test_ready_and_state_follow_the_bookie(url: str, node: Node) -> None:
    node.state = BookieState(is_running=False)
    assert await fetch(f"{url}/api/v1/bookie/is_ready") == (503, b"Bookie is not fully started yet")
    node.state = BookieState(is_running=True, is_stopping=True)
    assert (await fetch(f"{url}/api/v1/bookie/is_ready"))[0] == 503
    node.state = BookieState(is_running=True, is_readonly=True, takes_copies=False)
    assert (await fetch(f"{url}/api/v1/bookie/is_ready"))[0] == 200
    _, text = await fetch(f"{url}/api/v1/bookie/state")
    assert b'"readOnly" : true' in text
    assert b'"availableForHighPriorityWrites" : false' in text
    assert b"true" in (await fetch(f"{url}/api/v1/bookie/state/readonly"))[1]


async def test_heartbeat_fails_when_the_process_should_be_restarted(
    url: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shown, "faults_of_life", ("the disk hangs",))
    assert await fetch(f"{url}/heartbeat") == (503, b"the disk hangs\n")


async def test_node_without_a_bookie_answers_404_but_knows_the_cluster(url: str, node: Node) -> None:
    node.state = None
    for path in ("is_ready", "state", "state/readonly", "info"):
        assert await fetch(f"{url}/api/v1/bookie/{path}") == (404, b"404: this node has no bookie\n")
    assert (await fetch(f"{url}/heartbeat"))[0] == (await fetch(f"{url}/api/v1/bookie/cluster_info"))[0] == 200


async def test_cluster_info_is_read_once_for_many_requests(
    url: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookkeeper_pages, "CLUSTER_INFO_KEPT_S", PATIENCE_S)
    node.store_answers.clear()
    asking = [asyncio.create_task(fetch(f"{url}/api/v1/bookie/cluster_info")) for _ in range(20)]
    await fetch(f"{url}/heartbeat")
    node.store_answers.set()
    assert {status for status, _ in await asyncio.gather(*asking)} == {200}
    assert node.reads == 1


async def test_cluster_info_is_503_while_the_metadata_store_is_unavailable(
    url: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_: Node) -> BookieSummary:
        raise MetadataUnavailable("not connected")

    monkeypatch.setattr(Node, "cluster_info", away)
    assert await fetch(f"{url}/api/v1/bookie/cluster_info") == (503, b"not connected\n")


async def test_cluster_info_is_503_when_the_metadata_store_does_not_answer(
    url: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookkeeper_pages, "CLUSTER_INFO_S", 0.01)
    node.store_answers.clear()
    status, text = await fetch(f"{url}/api/v1/bookie/cluster_info")
    assert (status, text.startswith(b"the metadata store did not answer within")) == (503, True)


def _cookie(bookie: BookieId) -> Cookie:
    return Cookie(bookie=bookie, journal_dirs=("/j",), ledger_dirs=("/l",), instance_id="id")


async def test_cluster_info_counts_bookies_by_their_state() -> None:
    store, nursery = MemoryStore(), TestNursery()
    await LayoutStore(store).ensure("id")
    assert await read_summary(store) == BookieSummary(None, False, True, bookies=0, writable=0, readonly=0)
    for number in range(4):
        bookie = BookieId(f"b{number}")
        await CookieStore(store).write(_cookie(bookie), None)
        if number:
            await BookieRegistration(store, bookie, f"127.0.0.1:{3181 + number}").start(nursery, readonly=number == 1)
    await store.create(paths.available(BookieId("undecodable")), b"?", ephemeral=True)
    await Underreplication(store).ensure()
    await Underreplication(store).mark(LedgerId(7), [BookieId("b0")], 0)
    await RecoverySettings(store).disable()
    assert await read_summary(store) == BookieSummary(None, True, False, bookies=5, writable=3, readonly=1)
    await nursery.close()

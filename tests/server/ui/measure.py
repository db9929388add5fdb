"""Measures the cost and the loading time of the dashboard: `python -m tests.server.ui.measure --partitions 300`.

One process serves the page over HTTP, from made-up reports of three nodes. The reports are encoded as on a link and
decoded again for each survey, as in the surveyor. Chromium, if it is installed, opens the page.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable

import aiohttp

from kvstore.devcluster.zookeeper import free_port
from kvstore.env.beat import Beat
from kvstore.env.clock import SystemClock
from kvstore.env.events import wait_within
from kvstore.env.transport import TcpTransport
from kvstore.meta.registration import RegisteredBookies
from kvstore.proto.admin_pb2 import ClusterReport, LedgersResponse, NodeReport
from kvstore.server.cluster.topology import ClusterTopology, Member
from kvstore.server.http.listener import HttpListener
from kvstore.server.status.overview import ClusterSurvey, report_of_cluster
from kvstore.server.ui.dashboard import Dashboard
from kvstore.server.ui.details import DetailPages
from kvstore.types import BookieId, PartitionId, ServerId
from tests.browser import CHROMIUM, tab_of
from tests.ring.rings import new_ring
from tests.server.http.test_listener import Shown
from tests.server.ui.made import made_details

SERVERS = tuple(ServerId(f"n{number}") for number in (1, 2, 3))
LOADED_MS = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def report_of(server: ServerId, partitions: int) -> NodeReport:
    """Return the report of a node that leads a third of the partitions, each with a hot key."""
    report = NodeReport(id=server, version="0.1.0", zone="rack-1", uptime_s=90_000)
    report.metadata.kind, report.metadata.state, report.metadata.address = "zookeeper", "connected", "zk:2181"
    report.disk.total_bytes, report.disk.free_bytes = 1 << 40, 1 << 39
    report.bookie.id, report.bookie.node, report.bookie.state = f"{server}-0123456789ab", server, "writable"
    report.repair.enabled = True
    for operation in ("get", "put", "session"):
        report.latencies.add(operation=operation, p50_s=0.001, p99_s=0.004, timed=9, within_s=60)
    for number in range(partitions):
        leads = SERVERS[number % 3] == server
        role = "serving" if leads else "following"
        replica = report.replicas.add(partition=f"p{number + 1}", role=role, sequence=10**6, epoch=5, keys=40_000)
        if leads:
            replica.lead.epoch, replica.lead.ledgers, replica.lead.ops_per_s = 5, 12, 150.0
            replica.lead.hot_keys.add(key=b"user:%d" % number, share=0.1)
    return report


class Made:
    """A survey of made-up nodes."""

    def __init__(self, partitions: int) -> None:
        ids = [PartitionId(f"p{number + 1}") for number in range(partitions)]
        ring = new_ring(ids, dict.fromkeys(SERVERS, ""), 3)
        leaders = {each: (SERVERS[number % 3], 5) for number, each in enumerate(ids)}
        self._topology = ClusterTopology(ring, leaders, {each: Member(id=each, resp="h:1") for each in SERVERS})
        self._told = [report_of(server, partitions).SerializeToString() for server in SERVERS]
        self._bookies = RegisteredBookies({BookieId(f"{each}-0123456789ab"): f"{each}:3181" for each in SERVERS}, {})

        self.watcher: Callable[[ClusterReport], None] | None = None

    async def take(self) -> ClusterReport:
        reports = {server: NodeReport.FromString(told) for server, told in zip(SERVERS, self._told, strict=True)}
        return report_of_cluster(
            ClusterSurvey(server=SERVERS[0], topology=self._topology, reports=reports, bookies=self._bookies)
        )

    async def ledgers(self, partition: str = "", *, newest: int = 0) -> LedgersResponse:
        return LedgersResponse()


async def serve(partitions: int, loads: int, open_s: float) -> list[str]:
    """Return lines of figures."""
    address = f"127.0.0.1:{free_port()}"
    listener, made = HttpListener(Shown(), TcpTransport(), Beat()), Made(partitions)
    listener.dashboard = Dashboard(
        SystemClock(), made, listener.pages, DetailPages(made, made, made_details(), listener.pages), None
    )
    listener.dashboard.start()
    await listener.open(address)
    url = f"http://{address}/ui"
    try:
        return [
            f"{partitions} partitions",
            *await pages(url, loads),
            *await live(url, open_s),
            *await browsed(url, loads),
        ]
    finally:
        listener.dashboard.close()
        await listener.close()


async def pages(url: str, loads: int) -> list[str]:
    took, size = [], 0
    used = time.process_time()
    async with aiohttp.ClientSession() as session:
        for _ in range(loads):
            began = time.perf_counter()
            async with session.get(url) as answer:
                size = len(await answer.read())
            took.append(time.perf_counter() - began)
    used = (time.process_time() - used) / loads
    middle = sorted(took)[loads // 2]
    return [
        f"page: {size:,} bytes; {used * 1e3:.1f} ms of a processor, {middle * 1e3:.1f} ms until it is here (median)"
    ]


async def live(url: str, open_s: float) -> list[str]:
    """Measure with one open page, without the process's own work."""
    idle = await processor_share(open_s)
    async with aiohttp.ClientSession() as session, session.get(f"{url}/live") as stream:
        reading = asyncio.create_task(stream.content.read())
        busy = await processor_share(open_s)
        reading.cancel()
    return [f"an open page: {busy - idle:.2%} of a processor, measured for {open_s:g} s (idle: {idle:.2%})"]


async def processor_share(for_s: float) -> float:
    began, used = time.perf_counter(), time.process_time()
    await wait_within(asyncio.Event(), for_s)
    return (time.process_time() - used) / (time.perf_counter() - began)


async def browsed(url: str, loads: int) -> list[str]:
    if CHROMIUM is None:
        return ["no Chromium here"]
    took = []
    async with tab_of() as tab:
        for _ in range(loads):
            await tab.page.goto(url)
            took.append(float(await tab.page.evaluate(LOADED_MS)))
    return [f"in Chromium: {sorted(took)[loads // 2]:.0f} ms until it is loaded (median), {max(took):.0f} ms at most"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=300)
    parser.add_argument("--loads", type=int, default=20)
    parser.add_argument("--open-s", type=float, default=20.0)
    wanted = parser.parse_args()
    lines = asyncio.run(serve(wanted.partitions, wanted.loads, wanted.open_s))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

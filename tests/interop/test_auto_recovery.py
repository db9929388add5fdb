"""Our auto-recovery on Apache's bookies, Apache's on the store's ledgers, and Apache's commands about either. Skipped
without jars: README.md."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.meta.layout import LayoutStore
from kvstore.meta.recovery_settings import RecoverySettings
from kvstore.types import BookieId, LedgerId, LedgerState
from tests.cluster.harness import running_cluster
from tests.cluster.test_kill import counting, wait_going_on
from tests.interop import java
from tests.interop.apache import expect
from tests.interop.java import Programs
from tests.interop.processes import JavaWriter, Processes
from tests.interop.test_java_faults import AUTO_RECOVERY, reads, written
from tests.interop.test_store import SETTINGS, WHOLE_S, bookkeeper
from tests.waiting import wait_until

pytestmark = pytest.mark.interop
DELAY_S = 7


@asynccontextmanager
async def our_auto_recovery(cluster: Processes) -> AsyncIterator[str]:
    """Run `kvstore autorecovery run`, and yield its name."""
    asked = ("autorecovery", "run", "--zookeeper", cluster.zookeeper.address, "--open-ledger-grace", "1")
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvstore", *asked, stdout=DEVNULL, stderr=PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(java.TIMEOUT_S):
            yield (await process.stderr.readline()).decode().split()[0]
    finally:
        process.terminate()
        await process.communicate()


async def is_named_nowhere(cluster: Processes, bookie: BookieId, *ledgers: LedgerId) -> bool:
    found = [await cluster.metadata(each) for each in ledgers]
    return not any(bookie in fragment.ensemble for each in found for fragment in each.fragments)


async def test_our_workers_repair_ledgers_of_apache_bookies(tmp_path: Path) -> None:
    java.compile_sessions()
    async with Processes(tmp_path, 0) as cluster:
        for _ in range(4):
            await cluster.add_their_bookie()
        left = await JavaWriter.start(cluster, 3, 3, 2)
        await left.writes(500)
        await left.kill()
        lost = (await cluster.metadata(left.ledger)).fragments[0].ensemble[0]
        closed, last = await written(cluster, 500)
        while await is_named_nowhere(cluster, lost, closed):
            closed, last = await written(cluster, 500)
        await RecoverySettings(cluster.store).set_lost_bookie_delay_s(1)
        async with our_auto_recovery(cluster):
            cluster.theirs[lost].kill()

            async def is_mended() -> bool:
                is_closed = (await cluster.metadata(left.ledger)).state is LedgerState.CLOSED
                return is_closed and await is_named_nowhere(cluster, lost, closed, left.ledger)

            await wait_until(is_mended, timeout_s=WHOLE_S, what="our worker recovers and copies")
            expect(await cluster.programs.shell("listunderreplicated"))
        await reads(cluster, (closed, last), (left.ledger, left.confirmed))


def test_apache_auto_recovery_repairs_ledgers_of_the_store(tmp_path: Path) -> None:
    off = ["autorecovery.worker=false", "autorecovery.auditor=false"]
    with bookkeeper(tmp_path, ours=4, theirs=0) as outside:
        programs = Programs(
            tmp_path / "daemon", outside.address, allowLoopback="true", openLedgerRereplicationGracePeriod="1000"
        )
        with running_cluster(tmp_path / "store", external_at=outside.address, settings=[*SETTINGS, *off]) as cluster:
            outside.shell("lostbookierecoverydelay", "-set", "1")
            with counting(cluster, "daemon", *cluster.ids) as counters:
                lost = outside.open_of("p1").fragments[0].ensemble[0]
                daemon = programs.daemon(AUTO_RECOVERY, tmp_path / "daemon.log")
                try:
                    outside.kill(lost)
                    cluster.wait_until(lambda: not outside.naming(lost), "Apache's daemon copies", WHOLE_S)
                    wait_going_on(cluster, counters)
                finally:
                    daemon.kill()
                    daemon.wait()
            cluster.wait_succeeds("fsck")


async def test_apache_commands_and_our_auto_recovery_agree(tmp_path: Path) -> None:
    async with Processes(tmp_path, 3) as cluster, our_auto_recovery(cluster) as worker:
        shell, settings = cluster.programs.shell, RecoverySettings(cluster.store)
        own = cluster.bookies[0].id

        async def is_elected() -> bool:
            return worker in (await shell("whoisauditor")).text

        await wait_until(is_elected, timeout_s=java.TIMEOUT_S, what="our auditor is elected")
        expect(await shell("whatisinstanceid"), await LayoutStore(cluster.store).instance_id())
        expect(await shell("lostbookierecoverydelay", "-set", str(DELAY_S)))
        assert await settings.lost_bookie_delay_s() == DELAY_S
        expect(await shell("lostbookierecoverydelay", "-get"), str(DELAY_S))
        expect(await shell("autorecovery", "-disable"))
        assert not await settings.is_enabled()
        expect(await shell("autorecovery", "-enable"))
        assert await settings.is_enabled()
        expect(await shell("queryautorecoverystatus"), "No Ledger is being recovered")
        expect(await shell("triggeraudit"))
        expect(await shell("forceauditchecks", "-calc"))
        expect(await shell("clusterinfo"), '"totalBookiesCount" : 3')
        expect(await shell("endpointinfo", "-b", own), "127.0.0.1")
        of_one = Programs(tmp_path / "one", cluster.zookeeper.address, allowLoopback="true", bookieId=own)
        expect(await of_one.shell("bookiesanity", "-e", "10", "-t", "30"), "Bookie sanity test succeeded")

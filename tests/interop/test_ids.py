"""Bookies of ours whose ids are `host:port`, and Apache's programs. Skipped without jars: README.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.devcluster.zookeeper import free_ports
from tests.interop import java
from tests.interop.apache import expect
from tests.interop.processes import JavaWriter, Processes

pytestmark = pytest.mark.interop


async def test_apache_shell_and_client_find_our_bookies_by_host_and_port(tmp_path: Path) -> None:
    java.compile_sessions()
    async with Processes(tmp_path, 0) as cluster:
        ids = [f"127.0.0.1:{port}" for port in free_ports(4)]
        for number, each in enumerate(ids, 1):
            bookie = await cluster.add_bookie(f"b{number}", int(each.rpartition(":")[2]), f"id={each}")
            assert bookie.id == each
        shell = cluster.programs.shell
        expect(await shell("listbookies", "-rw"), *(f"BookieID:{each}," for each in ids))
        expect(await shell("cookie_get", ids[0]), f'bookieHost: "{ids[0]}"')
        expect(await shell("simpletest", "-e", "3", "-w", "3", "-a", "2", "-n", "100"), "100 entries written to ledger")
        writer = await JavaWriter.start(cluster, 3, 3, 2)
        await writer.writes(500)
        ensemble = (await cluster.metadata(writer.ledger)).fragments[0].ensemble
        assert set(ensemble) < set(ids)
        first = cluster.bookie(ensemble[0])
        await first.kill()
        await writer.writes(500)
        await first.start()
        assert first.id == ensemble[0]
        await cluster.are_registered(*(each.id for each in cluster.bookies))
        last = await writer.stop()
        where = f"{cluster.zookeeper.address}/ledgers"
        read = await cluster.programs.run("Reader", where, str(writer.ledger), str(last))
        assert (read.code, len(read.lines("read "))) == (0, 1), read.text[-3000:]

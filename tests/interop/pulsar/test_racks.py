"""Apache Pulsar's own classes on what `kvstore bookie racks` writes, and on the broker.conf of
docs/how-to/run-apache-pulsar.md. Skipped without jars."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.meta.connect import connect
from tests.cli.test_bookies_racks import BOOKIES, OURS, PULSARS, register
from tests.commands import kvstore
from tests.interop import java
from tests.pages import blocks
from tests.zookeeper_fixture import zookeeper as zookeeper

pytestmark = [pytest.mark.interop, pytest.mark.needs_zookeeper]


async def replace_disk(address: str) -> None:
    """Let the first bookie come back under another id."""
    store = await connect(f"{address}{OURS}/ledgers/available")
    try:
        data, stat = await store.get(f"/{BOOKIES[0][0]}")
        await store.delete(f"/{BOOKIES[0][0]}", stat.version)
        await store.create("/n1-dd", data)
    finally:
        await store.close()


def racks(zookeeper: str) -> dict[str, str]:
    """Return the rack of each host, as Pulsar's own class reports it."""
    hosts = sorted({at.partition(":")[0] for _, at, _ in BOOKIES[:2]})
    said = java.run_pulsar("Racks", f"{zookeeper}{OURS}/ledgers", f"{zookeeper}{PULSARS}", *hosts)
    assert said.code == 0, said.text[-3000:]
    return {line.split()[1]: line.split()[2] for line in said.lines("rack 127.")}


def test_pulsar_uses_our_zones_also_after_a_disk_was_replaced(zookeeper: str) -> None:
    java.compile_pulsar()
    asyncio.run(register(zookeeper))
    words = ("bookie", "racks", "--pulsar", f"{zookeeper}{PULSARS}", "--metadata", f"{zookeeper}{OURS}")
    assert kvstore(*words).returncode == 0
    zones = {"127.0.0.1": "/rack-1", "127.0.0.2": "/rack-2"}
    assert racks(zookeeper) == zones
    asyncio.run(replace_disk(zookeeper))
    assert racks(zookeeper) == zones | {"127.0.0.1": "null"}, "Pulsar finds a rack by the bookie's id"
    assert kvstore(*words).returncode == 0
    assert racks(zookeeper) == zones


def test_pulsar_broker_accepts_the_documented_broker_conf(tmp_path: Path) -> None:
    java.compile_pulsar()
    (block,) = [each for each in blocks("docs/how-to/run-apache-pulsar.md") if each.language == "properties"]
    lines = block.code.splitlines()
    conf = tmp_path / "broker.conf"
    needed = ("configurationMetadataStoreUrl=zk:zk1:2181/pulsar",)
    conf.write_text("\n".join((*lines, *needed)) + "\n")
    said = java.run_pulsar("Conf", str(conf))
    assert said.code == 0, said.text[-3000:]
    found = {tuple(line.split(" ", 2)[1:]) for line in said.lines("setting ")}
    assert found >= {tuple(line.split("=", 1)) for line in lines}

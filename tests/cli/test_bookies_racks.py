"""`kvstore bookie racks`: zones of a cluster's bookies as racks in Apache Pulsar's metadata store."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvstore.meta import paths
from kvstore.meta.connect import connect
from kvstore.meta.layout import LayoutStore
from kvstore.meta.service_info import encode_service_info
from kvstore.meta.store import ensure_path
from tests.commands import kvstore
from tests.zookeeper_fixture import zookeeper as zookeeper

OURS, PULSARS = "/kvstore-racks", "/pulsar-racks"
BOOKIES = (
    ("n1-aa", "127.0.0.1:3181", "rack-1"),
    ("n2-bb", "127.0.0.2:3181", "rack-2"),
    ("n3-cc", "127.0.0.2:3182", ""),
)


async def register(address: str) -> None:
    """Write the permanent registration that the nodes of the bookies would make."""
    store = await connect(address)
    try:
        await ensure_path(store, PULSARS)
        await ensure_path(store, OURS)
    finally:
        await store.close()
    store = await connect(f"{address}{OURS}")
    try:
        await LayoutStore(store).ensure("8d5e2f52-93a6-4d6c-9a2e-0f5d8a1c3b47")
        for name, at, zone in BOOKIES:
            await store.create(f"{paths.AVAILABLE}/{name}", encode_service_info(at, zone))
    finally:
        await store.close()


async def racks_at(address: str) -> Any:
    store = await connect(f"{address}{PULSARS}")
    try:
        return json.loads((await store.get("/bookies"))[0])
    finally:
        await store.close()


@pytest.mark.needs_zookeeper
def test_racks_writes_zones_where_pulsar_reads_racks(zookeeper: str) -> None:
    asyncio.run(register(zookeeper))
    answer = kvstore("bookie", "racks", "--pulsar", f"{zookeeper}{PULSARS}", "--metadata", f"{zookeeper}{OURS}")
    assert answer.returncode == 0, answer.stderr
    assert [line.split() for line in answer.stdout.splitlines()] == [
        ["BOOKIE", "ADDRESS", "RACK"],
        ["n1-aa", "127.0.0.1:3181", "/rack-1"],
        ["n2-bb", "127.0.0.2:3181", "/rack-2"],
    ]
    assert answer.stderr.splitlines() == [
        "warning: n2-bb, n3-cc share the host 127.0.0.2; Pulsar applies one rack to all of them",
        "warning: n3-cc has no zone; Pulsar puts it into its default rack",
    ]
    assert asyncio.run(racks_at(zookeeper)) == {
        "default": {
            "n1-aa": {"rack": "/rack-1", "hostname": "127.0.0.1:3181"},
            "n2-bb": {"rack": "/rack-2", "hostname": "127.0.0.2:3181"},
        }
    }


def test_racks_refuses_an_etcd() -> None:
    answer = kvstore("bookie", "racks", "--pulsar", "etcd://127.0.0.1:2379/pulsar", "--metadata", "127.0.0.1:1")
    assert answer.returncode == 1
    assert "--pulsar: expected a ZooKeeper, got etcd://127.0.0.1:2379/pulsar" in answer.stderr

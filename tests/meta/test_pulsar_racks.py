"""Racks where Apache Pulsar reads them (org.apache.pulsar.bookie.rackawareness.BookieRackAffinityMapping)."""

from __future__ import annotations

import json

import pytest

from kvstore.errors import UndecodableNode
from kvstore.meta.memory import MemoryStore
from kvstore.meta.pulsar_racks import PATH, Document, PulsarRacks, shared_hosts, with_zones
from kvstore.meta.registration import RegisteredBookies
from kvstore.types import BookieId
from tests.meta.drivers import FaultyStore

B1, B2, B3 = BookieId("n1-aa"), BookieId("n2-bb"), BookieId("n3-cc")
BOOKIES = RegisteredBookies(
    {B1: "h1:3181", B2: "h2:3181"}, {B3: "h3:3181"}, {B1: "rack-1", B2: "/rack-2", B3: "eu/rack-3"}
)
WRITTEN: Document = {
    "default": {
        "n1-aa": {"rack": "/rack-1", "hostname": "h1:3181"},
        "n2-bb": {"rack": "/rack-2", "hostname": "h2:3181"},
        "n3-cc": {"rack": "/eu/rack-3", "hostname": "h3:3181"},
    }
}


async def test_zones_become_racks_in_pulsars_format() -> None:
    store = MemoryStore()
    assert await PulsarRacks(store).write_zones(BOOKIES) == WRITTEN
    data, stat = await store.get(PATH)
    assert (json.loads(data), stat.version) == (WRITTEN, 0)
    await PulsarRacks(store).write_zones(BOOKIES)
    assert (await store.get(PATH))[1].version == 0, "nothing has changed"


async def test_replaced_disk_has_its_rack_under_its_new_id() -> None:
    store = MemoryStore()
    await PulsarRacks(store).write_zones(BOOKIES)
    new = BookieId("n1-dd")
    replaced = RegisteredBookies(
        {new: "h1:3181", B2: "h2:3181"}, {B3: "h3:3181"}, {new: "rack-1", B2: "rack-2", B3: "eu/rack-3"}
    )
    found = (await PulsarRacks(store).write_zones(replaced))["default"]
    assert sorted(found) == ["n1-dd", "n2-bb", "n3-cc"]
    assert found["n1-dd"] == WRITTEN["default"]["n1-aa"]


def test_entries_of_others_stay() -> None:
    others: Document = {
        "fast": {"n1-aa": {"rack": "/old", "hostname": "h1:3181", "more": [1]}},
        "default": {
            "apache:3181": {"rack": "/r9", "hostname": "apache:3181"},
            "away": {"rack": "/r8", "hostname": "h8:3181"},
        },
    }
    found = with_zones(others, RegisteredBookies({B1: "h1:3181", B2: "h2:3181"}, {}, {B1: "rack-1"}))
    assert found["fast"] == {"n1-aa": {"rack": "/rack-1", "hostname": "h1:3181", "more": [1]}}
    assert found["default"] == others["default"], "a bookie without a zone has no entry, and one that is away keeps its"


@pytest.mark.parametrize("data", [b"[]", b"7", b'{"default": {"n1": "rack"}}', b"{"])
async def test_malformed_document_is_named_and_stays(data: bytes) -> None:
    store = MemoryStore()
    await store.create(PATH, data)
    with pytest.raises(UndecodableNode, match="/bookies of Pulsar"):
        await PulsarRacks(store).write_zones(BOOKIES)
    assert (await store.get(PATH))[0] == data


@pytest.mark.parametrize("kind", ["lost", "done"])
@pytest.mark.parametrize("call", ["create", "set"])
async def test_write_of_unknown_outcome_is_found_or_repeated(call: str, kind: str) -> None:
    store = FaultyStore()
    if call == "set":
        await store.create(PATH, b"")
    store.faults.append((call, kind))
    assert await PulsarRacks(store).write_zones(BOOKIES) == WRITTEN
    assert json.loads((await store.get(PATH))[0]) == WRITTEN


def test_hosts_of_several_racks_are_named() -> None:
    one_host = RegisteredBookies({B1: "h1:3181", B2: "h1:3182"}, {B3: "h3:3181"}, {B1: "a", B2: "b", B3: "a"})
    assert shared_hosts(one_host) == {"h1": [B1, B2]}
    assert shared_hosts(BOOKIES) == {}

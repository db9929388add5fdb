"""The HTTP door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.server.http import HttpDoor, metrics_of
from kvstore.server.zookeeper import free_port


class Shown:
    faults: tuple[str, ...] = ()

    def status(self) -> dict[str, Any]:
        return {"id": "n1", "odd": object()}

    def not_ready(self) -> list[str]:
        return list(self.faults)

    def statistics(self) -> dict[str, Any]:
        return {
            "server": {"resp_commands_total": 5, "links": {"open": 2}, "name": "text"},
            "partitions": {"p1": {"seq": 7, "role": "serving"}, "p2": {"seq": 8, "leading": {"queued": 1}}},
        }


@pytest.fixture
async def url() -> AsyncIterator[str]:
    address = f"127.0.0.1:{free_port()}"
    door = HttpDoor(Shown())
    await door.open(address)
    yield f"http://{address}"
    await door.close()


async def fetch(url: str, **options: Any) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.request("GET", url, **options) as answer:
        return answer.status, await answer.read()


async def test_health_readiness_and_status(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await fetch(f"{url}/healthz") == (200, b"ok\n")
    assert await fetch(f"{url}/readyz") == (200, b"ok\n")
    monkeypatch.setattr(Shown, "faults", ("partition p1 has no leader", "draining"))
    assert await fetch(f"{url}/readyz") == (503, b"partition p1 has no leader\ndraining\n")
    assert (await fetch(f"{url}/healthz"))[0] == 200
    status, page = await fetch(url)
    assert status == 200
    assert orjson.loads(page)["id"] == "n1"
    assert (await fetch(f"{url}/nothing"))[0] == 404


async def test_metrics_can_be_read_and_partitions_are_a_label(url: str) -> None:
    _, page = await fetch(f"{url}/metrics")
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }
    assert found["kvstore_server_resp_commands_total",] == 5
    assert found["kvstore_server_links_open",] == 2
    assert found["kvstore_partition_seq", "p1"] == 7
    assert found["kvstore_partition_leading_queued", "p2"] == 1
    assert ("kvstore_partition_leading_queued", "p1") not in found


async def test_what_is_too_large_is_refused_and_the_door_stays_open(url: str) -> None:
    status, _ = await fetch(f"{url}/{'x' * 20_000}")
    assert status == 400
    assert (await fetch(f"{url}/healthz"))[0] == 200


def test_nothing_to_count_makes_no_metrics() -> None:
    assert list(metrics_of("server", {})) == []
    assert list(metrics_of("server", {"name": "text"})) == []

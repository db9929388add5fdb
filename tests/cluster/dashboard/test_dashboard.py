"""The dashboard of a real cluster in a real browser during faults: it shows the fault, the reason, and the next
step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.browser import CHROMIUM, MISSING, tab_of
from tests.cluster.dashboard.scenes import SCENES, Shown, fill
from tests.cluster.harness import TIMEOUT_S, Cluster, running_cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason=MISSING),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("dashboard")) as started:
        fill(started)
        yield started


async def look(cluster: Cluster, shown: Shown) -> list[str]:
    """Wait until the page shows all texts. Return the complaints of the browser."""
    async with tab_of() as tab:
        page = f"http://{cluster.file.node(shown.node).http}/ui"
        await tab.open_until(page, shown.texts, TIMEOUT_S)
        await tab.open_until(f"{page}/ledgers?partition=p1", shown.ledgers, TIMEOUT_S)
        return tab.complaints


@pytest.mark.parametrize("name", SCENES)
def test_dashboard_shows_each_fault_with_reason_and_next_step(cluster: Cluster, name: str) -> None:
    with SCENES[name](cluster) as shown:
        assert asyncio.run(look(cluster, shown)) == []

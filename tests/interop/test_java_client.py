"""Apache BookKeeper's own Java client on four of our bookies, each a process. Skipped without its jars: README.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop import java
from tests.interop.processes import Processes

pytestmark = pytest.mark.interop

ENTRIES = "5000"
CASES = 24


async def test_java_client_gets_the_same_results_from_our_bookies(tmp_path: Path) -> None:
    java.compile_sessions()
    async with Processes(tmp_path, 4, "segment_bytes=4194304", "reclaim_interval_s=2") as cluster:
        output = await cluster.programs.run("ClientSession", f"{cluster.zookeeper.address}/ledgers", ENTRIES)
        assert (output.code, len(output.lines("ok "))) == (0, CASES), "\n".join(output.lines("failed "))

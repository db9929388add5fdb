"""Raw adds as of Apache's benchmark of a bookie, at one of ours that admits them or not. Skipped without jars."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop import java
from tests.interop.processes import Processes

pytestmark = pytest.mark.interop
ENTRIES = 2000


@pytest.mark.parametrize(("settings", "stored"), [((), 0), (("admit_raw_adds=1",), ENTRIES)])
async def test_raw_adds_are_stored_if_the_operator_allows_them(
    settings: tuple[str, ...], stored: int, tmp_path: Path
) -> None:
    java.compile_sessions()
    async with Processes(tmp_path, 1, *settings) as cluster:
        (address,) = (await cluster.addresses()).values()
        output = await cluster.programs.run("Raw", f"{cluster.zookeeper.address}/ledgers", address, str(ENTRIES))
        found = output.lines("stored ")
        assert found == [f"stored {stored} of {ENTRIES}", f"stored 0 of {ENTRIES}"], output.text[-3000:]

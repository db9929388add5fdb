"""The benchmark of Pulsar on both kinds of bookies. Skipped without jars."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.bench.pulsar import Load, compare
from tests.interop import java

pytestmark = pytest.mark.interop


async def test_benchmark_measures_both_kinds_of_bookies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    java.compile_pulsar()
    loads = [Load(is_batched=False, in_flight=20), Load(is_batched=True, in_flight=20)]
    await compare(tmp_path, loads, size=100, seconds=1.0, rounds=1, warm_s=1.0)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if "in flight" in line]
    assert [row[1:3] for row in rows] == [[str(load), kind] for load in loads for kind in ("ours", "Apache's")]
    assert [row[4] == "1.0" for row in rows] == [True, True, False, False], "messages per entry"

"""The disk space per key."""

from __future__ import annotations

from pathlib import Path

from kvstore.partition.state.engine_rocks import RocksEngine
from loadtest.bytes_per_key import tables_in
from tests.partition.state.test_engine_conformance import flushed, write

LOG = """\
2026/01/02-03:04:05.1 7 EVENT_LOG_v1 {"job": 2, "event": "flush_started", "num_memtables": 16}
2026/01/02-03:04:05.2 7 EVENT_LOG_v1 {"cf_name": "default", "job": 2, "event": "table_file_creation", "file_size": 1000}
2026/01/02-03:04:05.3 7 [db/job.cc:1] Compacting 8@0 files
2026/01/02-03:04:05.4 7 EVENT_LOG_v1 {"job": 3, "event": "compaction_started", "files_L0": [8]}
2026/01/02-03:04:05.5 7 EVENT_LOG_v1 {"cf_name": "default", "job": 3, "event": "table_file_creation", "file_size": 500}
2026/01/02-03:04:05.6 7 EVENT_LOG_v1 {"cf_name": "default", "job": 3, "event": "table_file_creation", "file_size": 20}
"""


def test_engine_log_gives_bytes_of_flushes_and_compactions() -> None:
    assert tables_in(LOG) == {"engine: flushes": 1000, "engine: compaction": 520}


async def test_log_of_the_engine_that_we_use_is_read(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path))
    write(engine, (b"a", b"1"))
    await flushed(engine)
    (table,) = tmp_path.glob("*.sst")
    engine.close()
    assert tables_in((tmp_path / "LOG").read_text()) == {"engine: flushes": table.stat().st_size}

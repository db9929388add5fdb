"""A process as in tests.bookie.process, with a reclaimer, and a metadata store that deletes ledgers on request: python
-m tests.bookie.full_process DIRECTORY, then the number of a ledger in each line of standard input."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.connections.service import BookieService
from kvstore.bookie.storage import BookieStorage
from kvstore.bookie.upkeep.reclaim import Reclaimer
from kvstore.env.real import real_env, run
from tests.bookie.support import ME, Metadata

MIB = 1 << 20


async def serve(directory: Path) -> None:
    env, meta = real_env(directory), Metadata()
    config = BookieConfig(
        name="b1", listen="127.0.0.1:0", segment_bytes=MIB, reserve_bytes=2 * MIB, reclaim_interval_s=1.0
    )
    storage = BookieStorage(env, config, ME, meta)
    await storage.start()
    env.nursery.spawn(Reclaimer(env, config, storage, meta).run(), name="reclaim")
    listener = await env.transport.listen(config.listen, BookieService(storage, config).handler)
    sys.stdout.write(f"{listener.address}\n")
    sys.stdout.flush()
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        meta.known[int(line)] = None


if __name__ == "__main__":
    run(serve(Path(sys.argv[1])))

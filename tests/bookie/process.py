"""A bookie's storage and service as a separate process on a real disk: python -m tests.bookie.process DIRECTORY

Every ledger is open and names the bookie. The process prints its address, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.connections.service import BookieService
from kvstore.bookie.storage import BookieStorage
from kvstore.env.real import real_env, run
from tests.bookie.support import ME, Metadata


async def serve(directory: Path) -> None:
    env = real_env(directory)
    config = BookieConfig(name="b1", listen="127.0.0.1:0", segment_bytes=1 << 20, reserve_bytes=0)
    storage = BookieStorage(env, config, ME, Metadata())
    await storage.start()
    listener = await env.transport.listen(config.listen, BookieService(storage, config).handler)
    sys.stdout.write(f"{listener.address} {storage.statistics.damaged_records}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    run(serve(Path(sys.argv[1])))

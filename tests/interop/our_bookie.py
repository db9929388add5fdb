"""One of our bookies as a process: python -m tests.interop.our_bookie DIRECTORY NAME ADDRESS ZOOKEEPER [NAME=NUMBER…]

It says its id when it serves, and ends when it is killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from kvstore.bookie import Bookie, BookieConfig
from kvstore.env.real import real_env, run
from kvstore.meta.zookeeper.store import ZooKeeperStore


async def serve(directory: str, name: str, address: str, zookeeper: str, *settings: str) -> None:
    numbers: dict[str, Any] = {key: float(value) for key, _, value in (each.partition("=") for each in settings)}
    whole = {key: int(value) if value.is_integer() else value for key, value in numbers.items()}
    config = BookieConfig(name=name, listen=address, reserve_bytes=0, **whole)
    bookie = Bookie(real_env(Path(directory)), config, await ZooKeeperStore.connect(zookeeper))
    await bookie.start()
    sys.stdout.write(f"{bookie.id}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    run(serve(*sys.argv[1:]))

"""One of our bookies as a process: python -m tests.interop.our_bookie DIRECTORY NAME ADDRESS ZOOKEEPER [NAME=VALUE…]

Values are numbers, of the bookie's settings, its id, its zone, or files of its TLS: cert, key and ca, and
verify_clients=1. It says its id when it serves, and ends when it is killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from kvstore.bookie import Bookie, BookieConfig
from kvstore.env.real import real_env, run
from kvstore.env.tls import Tls
from kvstore.meta.zookeeper.store import ZooKeeperStore


async def serve(directory: str, name: str, address: str, zookeeper: str, *settings: str) -> None:
    said = {key: value for key, _, value in (each.partition("=") for each in settings)}
    files = {key: Path(said.pop(key)) for key in ("cert", "key", "ca") if key in said}
    tls = Tls(**files, verify_clients=bool(said.pop("verify_clients", ""))) if files else None
    given, zone = said.pop("id", ""), said.pop("zone", "")
    numbers: dict[str, Any] = {key: float(value) for key, value in said.items()}
    whole = {key: int(value) if value.is_integer() else value for key, value in numbers.items()}
    config = BookieConfig(name=name, id=given, zone=zone, listen=address, reserve_bytes=0, **whole)
    bookie = Bookie(real_env(Path(directory), tls=tls), config, await ZooKeeperStore.connect(zookeeper))
    await bookie.start()
    sys.stdout.write(f"{bookie.id}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    run(serve(*sys.argv[1:]))

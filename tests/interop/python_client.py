"""Our ledger client as its own process.

python -m tests.interop.python_client write ZOOKEEPER            writes until it is killed; says which ledger, then
                                                                 each entry that is confirmed
python -m tests.interop.python_client recover ZOOKEEPER LEDGER   recovers and closes; says the last entry
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvstore.env.ports import Env
from kvstore.env.real import real_env
from kvstore.errors import StoreError
from kvstore.meta.bookies import BookieView
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.zookeeper.store import ZooKeeperStore
from kvstore.types import LedgerId, PartitionId
from kvstore.wal.bookies import BookieClients
from kvstore.wal.choice import BookieChoice
from kvstore.wal.config import LogConfig
from kvstore.wal.creator import LedgerCreator
from kvstore.wal.handle import LedgerHandle, LedgerPorts
from kvstore.wal.new_ids import NewLedgerIds
from kvstore.wal.opener import LedgerTakeover

IN_FLIGHT = 8


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@asynccontextmanager
async def client(zookeeper: str) -> AsyncIterator[tuple[Env, LedgerPorts, LedgerCreator]]:
    """Everything a ledger client needs, on a real cluster."""
    with tempfile.TemporaryDirectory() as directory:
        env = real_env(Path(directory))
        store = await ZooKeeperStore.connect(zookeeper)
        view = BookieView(store)
        await view.start(env.nursery)
        bookies = BookieClients(env, view.address)
        choice = BookieChoice(view, store, clock=env.clock, random=env.random)
        ledgers = LedgerStore(store)
        ids = NewLedgerIds(store, bookies, choice, ClusterIdentity(store), clock=env.clock, nursery=env.nursery)
        creator = LedgerCreator(ids, ledgers, choice, LogConfig(), clock=env.clock, random=env.random)
        try:
            yield env, LedgerPorts(env.clock, bookies, ledgers, choice), creator
        finally:
            bookies.close()
            await env.nursery.close()
            await store.close()


async def write(zookeeper: str) -> None:
    async with client(zookeeper) as (env, ports, creator):
        metadata = await creator.create(PartitionId("p1"), LedgerId(-1))
        say(f"ledger {metadata.ledger}")
        handle = LedgerHandle(metadata, ports, env.nursery, on_halt=lambda error: say(f"halted {error!r}"))
        slots = asyncio.Semaphore(IN_FLIGHT)
        entry = 0

        def confirmed(entry: int, error: StoreError | None) -> None:
            slots.release()
            say(f"confirmed {entry}" if error is None else f"failed {entry} {error!r}")

        while True:
            await slots.acquire()
            payload = f"entry {entry} ".encode() * 20
            handle.append(payload, lambda _position, _sent_at, error, entry=entry: confirmed(entry, error))
            entry += 1


async def recover(zookeeper: str, ledger: int) -> None:
    async with client(zookeeper) as (env, ports, _):
        takeover = LedgerTakeover(LedgerId(ledger), ports, env.nursery)
        await takeover.take_over()
        metadata = await takeover.close()
        say(f"closed {metadata.last_entry} {metadata.length}")


def main() -> None:
    match sys.argv[1:]:
        case ["write", zookeeper]:
            asyncio.run(write(zookeeper))
        case ["recover", zookeeper, ledger]:
            asyncio.run(recover(zookeeper, int(ledger)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()

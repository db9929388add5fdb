"""A BookKeeper cluster that exists before the store: a ZooKeeper, and bookies that are not nodes of the store."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from kvstore import config as toml
from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.devcluster.zookeeper import free_ports, start_standalone
from kvstore.env.secret import make_secret
from kvstore.meta import paths
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.registration import RegistrationClient
from kvstore.meta.zookeeper.store import ZooKeeperStore
from kvstore.server.config import NodeConfig, Role
from kvstore.types import BookieId, LedgerId, LedgerMetadata
from tests.waiting import PATIENCE_S, wait_until_blocking

T = TypeVar("T")


class Outside:
    """Bookies by id. Everything is killed by `end`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.bookies: dict[BookieId, subprocess.Popen[bytes]] = {}
        self.zookeeper = start_standalone(directory / "zookeeper", settings="minSessionTimeout=2000\n")
        self._secret = directory / "cluster.secret"
        make_secret(self._secret)

    @property
    def address(self) -> str:
        return self.zookeeper.address

    def ask(self, work: Callable[[ZooKeeperStore], Awaitable[T]]) -> T:
        """Run `work` on the metadata store, and return its result."""

        async def asked() -> T:
            store = await ZooKeeperStore.connect(self.address)
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(asked())

    def found(self) -> str:
        """Create a BookKeeper cluster without a key-value store. Return its instance id."""
        return self.ask(lambda store: LayoutStore(store).ensure(str(uuid.uuid4())))

    def add_ours(self, name: str) -> BookieId:
        """Start a node that is only a bookie and repairs nothing. Return its id once it accepts entries."""
        bookie, http = free_ports(2)
        home = self.directory / name
        home.mkdir()
        config = NodeConfig(
            id=name,
            data_dir=home,
            secret_file=self._secret,
            zookeeper=self.address,
            roles=(Role.BOOKIE,),
            bookie=f"127.0.0.1:{bookie}",
            http=f"127.0.0.1:{http}",
            autorecovery=AutorecoveryConfig(auditor=False, worker=False),
        )
        (home / "node.toml").write_text(toml.to_toml(config))
        command = [sys.executable, "-m", "kvstore", "node", "run", "--config", str(home / "node.toml")]
        with (home / "out").open("wb") as out:
            return self.add(subprocess.Popen(command, stdout=out, stderr=out))

    def add(self, process: subprocess.Popen[bytes]) -> BookieId:
        """Wait until a bookie that was just started is registered, and keep it."""
        found: set[BookieId] = set()

        def is_there() -> bool:
            assert process.poll() is None, f"the bookie has ended: see {self.directory}"
            found.update(self.writable() - set(self.bookies))
            return bool(found)

        try:
            wait_until_blocking(is_there, timeout_s=2 * PATIENCE_S, what="a bookie registers")
        except BaseException:
            process.kill()
            process.wait()
            raise
        self.bookies[found.pop()] = process
        return next(reversed(self.bookies))

    def writable(self) -> set[BookieId]:
        return set(self.ask(lambda store: RegistrationClient(store).bookies()).writable)

    def identity(self) -> dict[str, bytes]:
        """Return the znodes that identify the cluster and its bookies."""

        async def work(store: ZooKeeperStore) -> dict[str, bytes]:
            wanted = (paths.LAYOUT, paths.INSTANCE_ID, *(paths.cookie(each) for each in self.bookies))
            return {path: (await store.get(path))[0] for path in wanted}

        return self.ask(work)

    def kill(self, bookie: BookieId) -> None:
        """Kill the bookie with SIGKILL. It does not return."""
        process = self.bookies[bookie]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def ledgers(self) -> dict[LedgerId, LedgerMetadata]:
        """Return all ledgers."""

        async def work(store: ZooKeeperStore) -> dict[LedgerId, LedgerMetadata]:
            ledgers = LedgerStore(store)
            return {each: (await ledgers.read(each))[0] for each in await ledgers.list_ids()}

        return self.ask(work)

    def end(self) -> None:
        for bookie in self.bookies:
            self.kill(bookie)
        self.zookeeper.kill()

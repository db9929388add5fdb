"""ZooKeeper and our bookies as processes that tests kill and pause while Apache's programs use them."""

from __future__ import annotations

import asyncio
import signal
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any

from kvstore.devcluster.zookeeper import ZooKeeperProcess, free_ports, start_standalone
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.registration import RegistrationClient
from kvstore.meta.zookeeper.store import ZooKeeperStore
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata
from tests.interop import java
from tests.interop.java import Programs
from tests.interop.their_bookie import launch
from tests.waiting import wait_until

JAVA_SAYS_S = 60.0


class OurBookie:
    """One of our bookies, started by `Processes`."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.id = BookieId("")
        self._command = command
        self._log = log
        self.process: Process

    async def start(self) -> None:
        """Start the bookie, and return when it serves."""
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(*self._command, stdout=PIPE, stderr=log)
        assert self.process.stdout is not None
        async with asyncio.timeout(java.TIMEOUT_S):
            self.id = BookieId((await self.process.stdout.readline()).decode().strip())
        assert self.id, self._log.read_text()[-2000:]

    async def kill(self) -> None:
        """Kill the bookie with SIGKILL."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Processes:
    """An async context manager. `programs` has Apache's, configured for this cluster."""

    def __init__(self, directory: Path, bookies: int = 4, *settings: str) -> None:
        """`settings`: as tests.interop.our_bookie takes them."""
        self.directory = directory
        self.bookies: list[OurBookie] = []
        self.theirs: dict[BookieId, Popen[bytes]] = {}
        """Bookies of Apache's."""
        self.zookeeper: ZooKeeperProcess
        self.store: ZooKeeperStore
        self.ledgers: LedgerStore
        self.programs: Programs
        self._count = bookies
        self._settings = settings
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Processes:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        settings = "minSessionTimeout=2000\n"
        self.zookeeper = start_standalone(self.directory / "zookeeper", settings=settings)
        self._stack.callback(self.zookeeper.kill)
        self.store = await ZooKeeperStore.connect(self.zookeeper.address)
        self._stack.push_async_callback(self.store.close)
        await LayoutStore(self.store).ensure(str(uuid.uuid4()))
        self.ledgers = LedgerStore(self.store)
        quick = {"allowLoopback": "true", "rwRereplicateBackoffMs": "500", "openLedgerRereplicationGracePeriod": "1000"}
        self.programs = Programs(self.directory / "java", self.zookeeper.address, **quick)
        ports = free_ports(self._count)
        for number, port in enumerate(ports, 1):
            await self.add_bookie(f"b{number}", port)

    async def add_bookie(self, name: str, port: int, *settings: str, host: str = "127.0.0.1") -> OurBookie:
        """Start one more bookie, with its own settings in addition to the common ones."""
        where = [str(self.directory / name), name, f"{host}:{port}", self.zookeeper.address]
        command = [sys.executable, "-m", "tests.interop.our_bookie", *where, *self._settings, *settings]
        bookie = OurBookie(command, self.directory / f"{name}.log")
        await bookie.start()
        self._stack.push_async_callback(bookie.kill)
        self.bookies.append(bookie)
        return bookie

    async def add_their_bookie(self, *, quick: bool = True, **settings: str) -> BookieId:
        """Start a bookie of Apache's, as `launch` does."""
        client = RegistrationClient(self.store)
        before = set((await client.bookies()).writable)
        directory = self.directory / f"theirs{len(self.theirs) + 1}"
        directory.mkdir()
        process = launch(directory, self.zookeeper.address, quick=quick, **settings)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        new: set[BookieId] = set()

        async def is_there() -> bool:
            new.update(set((await client.bookies()).writable) - before)
            return bool(new)

        await wait_until(is_there, timeout_s=java.TIMEOUT_S, what="Apache's bookie registers")
        found = new.pop()
        self.theirs[found] = process
        return found

    async def addresses(self) -> dict[BookieId, str]:
        """The addresses at which the registered bookies listen."""
        return (await RegistrationClient(self.store).bookies()).all

    def bookie(self, bookie: BookieId) -> OurBookie:
        """Return the bookie with this id."""
        return next(each for each in self.bookies if each.id == bookie)

    async def metadata(self, ledger: LedgerId) -> LedgerMetadata:
        return (await self.ledgers.read(ledger))[0]

    def at_end(self, clean_up: Callable[[], Awaitable[None]]) -> None:
        """Run this right before the cluster ends."""
        self._stack.push_async_callback(clean_up)

    async def are_registered(self, *wanted: BookieId) -> None:
        """Wait until exactly these bookies are writable."""
        client = RegistrationClient(self.store)

        async def are_there() -> bool:
            return set((await client.bookies()).writable) == set(wanted)

        await wait_until(are_there, timeout_s=java.TIMEOUT_S, what=f"registered are {wanted}")

    def session(self, main: str, *arguments: str) -> list[str]:
        """Return the command line of one of tests/interop/sessions, on this cluster."""
        return self.programs.command(main, f"{self.zookeeper.address}/ledgers", *arguments)


class JavaWriter:
    """A running sessions/Writer.java."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.ledger = LedgerId(-1)
        self.confirmed = EntryId(-1)
        """The last entry that the writer has reported as confirmed."""
        self.end = ""
        """The last line of its output."""

    @classmethod
    async def start(cls, cluster: Processes, ensemble: int, write: int, ack: int, window: int = 100) -> JavaWriter:
        quorum = [str(each) for each in (ensemble, write, ack, window)]
        command = cluster.session("Writer", *quorum)
        writer = cls(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE))
        cluster.at_end(writer.kill)
        await writer._until(lambda: writer.ledger >= 0)
        return writer

    async def writes(self, entries: int) -> None:
        """Wait until this many more entries are confirmed."""
        wanted = self.confirmed + entries
        await self._until(lambda: self.confirmed >= wanted)

    async def stop(self) -> EntryId:
        """Let it close its ledger. Return the last entry."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        await self._until(lambda: bool(self.end))
        assert self.end.startswith("closed"), self.end
        await self._process.wait()
        return EntryId(int(self.end.split()[1]))

    async def kill(self) -> None:
        """Kill it with SIGKILL. Afterwards `confirmed` is its last report."""
        if self._process.returncode is None:
            self._process.kill()
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._take(line.decode().split())
        await self._process.wait()

    async def _until(self, condition: Any) -> None:
        assert self._process.stdout is not None
        async with asyncio.timeout(JAVA_SAYS_S):
            while not condition():
                line = (await self._process.stdout.readline()).decode().split()
                assert line, f"the writer ended: {self.end}"
                self._take(line)

    def _take(self, words: list[str]) -> None:
        match words:
            case ["ledger", number]:
                self.ledger = LedgerId(int(number))
            case ["confirmed", number]:
                self.confirmed = EntryId(int(number))
            case ["closed" | "failed", *_]:
                self.end = " ".join(words)

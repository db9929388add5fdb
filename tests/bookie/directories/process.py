"""A bookie in several directories as a separate process on a real disk: python -m tests.bookie.directories.process ROOT
DIRECTORIES [LOST]

Lists are separated by commas. Ledgers 1 to 20 are open and name the bookie. The process prints its address and its id.
Each line of its standard input names a directory that breaks: later writes below it fail with EIO. The process ends
with its input.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from errno import EIO
from pathlib import Path
from typing import Any

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.connections.service import BookieService
from kvstore.bookie.directories.gathering import gather
from kvstore.bookie.directories.spread import storage_of
from kvstore.env.real import real_env, run
from kvstore.errors import ConfigError, NoSuchNode
from kvstore.meta.cookies import Cookie, decode_cookie, encode_cookie
from kvstore.types import BookieId
from tests.bookie.directories.support import CLUSTER, Naming


class KeptCookies:
    """The cookies of the metadata store, in a file that outlives the process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self, bookie: BookieId) -> tuple[Cookie, int]:
        if not self._path.exists():
            raise NoSuchNode(bookie)
        version, _, cookie = self._path.read_bytes().partition(b"\n")
        return decode_cookie(cookie, what="the cookie"), int(version)

    async def write(self, cookie: Cookie, version: int | None) -> int:
        following = 0 if version is None else version + 1
        self._path.write_bytes(b"%d\n" % following + encode_cookie(cookie))
        return following

    async def age(self, _bookie: BookieId) -> tuple[int, int | None]:
        return 0, None  # nobody raises it here


class BreakableFile:
    def __init__(self, file: Any, disk: BreakableDisk, path: str) -> None:
        self._file, self._disk, self._path = file, disk, path

    def __getattr__(self, name: str) -> Any:
        self._disk.check(self._path)
        return getattr(self._file, name)


class BreakableDisk:
    """A real disk of which a directory breaks on request."""

    def __init__(self, disk: Any) -> None:
        self._disk = disk
        self.broken = "\0"

    def check(self, path: str) -> None:
        if f"{path}/".startswith(f"{self.broken}/"):
            raise OSError(EIO, f"{path}: the disk is broken")

    def open(self, path: str, *, create: bool = False) -> BreakableFile:
        self.check(path)
        return BreakableFile(self._disk.open(path, create=create), self, path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


async def serve(root: Path, directories: str, lost: str) -> None:
    env = real_env(root)
    disk = BreakableDisk(env.disk)
    env = replace(env, disk=disk)  # type: ignore[arg-type]
    config = BookieConfig(
        name="b1",
        listen="127.0.0.1:0",
        segment_bytes=1 << 20,
        reserve_bytes=0,
        journal_dirs=tuple(directories.split(",")),
        lost_dirs=tuple(lost.split(",")) if lost else (),
        index_dir="disk0/index",
    )
    meta = Naming()
    try:
        gathered = await gather(env, config, KeptCookies(root / "cookie"), CLUSTER, meta)  # type: ignore[arg-type]
    except ConfigError as error:
        sys.exit(f"refused: {error}")
    meta.me = gathered.identity.bookie
    for ledger in range(1, 21):
        meta.create(ledger)
    storage = storage_of(env, config, gathered, meta)
    await storage.start(gathered.identity.doubts)
    listener = await env.transport.listen(config.listen, BookieService(storage, config).handler)
    sys.stdout.write(f"{listener.address} {storage.bookie}\n")
    sys.stdout.flush()
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        disk.broken = line.strip()
        sys.stdout.write("broken\n")
        sys.stdout.flush()


if __name__ == "__main__":
    run(serve(Path(sys.argv[1]), sys.argv[2], *sys.argv[3:] or [""]))

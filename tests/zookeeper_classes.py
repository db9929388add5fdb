"""An archive of the classes that ZooKeeper loads, for the servers that tests start. With it, a start takes 0.6 s less
processor time. Java checks the archive, and ignores it with another Java or other jars."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path

from kazoo.client import KazooClient

from kvstore.devcluster import zookeeper
from kvstore.env.java import find_java
from tests.waiting import wait_until_blocking

FOLDER = Path(__file__).parent.parent / "build"


@cache
def use_archive() -> None:
    """Have all servers that this process starts later use the archive. The first process makes it."""
    java = find_java(os.environ).resolve()
    made_from = [java, java.stat().st_mtime_ns, *zookeeper.classpath(zookeeper.jars_folder())]
    archive = FOLDER / f"zookeeper-{sha256(repr(made_from).encode()).hexdigest()[:16]}.jsa"
    FOLDER.mkdir(exist_ok=True)
    with archive.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            _make(archive)
    if archive.exists():
        zookeeper._JAVA_FLAGS += (f"-XX:SharedArchiveFile={archive}",)


def _make(archive: Path) -> None:
    """Let a server do what tests ask of servers, and write the classes that it has loaded at its end."""
    plain = zookeeper._JAVA_FLAGS
    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        made = Path(scratch) / "classes.jsa"
        try:
            zookeeper._JAVA_FLAGS = (*plain, f"-XX:ArchiveClassesAtExit={made}")
            process = zookeeper.start_standalone(Path(scratch))
        finally:
            zookeeper._JAVA_FLAGS = plain
        client = KazooClient(process.address)
        client.start()
        client.create("/plain", b"", ephemeral=True)
        client.get_children("/", watch=lambda _: None)
        transaction = client.transaction()
        transaction.set_data("/plain", b"1")
        transaction.commit()
        client.stop()
        client.close()
        os.kill(process.pid, signal.SIGTERM)
        wait_until_blocking(lambda: not process.is_running(), what="end of the server, which writes its classes")
        if made.exists():  # a Java without an archive of its own classes writes none
            made.rename(archive)

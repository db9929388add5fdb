"""Starts a real ZooKeeper server from the jars that pyspark contains. Real processes, real time, blocking.

    <directory>/zoo.cfg  log4j2.xml  myid  zookeeper.pid  zookeeper.out  zookeeper.log  data/

All ports are on loopback. A detached server outlives the process that started it, and is found again by its directory.
"""

from __future__ import annotations

import fcntl
import importlib.util
import itertools
import os
import random
import re
import shutil
import socket
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

from kvstore.devcluster.store_process import (
    StoreProcess,
    found_or_none,
    launched,
    process_with_or_none,
    ready_or_killed,
)
from kvstore.env.files.private import private_folder, write_private
from kvstore.env.java import find_java
from kvstore.errors import ConfigError, Unavailable
from kvstore.extras import install_hint
from kvstore.places import is_same_place

VERSION_MIN = (3, 9, 5)
"""Earlier versions lose committed data, or skip the check of TLS host names."""
TICK_MS = 500
SESSION_TIMEOUT_MAX_MS = 60_000
_MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
_DATA_DIR = re.compile(r"^dataDir=(.*)/version-2$", re.MULTILINE)
_ASK_TIMEOUT_S = 1.0
_HOST = "127.0.0.1"
_PORTS = (10_000, 20_000)
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_given: set[int] = set()
"""Ports that this process has been given."""

_JARS = (
    *("zookeeper-[0-9]*", "zookeeper-jute-*", "audience-annotations-*", "metrics-core-*", "snappy-java-*"),
    *("slf4j-api-*", "log4j-api-*", "log4j-core-*", "log4j-slf4j2-impl-*", "commons-io-*", "commons-cli-*", "jline-2*"),
    *("netty-[a-su-z]*", "netty-transport-*"),
)
# ZooKeeper keeps its last 500 writes, of up to 1 MB each, in memory. A smaller heap ends after some hundred large
# writes.
_JAVA_FLAGS = (
    *("-Xms8m", "-Xmx768m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError"),
    *("-Djava.net.preferIPv4Stack=true", "-Dzookeeper.preAllocSize=4096"),
)
_CONFIG = f"""\
tickTime={TICK_MS}
initLimit=40
syncLimit=10
minSessionTimeout={2 * TICK_MS}
maxSessionTimeout={SESSION_TIMEOUT_MAX_MS}
maxClientCnxns=0
admin.enableServer=false
4lw.commands.whitelist=ruok,srvr,stat,mntr,cons,conf
autopurge.snapRetainCount=3
autopurge.purgeInterval=1
"""
_LOGGING = """\
<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="warn">
  <Appenders>
    <RollingFile name="file" fileName="{log}" filePattern="{log}.%i">
      <PatternLayout pattern="%d{{ISO8601}} %-5p [%t] %c{{1}}: %m%n"/>
      <SizeBasedTriggeringPolicy size="10 MB"/>
      <DefaultRolloverStrategy max="3"/>
    </RollingFile>
  </Appenders>
  <Loggers>
    <Root level="info"><AppenderRef ref="file"/></Root>
  </Loggers>
</Configuration>
"""


class ZooKeeperProcess(StoreProcess):
    """One running server, started by this process or found by its directory."""

    program = "ZooKeeper"
    logs = ("zookeeper.log", "zookeeper.out")

    @property
    def mark(self) -> str:
        return str(self.directory / "zoo.cfg")

    def is_ready(self) -> bool:
        """Return True if it serves clients; an ensemble's member does so only in a quorum. Another server at its
        address does not count."""
        found = _DATA_DIR.search(four_letters(self.address, "conf"))
        return found is not None and is_same_place(found[1], self.directory / "data")


def start_standalone(
    directory: Path,
    port: int = 0,
    *,
    detached: bool = False,
    settings: str = "",
    environ: Mapping[str, str] = os.environ,
) -> ZooKeeperProcess:
    """Start a single server with its files in `directory`, and wait until it serves. With `port` 0 it uses a free port.

    A `detached` server survives signals to this process's group. `settings` are more lines for zoo.cfg. Raises
    ConfigError without jars or Java, Unavailable.
    """
    directory = directory.resolve()
    process = _launch(directory, _HOST, port or free_port(), settings, detached=detached, environ=environ)
    return ready_or_killed([process])[0]


def start_ensemble(
    directory: Path, size: int = 3, *, environ: Mapping[str, str] = os.environ
) -> list[ZooKeeperProcess]:
    """Start an ensemble on free ports, each member in its own folder below `directory`, and wait until all serve."""
    directory = directory.resolve()
    ports = free_ports(3 * size)
    members = "".join(f"server.{i + 1}={_HOST}:{ports[3 * i + 1]}:{ports[3 * i + 2]}\n" for i in range(size))
    processes: list[ZooKeeperProcess] = []
    for i in range(size):
        folder = directory / f"zookeeper-{i + 1}"
        private_folder(folder)
        private_folder(folder / "data")
        write_private(folder / "data" / "myid", b"%d\n" % (i + 1))
        processes.append(_launch(folder, _HOST, ports[3 * i], members, detached=False, environ=environ))
    return ready_or_killed(processes)


def restart(process: ZooKeeperProcess, *, environ: Mapping[str, str] = os.environ) -> ZooKeeperProcess:
    """Start the server of `process`, which has ended, again with the same files and ports."""
    return _spawn(process.directory, process.address, detached=False, environ=environ)


def find_running(directory: Path) -> ZooKeeperProcess | None:
    """Return the server that runs in `directory`, even if another process started it, or None."""
    return found_or_none(ZooKeeperProcess, directory, _unrecorded_or_none)


def _unrecorded_or_none(directory: Path) -> tuple[int, str] | None:
    """Return pid and address of the directory's server that no file records, because its starter was killed at that
    moment. A second server would write to the same data."""
    try:
        text = (directory / "zoo.cfg").read_text(encoding="utf-8")
    except OSError:
        return None
    port = re.search(r"^clientPort=(\d+)$", text, re.MULTILINE)
    found = process_with_or_none(_MAIN, str(directory / "zoo.cfg"))  # not an editor of that file
    return None if port is None or found is None else (found[0], f"{_HOST}:{port[1]}")


def _launch(
    directory: Path, host: str, port: int, settings: str, *, detached: bool, environ: Mapping[str, str]
) -> ZooKeeperProcess:
    private_folder(directory)
    private_folder(directory / "data")
    where = f"dataDir={_java_text(str(directory / 'data'))}\nclientPortAddress={host}\nclientPort={port}\n"
    write_private(directory / "zoo.cfg", (_CONFIG + where + settings).encode())
    log = escape(str(directory / "zookeeper.log"), {'"': "&quot;"})
    write_private(directory / "log4j2.xml", _LOGGING.format(log=log).encode())
    return _spawn(directory, f"{host}:{port}", detached=detached, environ=environ)


def _java_text(value: str) -> str:
    """Return a value for a file of Java properties, which is read as ISO 8859-1 with backslash escapes."""
    units = value.encode("utf-16-be")
    codes = [int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2)]
    return "".join("\\\\" if chr(code) == "\\" else chr(code) if code < 128 else f"\\u{code:04x}" for code in codes)


def _spawn(directory: Path, address: str, *, detached: bool, environ: Mapping[str, str]) -> ZooKeeperProcess:
    command = [
        *(str(find_java(environ)), *_JAVA_FLAGS, f"-Dlog4j2.configurationFile={directory / 'log4j2.xml'}"),
        *("-cp", os.pathsep.join(map(str, classpath(jars_folder())))),
        *(_MAIN, str(directory / "zoo.cfg")),
    ]
    environ = {**environ, "LC_ALL": "C.UTF-8"}  # tells Java the encoding of file names
    return launched(ZooKeeperProcess, directory, address, command, detached=detached, environ=environ)


def jars_folder() -> Path:
    """Return the folder with ZooKeeper's jars: the one of this environment, or else that of pyspark. Raises ConfigError
    if there is neither."""
    if own_jars().is_dir():
        return own_jars()
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise ConfigError(
            f"ZooKeeper's jars come with pyspark: {install_hint('local')}, or name a ZooKeeper with --zookeeper"
        )
    return Path(found.origin).parent / "jars"


def own_jars() -> Path:
    """Return the folder of this environment into which `scripts/setup.sh --local` unpacks ZooKeeper's jars. They are
    18 MB of pyspark's 490."""
    return Path(sys.prefix) / "share" / "kvstore" / "zookeeper"


def unpack_jars(archive: Path) -> None:
    """Replace `own_jars` by those in pyspark's source archive. Raises ConfigError if the archive has no suitable
    ZooKeeper."""
    folder = own_jars()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, tarfile.open(archive) as packed:
        unpacked = Path(scratch) / "jars"
        unpacked.mkdir()
        for member in packed:
            path = Path(member.name)
            content = packed.extractfile(member)
            if content and path.parent.name == "jars" and any(path.match(f"{pattern}.jar") for pattern in _JARS):
                with (unpacked / path.name).open("wb") as file:
                    shutil.copyfileobj(content, file)
        classpath(unpacked)
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.rename(folder)


def classpath(jars: Path) -> list[Path]:
    """Return the jars that a server needs. Raises ConfigError without a ZooKeeper of at least VERSION_MIN, or if Java
    cannot name the jars."""
    if os.pathsep in str(jars):
        raise ConfigError(
            f"{jars}: Java ends a path at {os.pathsep!r}; install the jars into a folder without it in its path"
        )
    servers = [match for path in jars.glob("zookeeper-*.jar") if (match := _SERVER_JAR.fullmatch(path.name))]
    versions = sorted(tuple(map(int, match.groups())) for match in servers)
    if len(versions) != 1 or versions[0] < VERSION_MIN:
        found = ", ".join(".".join(map(str, version)) for version in versions) or "none"
        raise ConfigError(f"expected one ZooKeeper {'.'.join(map(str, VERSION_MIN))} or newer in {jars}, got {found}")
    return sorted({path for pattern in _JARS for path in jars.glob(f"{pattern}.jar")})


_SERVER_JAR = re.compile(r"zookeeper-(\d+)\.(\d+)\.(\d+)\.jar")


def four_letters(address: str, command: str) -> str:
    """Return a server's reply to a four-letter command; empty without a reply."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_ASK_TIMEOUT_S) as connection:
            connection.sendall(command.encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode(errors="replace")
    except OSError:
        return ""


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return free ports of loopback outside of the kernel's range for outgoing connections. An outgoing connection
    could take such a port before its server has started, or while it restarts. Other callers of this function, in any
    process, do not get these ports as long as this process runs."""
    outgoing, ports = outgoing_ports(), range(*_PORTS)
    begin = random.randrange(len(ports))
    candidates = (port for port in itertools.chain(ports[begin:], ports[:begin]) if port not in outgoing)
    takeable = (port for port in candidates if port not in _given and _is_free(port) and _is_claimed(port))
    found = list(itertools.islice(takeable, count))
    _given.update(found)
    if len(found) < count:
        raise Unavailable(f"expected {count} free ports from {_PORTS[0]} to {_PORTS[1]}, got {len(found)}")
    return found


def outgoing_ports() -> range:
    """Return the ports that the kernel uses for outgoing connections; empty if unknown."""
    try:
        first, last = map(int, _OUTGOING.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return range(0)
    return range(first, last + 1)


@cache
def _claims() -> int:
    """Return a file in which each process locks a byte for each of its ports."""
    path = Path(tempfile.gettempdir()) / f"kvstore-ports-{os.getuid()}.lock"
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _is_claimed(port: int) -> bool:
    """Reserve the port for this process until it ends. Return False if another process has reserved it."""
    try:
        fcntl.lockf(_claims(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except BlockingIOError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True

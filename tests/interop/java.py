"""Apache BookKeeper's own programs: their jars, their configuration, their shell. Real processes.

`python -m tests.interop.java` fetches the jars unless they are installed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
VERSIONS = ("4.17.2", "4.18.0")
"""Versions of Apache BookKeeper. 4.18 has other classes for its messages, and logs in another way."""
VERSION = os.environ.get("KVSTORE_INTEROP_VERSION", VERSIONS[-1])
"""The version that this process uses."""
PLACE = ROOT / ".interop" / VERSION
JARS = PLACE / "jars"
POM = Path(__file__).with_name("pom.xml")
SESSIONS = Path(__file__).with_name("sessions")
CLASSES = PLACE / "classes"
PULSAR = "4.0.7"
"""Version of Apache Pulsar, whose long-term support line is 4.0."""
PULSAR_PLACE = ROOT / ".interop" / f"pulsar-{PULSAR}"
PULSAR_JARS, PULSAR_CLASSES = PULSAR_PLACE / "jars", PULSAR_PLACE / "classes"
PULSAR_SOURCES = Path(__file__).with_name("pulsar")
SHELL = "org.apache.bookkeeper.bookie.BookieShell"
SERVER = "org.apache.bookkeeper.server.Main"
TIMEOUT_S = 120.0

QUICK = "-XX:TieredStopAtLevel=1"
"""Java flag for a faster start, at the cost of peak speed."""
_FLAGS = [
    "-Xmx512m",
    "-XX:+UseSerialGC",
    QUICK,
    "-Djava.net.preferIPv4Stack=true",
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in ("java.nio", "jdk.internal.misc", "java.io")),
    "--add-opens=java.base/java.util.zip=ALL-UNNAMED",
]
LOGGING = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="error">
  <Appenders>
    <Console name="console" target="SYSTEM_OUT">
      <PatternLayout pattern="%-5level %logger{1} %msg %X%n%throwable"/>
    </Console>
  </Appenders>
  <Loggers>
    <Root level="info"><AppenderRef ref="console"/></Root>
  </Loggers>
</Configuration>
"""


def is_installed() -> bool:
    """Return True if the jars are installed and Java runs them."""
    return any(JARS.glob("bookkeeper-server-*.jar")) and shutil.which("javac") is not None


def install() -> None:
    """Fetch the jars by Maven. Raises CalledProcessError."""
    asked = ["-f", str(POM), f"-Dbookkeeper={VERSION}", "dependency:copy-dependencies"]
    subprocess.run(["mvn", "-q", "-B", *asked], check=True, timeout=900)


def has_pulsar() -> bool:
    """Return True if Pulsar's jars are there and a Java runs them."""
    return any(PULSAR_JARS.glob(f"pulsar-broker-{PULSAR}.jar")) and shutil.which("javac") is not None


def install_pulsar() -> None:
    """Fetch Pulsar's jars by Maven. Raises CalledProcessError."""
    asked = ["-f", str(PULSAR_SOURCES / "pom.xml"), f"-Dpulsar={PULSAR}", "dependency:copy-dependencies"]
    subprocess.run(["mvn", "-q", "-B", *asked], check=True, timeout=900)


def compile_sessions() -> None:
    """Compile our own Java for BookKeeper's classes, if it has changed since. Raises CalledProcessError."""
    _compile(SESSIONS, JARS, CLASSES)


def compile_pulsar() -> None:
    """Compile our own Java for Pulsar's classes, if it has changed since. Raises CalledProcessError."""
    _compile(PULSAR_SOURCES, PULSAR_JARS, PULSAR_CLASSES)


def _compile(sources: Path, jars: Path, classes: Path) -> None:
    files = sorted(sources.glob("*.java"))
    made = classes / "made"
    if made.exists() and made.stat().st_mtime > max(file.stat().st_mtime for file in files):
        return
    classes.mkdir(parents=True, exist_ok=True)
    subprocess.run(["javac", "-cp", f"{jars}/*", "-d", str(classes), *map(str, files)], check=True, timeout=300)
    made.touch()


def pulsar_command(main: str, *arguments: str, flags: Sequence[str] = ()) -> list[str]:
    """Return the command line that runs a class of Pulsar's jars or of ours. `flags`: Java's, which override others."""
    return ["java", *_FLAGS, *flags, "-cp", f"{PULSAR_JARS}/*:{PULSAR_CLASSES}", main, *arguments]


def run_pulsar(main: str, *arguments: str) -> Output:
    """Run a class of Pulsar's jars or of ours to its end. Raises TimeoutExpired."""
    command = pulsar_command(main, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return Output(done.returncode, done.stdout + done.stderr)


def entry(number: int, *, by_bookie: bool = False) -> str:
    """Return the words by which `readledger` shows an entry, read by the client or from one bookie."""
    if VERSION >= "4.18":
        return f"entryId={number},"
    return f"Eid={number} " if by_bookie else f"Eid={number},"


def listed(ledger: int) -> str:
    """Return the words by which `listledgers -m` shows a ledger."""
    return f"ledgerId={ledger}," if VERSION >= "4.18" else f"ledgerID: {ledger}"


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a program and its exit code."""

    code: int
    text: str

    def lines(self, containing: str) -> list[str]:
        return [line for line in self.text.splitlines() if containing in line]


class Programs:
    """Apache's programs on one cluster."""

    def __init__(self, directory: Path, zookeeper: str, **settings: str) -> None:
        """`zookeeper`: host:port. `settings`: more lines of the configuration file."""
        directory.mkdir(parents=True, exist_ok=True)
        self._logging = directory / "log4j2.xml"
        self._logging.write_text(LOGGING)
        self.conf = directory / "bk.conf"
        lines = {"metadataServiceUri": f"zk://{zookeeper}/ledgers", **settings}
        self.conf.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))

    def command(self, main: str, *arguments: str) -> list[str]:
        """Return the command line that runs a class of the jars."""
        return [
            "java",
            *_FLAGS,
            f"-Dlog4j.configurationFile={self._logging}",
            "-cp",
            f"{JARS}/*:{CLASSES}",
            main,
            *arguments,
        ]

    async def shell(self, *arguments: str, timeout_s: float = TIMEOUT_S) -> Output:
        """Run one command of the shell."""
        return await self.run(SHELL, "-conf", str(self.conf), *arguments, timeout_s=timeout_s)

    async def run(self, main: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> Output:
        """Run a class to its end. Raises TimeoutError."""
        process = await asyncio.create_subprocess_exec(
            *self.command(main, *arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(timeout_s):
                out, _ = await process.communicate()
        except BaseException:
            process.kill()
            await process.wait()
            raise
        assert process.returncode is not None
        return Output(process.returncode, out.decode(errors="replace"))

    def server(self, log: Path, *, quick: bool = True) -> subprocess.Popen[bytes]:
        """Start a bookie of Apache's, as this configuration says; its output goes to `log`."""
        return self.daemon(SERVER, log, quick=quick)

    def daemon(self, main: str, log: Path, *, quick: bool = True) -> subprocess.Popen[bytes]:
        """Start a class that runs until it is killed."""
        command = self.command(main, "--conf", str(self.conf))
        with log.open("wb") as out:
            return subprocess.Popen(
                [word for word in command if quick or word != QUICK], stdout=out, stderr=subprocess.STDOUT
            )


if __name__ == "__main__":
    if not is_installed():
        install()
    if not has_pulsar():
        install_pulsar()

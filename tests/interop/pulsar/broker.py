"""Apache Pulsar's broker on the bookies of `Processes`, set up with the commands of docs/how-to/run-apache-pulsar.md.
Real processes."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Mapping
from pathlib import Path

from kvstore.devcluster.zookeeper import free_ports
from tests.interop import java
from tests.interop.processes import Processes
from tests.pages import Line, blocks
from tests.waiting import wait_until

PAGE = "docs/how-to/run-apache-pulsar.md"
MAINS = {
    "bin/pulsar initialize-cluster-metadata": "org.apache.pulsar.PulsarClusterMetadataSetup",
    "bin/pulsar broker": "org.apache.pulsar.PulsarBrokerStarter",
}
"""The classes that Pulsar's script runs."""
FLAGS = (
    "-Xmx1g",
    "-XX:MaxDirectMemorySize=1g",
    "-XX:TieredStopAtLevel=4",
    "-Dio.netty.tryReflectionSetAccessible=true",
)
QUIET = {
    "brokerShutdownTimeoutMs": "0",
    "loadBalancerEnabled": "false",
    "metadataStoreSessionTimeoutMillis": "5000",
}
"""Settings that start a broker sooner after its predecessor was killed."""
START_S = 120.0


def page_lines(start: str) -> list[Line]:
    """Return the page's commands that begin with these words."""
    lines = [line for block in blocks(PAGE) if block.language == "sh" for line in block.lines]
    return [line for line in lines if line.command.startswith(start)]


def page_settings() -> dict[str, str]:
    """Return the settings of broker.conf on the page."""
    (block,) = [each for each in blocks(PAGE) if each.language == "properties"]
    pairs = (line.partition("=") for line in block.code.splitlines())
    return {name: value for name, _, value in pairs}


class Broker:
    """A broker on a cluster, and its addresses."""

    def __init__(self, cluster: Processes, settings: Mapping[str, str]) -> None:
        """`settings`: lines of broker.conf in addition to those of the page."""
        self.cluster = cluster
        self.port, self._web_port = free_ports(2)
        self.url = f"pulsar://127.0.0.1:{self.port}"
        self.process: Process
        self._home = cluster.directory / "broker"
        self._home.mkdir()
        (self._home / "log4j2.xml").write_text(java.LOGGING)
        ours = {
            "clusterName": "pulsar-1",
            "advertisedAddress": "127.0.0.1",
            "bindAddress": "127.0.0.1",
            "brokerServicePort": str(self.port),
            "webServicePort": str(self._web_port),
        }
        lines = {**page_settings(), **QUIET, **ours, **settings}
        self._conf = self._home / "broker.conf"
        self._conf.write_text("".join(f"{name}={self._here(value)}\n" for name, value in lines.items()))

    def _here(self, text: str) -> str:
        """Return a text of the page with the addresses of this cluster, whose bookies' metadata has no chroot."""
        address = self.cluster.zookeeper.address
        for separator in (",", ";"):
            text = text.replace(separator.join(f"zk{number}:2181" for number in (1, 2, 3)), address)
        text = text.replace("broker1:8080", f"127.0.0.1:{self._web_port}").replace("broker1:6650", self.url[9:])
        return text.replace("/kvstore", "").replace("conf/broker.conf", str(self._conf))

    def set_up(self) -> None:
        """Initialize Pulsar's metadata and write the racks of the bookies, as the page says."""
        (setup,) = page_lines("bin/pulsar initialize-cluster-metadata")
        main, *words = self._words(setup.command)
        done = java.run_pulsar(main, *words)
        assert done.code == 0, done.text[-3000:]
        (racks,) = page_lines("kvstore bookie racks")
        words = [sys.executable, "-m", "kvstore", *shlex.split(self._here(racks.command))[1:]]
        subprocess.run(words, check=True, timeout=java.TIMEOUT_S)

    def _words(self, command: str) -> list[str]:
        """Return the class and the arguments of a command of Pulsar's script."""
        script, main = next((each, main) for each, main in MAINS.items() if command.startswith(each))
        return [main, *shlex.split(self._here(command.removeprefix(script)))]

    async def start(self) -> None:
        """Start the broker, and return when its health check has written and read a message."""
        (command,) = page_lines("bin/pulsar broker")
        main, *words = self._words(command.command)
        flags = [*FLAGS, f"-Dlog4j.configurationFile={self._home / 'log4j2.xml'}"]
        with (self._home / "broker.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *java.pulsar_command(main, *words, flags=flags), stdout=log, stderr=STDOUT, cwd=self._home
            )
        self.cluster.at_end(self.kill)
        (check,) = page_lines("curl")
        await wait_until(lambda: self._is_healthy(check), timeout_s=START_S, what=f"healthy broker: {self._home}")

    async def _is_healthy(self, check: Line) -> bool:
        assert self.process.returncode is None, (self._home / "broker.log").read_text()[-3000:]
        url = self._here(shlex.split(check.command)[-1])

        def answer() -> str:
            try:
                with urllib.request.urlopen(url, timeout=10) as reply:
                    return str(reply.read().decode())
            except (urllib.error.URLError, OSError) as error:
                return str(error)

        return await asyncio.to_thread(answer) == check.text

    async def kill(self) -> None:
        """Kill the broker with SIGKILL."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class Session:
    """A running Messages.java."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, broker: Broker, *words: str) -> Session:
        """`words`: arguments of Messages.java; `URL` is the broker's address."""
        command = java.pulsar_command("Messages", *(broker.url if word == "URL" else word for word in words))
        with (broker.cluster.directory / "messages.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=log)

        async def kill() -> None:
            if process.returncode is None:
                process.kill()
            await process.wait()

        broker.cluster.at_end(kill)
        return cls(process)

    async def reports(self, word: str, least: int = 0) -> list[str]:
        """Wait for a line `word NUMBER…` with at least this number. Return its words."""
        assert self._process.stdout is not None
        async with asyncio.timeout(START_S):
            while line := (await self._process.stdout.readline()).decode().split():
                assert line[0] != "failed", line
                if line[0] == word and (word == "end" or int(line[1]) >= least):
                    return line
        raise AssertionError(f"Messages.java ended before it reported {word}")

    async def stop(self) -> list[str]:
        """Let the producer end. Return the words of its last line."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        said = await self.reports("end")
        await self._process.wait()
        return said


def disk_bytes(directory: Path) -> int:
    """Return the bytes that the files below a directory occupy on the disk."""
    found = 0
    for path in directory.rglob("*"):
        try:
            found += path.stat().st_blocks * 512
        except FileNotFoundError:  # a segment that was deleted meanwhile
            continue
    return found

"""The floor has the same guarantees as the store: real processes, syncs and sockets. Two of three acknowledge."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import hiredis
import psutil
import pytest

from kvstore.env.syncs import Done
from kvstore.partition.state.engine_rocks import RocksEngine
from kvstore.ring.hashing import MURMUR3
from loadtest import floor_member
from loadtest.bench import peers
from loadtest.floor_member import Link, Member
from tests.conftest import ROOT
from tests.waiting import PATIENCE_S, wait_until, wait_until_blocking

SILENCE_S = 0.5
"""A SET that two have acknowledged is answered long before."""
LED_BY = [next(b"%d" % n for n in range(100) if MURMUR3.token_of(b"%d" % n) % 3 == process) for process in range(3)]
"""For each process a key that it leads."""


class Client:
    """One connection to an endpoint."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), PATIENCE_S)
        self._reader = hiredis.Reader()

    def ask(self, *words: bytes, timeout_s: float = PATIENCE_S) -> object:
        """Return the reply, also if it is an error. Raises TimeoutError."""
        return self.ask_all([words], timeout_s=timeout_s)[0]

    def ask_all(self, commands: list[tuple[bytes, ...]], *, timeout_s: float = PATIENCE_S) -> list[object]:
        self._socket.settimeout(timeout_s)
        pack: Any = hiredis.pack_command
        self._socket.sendall(b"".join(map(pack, commands)))
        replies: list[object] = []
        while len(replies) < len(commands):
            if (reply := self._reader.gets()) is not False:
                replies.append(reply)
            else:
                self._reader.feed(self._socket.recv(1 << 16))
        return replies

    def close(self) -> None:
        self._socket.close()


class Replies:
    """A sink that keeps its messages."""

    def __init__(self) -> None:
        self.found: dict[int, bytes] = {}

    def answer(self, number: int, reply: bytes) -> None:
        self.found[number] = reply

    def flush(self) -> None:
        return

    async def has(self, number: int) -> bool:
        return self.found.get(number) == b"+OK\r\n"


async def has_row(engine: RocksEngine, key: bytes) -> bool:
    return engine.get(key) is not None


class HeldSyncs:
    """Syncs that end when the test decides."""

    def __init__(self) -> None:
        self.held: list[Done] = []

    def submit(self, fd: int, done: Done) -> None:
        self.held.append(done)

    def close(self) -> None:
        return


@pytest.fixture(params=[False, True], ids=["plain", "lookup"])
def running(request: pytest.FixtureRequest) -> Iterator[peers.Floor]:
    with peers.scratch() as folder, peers.floor(folder / "floor", is_looking_up=request.param) as found:
        yield found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until_blocking(lambda: is_gone(pid), what="the end of a process")


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def set_at(endpoint: str, key: bytes, value: bytes) -> object:
    with closing(Client(endpoint)) as client:
        return client.ask(b"SET", key, value)


def is_refused_at(endpoint: str, key: bytes) -> bool:
    """Return whether the key has no leader, once the endpoint has noticed that the leader has ended."""
    return "has ended" in str(set_at(endpoint, key, b"refused"))


@pytest.mark.cluster
def test_value_set_at_one_endpoint_is_read_at_all(running: peers.Floor) -> None:
    clients = [Client(endpoint) for endpoint in running.endpoints]
    for number, client in enumerate(clients):
        keys = [b"%d-%d" % (number, n) for n in range(100)]
        assert client.ask_all([(b"SET", key, b"v" + key) for key in keys]) == [b"OK"] * 100
        assert client.ask_all([(b"SET", key, b"w" + key) for key in keys]) == [b"OK"] * 100
        for reader in clients:
            assert reader.ask_all([(b"GET", key) for key in keys]) == [b"w" + key for key in keys]
    assert clients[0].ask(b"GET", b"nobody's") is None
    assert clients[0].ask(b"PING") == b"PONG"
    assert "expected SET key value" in str(clients[0].ask(b"GET", b"a", b"b"))
    for client in clients:
        client.close()


@pytest.mark.cluster
def test_two_acknowledge_without_the_third_and_one_alone_does_not(running: peers.Floor) -> None:
    kill(running.pids[2])
    for endpoint in running.endpoints[:2]:
        assert [set_at(endpoint, key, b"two") for key in LED_BY[:2]] == [b"OK", b"OK"]
        wait_until_blocking(partial(is_refused_at, endpoint, LED_BY[2]))
    kill(running.pids[1])
    with closing(Client(running.endpoints[0])) as client, pytest.raises(TimeoutError):
        client.ask(b"SET", LED_BY[0], b"alone", timeout_s=SILENCE_S)
    wait_until_blocking(partial(is_refused_at, running.endpoints[0], LED_BY[1]))
    with closing(Client(running.endpoints[0])) as client:
        assert client.ask(b"GET", LED_BY[0]) == b"two"


@pytest.mark.cluster
def test_three_end_with_what_started_them(running: peers.Floor) -> None:
    kill(running.pid)
    wait_until_blocking(lambda: all(map(is_gone, running.pids)), what="the end of the three processes")


@pytest.mark.parametrize("is_looking_up", [False, True])
async def test_all_three_write_confirmed_records_and_the_order_of_new_keys(
    is_looking_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floor_member, "JOURNAL_BYTES", 4 << 20)
    members = [Member(n, tmp_path / str(n), is_looking_up=is_looking_up) for n in range(3)]
    loop = asyncio.get_running_loop()
    for member in members:
        server = await loop.create_server(partial(Link, member), "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        for other in members[member.number + 1 :]:
            await loop.create_connection(partial(Link, other, member.number), *address)
        await member.has_links.wait()
        server.close()
    sink = Replies()
    for number, (key, value) in enumerate([(b"a", b"1"), (b"a", b"2"), (b"b", b"3"), (b"c", b"4")]):
        members[0].lead.put(key, value, sink, number)
        await wait_until(partial(sink.has, number))
    for member in members:
        engine = member.rows[0].engine
        keys = [b"da", b"db", b"oa", b"ob"]
        await wait_until(partial(has_row, engine, b"db"))  # the entry of `c` has confirmed it
        assert [row and row[25:] for row in engine.multi_get(keys[:2])] == [b"2", b"3"]
        assert engine.multi_get(keys[2:]) == ([b"", b""] if is_looking_up else [None, None])
    for member in members:
        for link in member.links.values():
            link.close()
        for rows in member.rows:
            rows.engine.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "new", "--port", "80"], "expected a port from 1024 to 65533, or 0, got 80"),
        (["--data", "new", "--port", "65535"], "expected a port from 1024 to 65533, or 0, got 65535"),
        (["--data", "new", "--port", "{taken}"], "cannot listen on 127.0.0.1:{taken}: Address already in use"),
        (
            ["--data", "full", "--port", "0"],
            "expected a new or empty directory, because nothing is recovered; full is not empty",
        ),
        (["--data", "full/file", "--port", "0"], "full/file: File exists"),
    ],
)
def test_impossible_option_is_refused_in_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "loadtest.floor", *(word.format(taken=port) for word in words)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert (done.stdout, done.stderr) == ("", f"floor: {message.format(taken=port)}\n")
    assert not (tmp_path / "new").exists()


def test_records_that_arrive_during_a_sync_form_the_next_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = HeldSyncs()
    stored: list[list[floor_member.Mark]] = []
    monkeypatch.setattr(floor_member, "best_syncs", lambda: syncs)
    monkeypatch.setattr(floor_member, "JOURNAL_BYTES", 4 << 20)
    journal = floor_member.Journal(tmp_path / "journal", stored.append, lambda: None)
    for entry in (1, 2, 3):
        journal.append(b"record", (0, entry))
        journal.flush()
    assert (len(syncs.held), stored) == (1, [])
    syncs.held.pop()(None)
    assert (len(syncs.held), stored) == (1, [[(0, 1)]])
    syncs.held.pop()(None)
    assert (len(syncs.held), stored) == (0, [[(0, 1)], [(0, 2), (0, 3)]])

"""The Redis callers of a drill detect each kind of wrong answer, and do not count a broken connection as one."""

from __future__ import annotations

import asyncio
import time

import pytest

from loadtest.drills import mixed
from loadtest.drills.mixed import MixedLoad
from tests.sim.judges.history import Result
from tests.sim.judges.linearizable import check_search
from tests.sim.versions import Violation
from tests.waiting import PATIENCE_S, wait_until

OPERATIONS = 1_500


class Store:
    """A dictionary behind a Redis endpoint; `lie` names the error that it makes sometimes."""

    def __init__(self, lie: str = "") -> None:
        self.lie, self.count = lie, 0
        self.rows: dict[bytes, bytes] = {}
        self.old: dict[bytes, bytes] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queued: list[list[bytes]] | None = None
        while words := await _command(reader):
            if words[0] == b"MULTI":
                queued, reply = [], b"+OK\r\n"
            elif words[0] == b"EXEC" and queued is not None:
                done = queued[:-1] if queued[0][0] == b"SET" and self._says("half") else queued
                replies = [self._do(each) for each in done] + [b"+OK\r\n"] * (len(queued) - len(done))
                reply, queued = b"*%d\r\n" % len(replies) + b"".join(replies), None
            elif queued is not None:
                queued.append(words)
                reply = b"+QUEUED\r\n"
            else:
                is_lost = self._says("broken")
                reply = b"" if is_lost and self.count % 2 else self._do(words)
                if is_lost:
                    break
            writer.write(reply)
        writer.close()

    def _says(self, lie: str) -> bool:
        self.count += 1
        return self.lie == lie and self.count % 23 == 0

    def _do(self, words: list[bytes]) -> bytes:
        verb, key, held = words[0], words[1], self.rows.get(words[1])
        match verb:
            case b"GET":
                return _bulk(self.old.get(key) if self._says("stale") else held)
            case b"SETNX" if held is not None:
                return b":0\r\n"
            case b"GETDEL" | b"DEL":
                if not self._says("resurrected"):
                    self.rows.pop(key, None)
                return _bulk(held) if verb == b"GETDEL" else b":%d\r\n" % (held is not None)
            case b"INCRBY":
                times = 2 if self._says("twice") else 1
                self._put(key, b"%d" % (int(held or 0) + times * int(words[2])))
                return b":%d\r\n" % (int(held or 0) + int(words[2]))
            case b"APPEND":
                self._put(key, (held or b"") + words[2])
                return b":%d\r\n" % len(self.rows[key])
        if not self._says("lost"):
            self._put(key, words[2])
        return _bulk(held) if verb == b"GETSET" else b":1\r\n" if verb == b"SETNX" else b"+OK\r\n"

    def _put(self, key: bytes, value: bytes) -> None:
        if key in self.rows:
            self.old[key] = self.rows[key]
        self.rows[key] = value


def _bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


async def _command(reader: asyncio.StreamReader) -> list[bytes]:
    try:
        count = int((await reader.readuntil(b"\r\n"))[1:])
        return [(await reader.readexactly(int((await reader.readuntil(b"\r\n"))[1:]) + 2))[:-2] for _ in range(count)]
    except EOFError:
        return []


async def loaded(store: Store, monkeypatch: pytest.MonkeyPatch) -> MixedLoad:
    """Return the findings of the callers."""
    monkeypatch.setattr(mixed, "PAUSE_S", 0.0)
    monkeypatch.setattr(mixed, "TIMEOUTS_S", (PATIENCE_S,))
    monkeypatch.setattr(mixed, "CONNECT_S", PATIENCE_S)
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0)
    address: tuple[str, int] = server.sockets[0].getsockname()[:2]
    load = MixedLoad([address], [b"tag"], time.perf_counter)
    load.start(b"run")

    async def enough() -> bool:
        return len(load.history) > OPERATIONS

    await wait_until(enough, what="operations")
    await load.stop()
    server.close()
    return load


@pytest.mark.parametrize("lie", ["stale", "lost", "twice", "half", "resurrected"])
async def test_store_with_wrong_answers_is_detected(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = await loaded(Store(lie), monkeypatch)
    with pytest.raises(Violation):
        check_search(load.history)


@pytest.mark.parametrize("lie", ["", "broken"])
async def test_correct_store_passes_though_connections_break(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = await loaded(Store(lie), monkeypatch)
    check_search(load.history)
    assert bool(load.history.counts()[Result.INFO]) is bool(lie)

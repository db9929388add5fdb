"""Requests never block the event loop, however many wait for kazoo's thread, and their number is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from kazoo.protocol.states import KeeperState

from kvstore.meta.zookeeper import session
from kvstore.meta.zookeeper.session import GuardedClient, NotSent
from tests.beside import in_time


def connected() -> tuple[GuardedClient, Any]:
    """A client that believes that it is connected and whose thread takes nothing, and its wake-up pipe."""
    client = GuardedClient(lambda *_: None, hosts="127.0.0.1:1")
    reader, client._connection._write_sock = client.handler.create_socket_pair()
    client._state = KeeperState.CONNECTED
    return client, reader


def test_requests_up_to_the_limit_do_not_block_and_one_more_is_refused() -> None:
    client, reader = connected()
    refused: list[NotSent] = []

    def ask() -> None:
        for number in range(session.QUEUED_MAX + 1):
            try:
                client._call(number, client.handler.async_result())
            except NotSent as error:
                refused.append(error)

    in_time(ask)
    assert [str(error) for error in refused] == [f"{session.QUEUED_MAX} requests wait already"]
    assert len(reader.recv(1 << 16)) == len(client._queue) == session.QUEUED_MAX
    reader.close()
    client._connection._write_sock.close()


def test_request_taken_from_the_queue_frees_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "QUEUED_MAX", 1)
    client, reader = connected()
    client._call("a", client.handler.async_result())
    with pytest.raises(NotSent, match="1 requests wait already"):
        client._call("b", client.handler.async_result())
    client._queue.popleft()
    client._call("b", client.handler.async_result())
    reader.close()
    client._connection._write_sock.close()


def test_connection_is_abandoned_however_many_requests_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "QUEUED_MAX", 0)
    client, reader = connected()
    client.drop_connection()
    assert [request for request, _ in client._queue] == [session._CONNECTION_DROP]
    reader.close()
    client._connection._write_sock.close()


def test_watch_is_armed_however_many_requests_wait_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "QUEUED_MAX", 0)
    client, reader = connected()
    client.get_async("/a", watch=print)
    assert len(client._queue) == 1
    with pytest.raises(NotSent):
        client.get_async("/a")
    reader.close()
    client._connection._write_sock.close()


def test_closed_pipe_end_writes_into_no_other_file() -> None:
    reader, writer = session.PipeHandler().create_socket_pair()
    writer.close()
    writer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        writer.send(b"x")
    reader.close()

"""ZooKeeper's servers by name: a lookup that hangs keeps nobody from the other servers."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from kvstore.env.dns.names import LOOKUP_S, NAMES
from kvstore.meta.zookeeper.session import GuardedClient
from tests.waiting import PATIENCE_S

HANGING = 5
"""Servers whose names hang: one lookup after the other would take this many times as long as one."""


def test_server_whose_name_hangs_does_not_block_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()

    def lookup(host: str, family: Any) -> list[str]:
        if host.startswith("hangs"):
            let_go.wait(PATIENCE_S)
        if host == "zk3.test" and family == socket.AF_INET:
            return ["127.0.0.1"]
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(NAMES, "_lookup", lookup)
    NAMES.after_fork_in_child()
    try:
        hanging = ",".join(f"hangs{number}.test:1" for number in range(HANGING))
        client = GuardedClient(lambda *_: None, hosts=f"{hanging},zk3.test:3,absent.test:4,[::1]:5")
        begun = time.monotonic()
        found = client._connection._expand_client_hosts()
        assert time.monotonic() - begun < HANGING * LOOKUP_S, "one after the other"
        assert sorted(found) == [("::1", "::1", 5), ("zk3.test", "127.0.0.1", 3)]
    finally:
        let_go.set()
        NAMES.after_fork_in_child()

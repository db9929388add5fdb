"""The sizes of partitions in a plan."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.errors import NotLeader
from kvstore.partition.state.commands import Code, Level
from kvstore.server.grpc.ring_admin import RingAdmin
from tests.server.grpc.test_ring_admin import Action, Node, admin, node

__all__ = ["admin", "node"]


async def test_record_size_is_asked_of_the_leader_when_a_replica_refuses(
    admin: RingAdmin, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first range begins with a tag of many keys. Its size was reported as 0 MiB."""

    def submitted(ops: Any, sink: Any, tokens: Any, ring_version: int = 0, partition: Any = None) -> None:
        (op,), (token,) = ops, tokens
        if op.code == Code.SCAN_TOKENS and op.level != Level.LINEARIZABLE:
            asyncio.get_running_loop().call_soon(sink.complete, token, NotLeader(partition))
        else:
            Node.submit(node, ops, sink, tokens, ring_version, partition)

    monkeypatch.setattr(node, "submit", submitted)
    answer = await admin.change(Action(action=Action.ADD, partitions=["p4"], dry_run=True))
    assert answer.bytes == pytest.approx(750 * 68, rel=0.06)

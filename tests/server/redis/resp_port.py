"""A Redis port on loopback, and a plain socket to talk to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from kvstore.env.logs.audit_lines import AuditLines
from kvstore.env.ports import Stream, StreamHandler, nothing_has_ended
from kvstore.ring.hashing import MURMUR3, KeyHash
from kvstore.server.access.identities import Access
from kvstore.server.config import Limits
from kvstore.server.redis.listener import Leave, RespServer
from kvstore.server.redis.plans import CommandError
from tests.server.backends import OneServer, one_server
from tests.waiting import PATIENCE_S


class Raw:
    """A socket that sends and receives bytes unchanged."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, data: bytes, expected: bytes) -> bytes:
        """Send `data` and return as many bytes as `expected` has."""
        self.writer.write(data)
        return await self.read(len(expected))

    async def read(self, count: int) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.readexactly(count)
            except asyncio.IncompleteReadError as error:
                return error.partial

    async def read_until(self, end: bytes) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readuntil(end)

    async def read_line(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readline()

    async def read_to_end(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    def close(self) -> None:
        self.writer.close()


class RespPort:
    """The Redis port, its backend and its address."""

    def __init__(self, server: RespServer, backend: OneServer, address: str) -> None:
        self.server, self.backend = server, backend
        self.host, _, port = address.rpartition(":")
        self.port = int(port)

    async def connect(self) -> Raw:
        return Raw(*await asyncio.open_connection(self.host, self.port))

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[Raw]:
        connection = await self.connect()
        try:
            yield connection
        finally:
            connection.close()


def refuse_peers(words: list[bytes], stream: Stream, leave: Leave) -> StreamHandler:
    raise CommandError("ERR no peers here")


@asynccontextmanager
async def redis_port(
    root: Path,
    *,
    partitions: int = 3,
    hash: KeyHash = MURMUR3,
    limits: Limits | None = None,
    report_syncs: Callable[[], None] = nothing_has_ended,
    access: Access | None = None,
    allows_flush: bool = False,
    transactions_across_slots: bool = False,
    audit: AuditLines | None = None,
) -> AsyncIterator[RespPort]:
    async with one_server(root, partitions, hash) as (env, backend):
        env = replace(env, report_syncs=report_syncs, audit=audit or AuditLines())
        facts = {"Kvstore": {"node_id": "n1"}}
        server = RespServer(
            env,
            backend,
            limits or Limits(),
            refuse_peers,
            lambda: facts,
            access,
            allows_flush=allows_flush,
            transactions_across_slots=transactions_across_slots,
        )
        address = await server.open("127.0.0.1:0")
        try:
            yield RespPort(server, backend, address)
        finally:
            backend.let_go()
            await server.close()
            server.logins.close()

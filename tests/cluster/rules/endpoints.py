"""Sends the requests of the table to a cluster, as the users of each endpoint do, and returns the answers."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import redis

from kvstore.client import AsyncClient, Batch, Client
from kvstore.errors import StoreError
from kvstore.proto import kv_pb2, kv_pb2_grpc
from tests import commands
from tests.cluster.harness import Cluster

MANY_GETS, LARGE_PAIRS = "<10,001 gets>", "<17 pairs of 1 MiB>"
_BYTES = re.compile(r"<([\d,]+) bytes>")
_PLACE = re.compile(r"<[^<>]+>")
_HEADER = re.compile(r"[A-Z][A-Za-z-]+: ")
Answer = Callable[[str], str]


def filled(request: str, elsewhere: str = "") -> str:
    """Return the request with its byte counts replaced by bytes, and with a key of another partition."""
    gets = json.dumps([{"operation": "get", "key": "k"}] * 10_001)[1:-1]
    pairs = " ".join(f"pair{number} {'7' * (1 << 20)}" for number in range(17)) if LARGE_PAIRS in request else ""
    request = request.replace(MANY_GETS, gets).replace(LARGE_PAIRS, pairs).replace("<key elsewhere>", elsewhere)
    return _BYTES.sub(lambda found: "7" * int(found[1].replace(",", "")), request)


def many(batch: Batch, count: int) -> Batch:
    for _ in range(count):
        batch.get(b"k")
    return batch


class Endpoints:
    """A cluster's endpoints, except Spark."""

    def __init__(self, cluster: Cluster, folder: Path, within: ExitStack) -> None:
        self._cluster, self._folder = cluster, folder
        self._client = within.enter_context(Client(cluster.url + "?timeout=20s"))
        self._redis = within.enter_context(cluster.redis("n1"))
        channel = within.enter_context(grpc.insecure_channel(cluster.url.removeprefix("kv://").partition(",")[0]))
        self._stub = kv_pb2_grpc.KVStub(channel)
        partition_of = self._client.cluster.partition_of
        keys = (f"k{number}" for number in count())
        self._elsewhere = next(key for key in keys if partition_of(key.encode()) != partition_of(b"k"))

    def store(self, value: bytes) -> None:
        """Set the key of the requests to this value, without an expiry."""
        self._client.put(b"k", value)

    def stored(self) -> tuple[bytes, int]:
        """Return the value and expiry of the key of the requests."""
        item = self._client.get(b"k")
        assert item is not None
        return item.value, item.expires_ms

    def others(self) -> list[bytes]:
        """Return all other keys."""
        return [key for key, _ in self._client.scan(keys_only=True) if key != b"k"]

    def redis(self, request: str) -> str:
        pipeline = self._redis.pipeline(transaction=False)
        for line in request.split("; "):
            pipeline.execute_command(*self._words(line))
        last = pipeline.execute(raise_on_error=False)[-1]
        if isinstance(last, redis.exceptions.ClusterCrossSlotError):
            return "CROSSSLOT"
        if isinstance(last, redis.ResponseError):
            return f"ERR {last}"
        return "nil" if last is None else repr(last)

    def grpc(self, request: str) -> str:
        names: dict[str, Any] = dict(kv_pb2.Code.items()) | dict(kv_pb2.Flag.items())
        names |= {"Operation": kv_pb2.Operation, "Options": kv_pb2.Options}
        for method in ("Get", "Put", "Delete", "Batch", "Page"):
            message, call = getattr(kv_pb2, f"{method}Request"), getattr(self._stub, method)
            names[method] = lambda message=message, call=call, **fields: call(message(**fields), timeout=20)
        try:
            eval(self._filled(request), names)  # the table's own text
        except grpc.RpcError as error:
            return str(error.code().name)  # type: ignore[attr-defined]
        return "OK"

    def http(self, request: str) -> str:
        parts = self._filled(request).split(" | ")
        method, target = parts.pop(0).split(" ", 1)
        headers = dict(parts.pop(0).split(": ", 1) for _ in range(len(parts)) if _HEADER.match(parts[0]))
        connection = HTTPConnection(*self._cluster.address("n1", "http"), timeout=20)
        try:
            connection.request(method, target, parts[0].encode() if parts else None, headers)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        return str(answer.status) if answer.status < 400 else f"{answer.status} {json.loads(body)['reason']}"

    def blocking(self, request: str) -> str:
        try:
            found = self._called(request, self._client)
            if isinstance(found, Iterator):
                next(found, None)
        except (StoreError, TypeError) as error:
            return type(error).__name__
        return "OK"

    def asyncio(self, request: str) -> str:
        async def ask() -> None:
            async with AsyncClient(self._cluster.url + "?timeout=20s") as client:
                await self._called(request, client)

        try:
            asyncio.run(ask())
        except (StoreError, TypeError) as error:
            return type(error).__name__
        return "OK"

    def command(self, request: str) -> str:
        words = self._words(request)
        if "--file" in words:
            content = words.pop(words.index("--file") + 1)
            file = self._folder / "value"
            file.write_text(content)
            words.insert(words.index("--file") + 1, str(file))
        done = commands.kvstore(*words, "--server", self._cluster.url.removeprefix("kv://"))
        return f"exit code {done.returncode}"

    def _called(self, request: str, client: Any) -> Any:
        names = {"client": client, "Batch": Batch, "many": many}
        return eval(self._filled(request), names)  # the table's own text

    def _words(self, line: str) -> list[str]:
        """Return the words of a command line. Bytes are filled in after the split, because shlex takes seconds for a
        MiB."""
        words = shlex.split(_PLACE.sub(lambda place: place[0].replace(" ", "_"), line))
        lines = (self._filled(word.replace("_", " ") if _PLACE.fullmatch(word) else word) for word in words)
        return [word for line in lines for word in (line.split() if line.startswith("pair0 ") else [line])]

    def _filled(self, request: str) -> str:
        return filled(request, self._elsewhere)


@contextmanager
def endpoints_of(cluster: Cluster, folder: Path) -> Iterator[Endpoints]:
    with ExitStack() as within:
        yield Endpoints(cluster, folder, within)

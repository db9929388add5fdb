"""The ways in which the clients of a bank use transactions: a Python client, the Redis port and the HTTP gateway.

Each front has the same few calls. An error says what the caller may conclude: a Refused was certainly not carried out,
and the outcome of any other StoreError is unknown. Conflict and ConditionFailed, of optimistic transactions, are
refusals too.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from random import Random
from typing import Any, NamedTuple, Protocol

import aiohttp
import orjson

from kvstore.client import AsyncClient, AsyncTransaction, ClientConfig, Level
from kvstore.errors import Conflict, OutcomeUnknown, Refused, StoreError, Unavailable
from kvstore.loadtest.resp import AsyncRespConnection, Lost, connect

CONNECT_S, READ_S = 1.0, 10.0
ATTEMPTS = 10
"""Maximum number of attempts of a transaction of the Python client that meets others."""
RETRY_S = 0.05
"""Pause of an HTTP client between two attempts of one request."""


class Verb(Enum):
    """The kinds of steps within a transaction."""

    GET = "get"
    PUT = "put"
    ADD = "increment"
    APPEND = "append"


class Step(NamedTuple):
    """One operation of a transaction. The value of an ADD is a decimal number."""

    verb: Verb
    key: bytes
    value: bytes = b""


Values = list[bytes | None]
Decide = Callable[[Values], Sequence[Step]]
"""Returns the steps for the values that were read. No steps: nothing is to be written."""


class Front(Protocol):
    """One client. `timeout_s` is the time after which the client gives up waiting for the answer."""

    async def get(self, key: bytes, *, session: bool = False) -> bytes | None:
        """Read one key. `session`: from any replica that has what this client has seen. Raises StoreError."""

    async def read(self, keys: Sequence[bytes]) -> Values:
        """Read keys at one moment. Raises StoreError."""

    async def write(self, steps: Sequence[Step], timeout_s: float) -> Values:
        """Carry out the steps at one moment. Return the values of its GETs. Raises StoreError."""

    async def rewrite(self, keys: Sequence[bytes], decide: Decide, timeout_s: float) -> None:
        """Read the keys, and carry out the steps unless a key has changed since. Raises StoreError."""

    async def close(self) -> None: ...


class ClientFront:
    """The asyncio client."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._client = AsyncClient(ClientConfig(endpoints=tuple(endpoints)))

    async def get(self, key: bytes, *, session: bool = False) -> bytes | None:
        client = await self._client.open()
        found = await client.get(key, level=Level.SESSION if session else Level.LINEARIZABLE, timeout_s=READ_S)
        return found.value if found else None

    async def read(self, keys: Sequence[bytes]) -> Values:
        async def look(transaction: AsyncTransaction) -> Values:
            found = await transaction.get_many(keys)
            return [found[key].value if key in found else None for key in keys]

        client = await self._client.open()
        return await client.transact(look, attempts=ATTEMPTS, timeout_s=READ_S)

    async def write(self, steps: Sequence[Step], timeout_s: float) -> Values:
        async def take(transaction: AsyncTransaction) -> Values:
            found: Values = []
            for step in steps:
                match step.verb:
                    case Verb.GET:
                        item = await transaction.get(step.key)
                        found.append(item.value if item else None)
                    case Verb.PUT:
                        transaction.put(step.key, step.value)
                    case Verb.ADD:
                        transaction.increment(step.key, int(step.value))
                    case Verb.APPEND:
                        transaction.append(step.key, step.value)
            return found

        client = await self._client.open()
        return await client.transact(take, attempts=ATTEMPTS, timeout_s=timeout_s)

    async def rewrite(self, keys: Sequence[bytes], decide: Decide, timeout_s: float) -> None:
        client = await self._client.open()
        async with client.transaction(timeout_s=timeout_s) as transaction:
            found = await transaction.get_many(keys)
            for step in decide([found[key].value if key in found else None for key in keys]):
                transaction.put(step.key, step.value)

    async def close(self) -> None:
        await self._client.close()


class RedisFront:
    """A connection to the Redis port of a node; after an error, to that of another one."""

    def __init__(self, addresses: Sequence[str], random: Random) -> None:
        self._addresses, self._random = addresses, random
        self._connection: AsyncRespConnection | None = None

    async def get(self, key: bytes, *, session: bool = False) -> bytes | None:
        (found,) = await self._ask_all([(b"GET", key)], READ_S, is_write=False)
        return _value_of(found)

    async def read(self, keys: Sequence[bytes]) -> Values:
        found = await self._execute([(b"GET", key) for key in keys], READ_S, is_write=False)
        return [_value_of(each) for each in found]

    async def write(self, steps: Sequence[Step], timeout_s: float) -> Values:
        found = await self._execute(map(_command_of, steps), timeout_s, is_write=True)
        return [_value_of(each) for step, each in zip(steps, found, strict=True) if step.verb is Verb.GET]

    async def rewrite(self, keys: Sequence[bytes], decide: Decide, timeout_s: float) -> None:
        watched, *found = await self._ask_all(
            [(b"WATCH", *keys), *((b"GET", key) for key in keys)], READ_S, is_write=False
        )
        _value_of(watched)
        steps = decide([_value_of(each) for each in found])
        if steps:
            await self._execute(map(_command_of, steps), timeout_s, is_write=True)
        else:
            await self._ask_all([(b"UNWATCH",)], READ_S, is_write=False)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _execute(self, commands: Iterable[Sequence[bytes]], timeout_s: float, *, is_write: bool) -> list[Any]:
        *_, last = await self._ask_all([(b"MULTI",), *commands, (b"EXEC",)], timeout_s, is_write=is_write)
        if isinstance(last, Exception):
            raise last
        if last is None:
            raise Conflict("EXEC: a watched key has changed")
        for each in last:
            if isinstance(each, Exception):  # the books tell whether the others were carried out
                raise OutcomeUnknown(f"an operation of a transaction failed: {each}")
        return list(last)

    async def _ask_all(self, commands: Sequence[Sequence[bytes]], timeout_s: float, *, is_write: bool) -> list[Any]:
        if self._connection is None or self._connection.is_lost:
            address = self._random.choice(self._addresses)
            try:
                self._connection = await connect(address, timeout_s=CONNECT_S, error_of=_error_of)
            except (OSError, TimeoutError) as error:
                raise Unavailable(f"{address}: {error or 'no reply'}") from None
        try:
            found = await self._connection.ask_all(commands, timeout_s=timeout_s)
        except Lost as error:
            raise (OutcomeUnknown if is_write else Unavailable)(str(error)) from None
        if any(isinstance(each, Unavailable) for each in found):
            self._connection.close()  # the next call asks another node
        return found


def _command_of(step: Step) -> Sequence[bytes]:
    match step.verb:
        case Verb.GET:
            return b"GET", step.key
        case Verb.PUT:
            return b"SET", step.key, step.value
        case Verb.ADD:
            return b"INCRBY", step.key, step.value
        case Verb.APPEND:
            return b"APPEND", step.key, step.value


def _value_of(reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply


def _error_of(text: str) -> StoreError:
    if text.startswith("UNKNOWN"):
        return OutcomeUnknown(text)
    return Unavailable(text) if text.startswith("CLUSTERDOWN") else Refused(text)


class HttpFront:
    """A session with the HTTP gateway of the nodes. It retries under the request's id, at any node."""

    def __init__(self, addresses: Sequence[str], random: Random) -> None:
        self._addresses, self._random = addresses, random
        self._id, self._sequences = uuid.UUID(int=random.getrandbits(128)).hex, itertools.count(1)
        self._token, self._seen_ms = "", ""
        self._http: aiohttp.ClientSession | None = None

    async def get(self, key: bytes, *, session: bool = False) -> bytes | None:
        return (await self._item(key, "session" if session else "linearizable"))[0]

    async def read(self, keys: Sequence[bytes]) -> Values:
        return await self.write([Step(Verb.GET, key) for key in keys], READ_S)

    async def write(self, steps: Sequence[Step], timeout_s: float) -> Values:
        return await self._transact([_json_of(step) for step in steps], timeout_s)

    async def rewrite(self, keys: Sequence[bytes], decide: Decide, timeout_s: float) -> None:
        found = [await self._item(key, "linearizable") for key in keys]
        steps = decide([value for value, _ in found])
        if not steps:
            return
        checks = [
            {"operation": "check", "key": key.decode()} | ({"if_version": version} if version else {"if_absent": True})
            for key, (_, version) in zip(keys, found, strict=True)
        ]
        await self._transact([*checks, *map(_json_of, steps)], timeout_s)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _item(self, key: bytes, level: str) -> tuple[bytes | None, int]:
        """Return the value and the version of a key; None and 0 if it is absent."""
        try:
            found = await self._ask("GET", f"/v1/keys/{key.decode()}?level={level}", READ_S, accept="application/json")
        except OutcomeUnknown as error:
            raise Unavailable(str(error)) from None
        return (found["value"].encode(), found["version"]) if found else (None, 0)

    async def _transact(self, operations: list[dict[str, Any]], timeout_s: float) -> Values:
        """Send the transaction until its outcome is known. Raises OutcomeUnknown if it is not within `timeout_s`."""
        until = time.monotonic() + timeout_s
        if not self._seen_ms:
            await self._item(b"any", "linearizable")  # which tells the cluster's time
        asked = f"client={self._id}; sequence={next(self._sequences)}; seen={self._seen_ms}"
        unknown: OutcomeUnknown | None = None
        refused: StoreError = Unavailable("no attempt was made in time")
        while (left_s := until - time.monotonic()) > 0:
            try:
                found = await self._ask(
                    "POST", "/v1/transaction", left_s, body=orjson.dumps({"operations": operations}), asked=asked
                )
            except Refused as error:
                # A retry that is refused does not know about an attempt whose outcome is unknown.
                if unknown is None and not isinstance(error, Unavailable):
                    raise
                refused = error
            except OutcomeUnknown as error:
                unknown = refused = error
            else:
                results = found["results"] if found else []
                gets = [result for each, result in zip(operations, results, strict=True) if each["operation"] == "get"]
                return [each["item"]["value"].encode() if each.get("item") else None for each in gets]
            await asyncio.sleep(RETRY_S)
        raise unknown or refused

    async def _ask(
        self, method: str, target: str, timeout_s: float, *, body: bytes = b"", asked: str = "", accept: str = "*/*"
    ) -> dict[str, Any] | None:
        """Send one request to some node. Return the JSON body; None if the key is absent. Raises StoreError."""
        if self._http is None:
            self._http = aiohttp.ClientSession()
        headers = {"Accept": accept} | ({"Kvstore-Token": self._token} if self._token else {})
        if body:
            headers |= {"Content-Type": "application/json", "Kvstore-Request": asked}
        url = f"http://{self._random.choice(self._addresses)}{target}"
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._http.request(method, url, data=body, headers=headers, timeout=timeout) as answer:
                found: dict[str, Any] = orjson.loads(await answer.read())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unavailable(f"{url}: {error!r}") from None
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            raise OutcomeUnknown(f"{url}: {error!r}") from None
        self._token = answer.headers.get("Kvstore-Token", self._token)
        self._seen_ms = answer.headers.get("Kvstore-Time-Ms", self._seen_ms)
        if answer.status == 200:
            return found
        if found["reason"] == "ABSENT":
            return None
        raise _failure_of(found)


def _json_of(step: Step) -> dict[str, Any]:
    made: dict[str, Any] = {"operation": step.verb.value, "key": step.key.decode()}
    if step.verb is Verb.ADD:
        return made | {"delta": int(step.value)}
    return made if step.verb is Verb.GET else made | {"value": step.value.decode()}


def _failure_of(body: dict[str, Any]) -> StoreError:
    """Return the error for the body of a failure."""
    text = f"{body['reason']}: {body['message']}"
    if body["outcome"] == "unknown":
        return OutcomeUnknown(text)
    if body["reason"] in ("CONFLICT", "CONDITION_FAILED"):
        return Conflict(text)
    return Unavailable(text) if "retry_after" in body else Refused(text)

"""Loads that are far from even, for a drill by seed: one hot key, large values, keys that all expire at once, pipelines
and transactions without measure. Errors are allowed; what is acknowledged and wrong is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

from loadtest.drills.mixed import Endpoint, NotDone, Unknown
from loadtest.drills.nemesis import Field, fault

HOT_CALLERS = 200
LASTS_S = 5.0
LARGE_BYTES = 1 << 20
LARGE_CALLERS = 6
MORTALS = 100_000
MORTALS_S = 40.0
AT_ONCE = 1_000
TIMEOUT_S = 10.0


class Held:
    """The values that a key may have according to the replies to its writes. No other client writes it."""

    def __init__(self) -> None:
        self._last: bytes | None = None
        self._unknown: set[bytes] = set()

    def note(self, value: bytes, reply: object) -> None:
        """Record the outcome of a write of `value`. A write with an Unknown outcome may be done at any later time."""
        if isinstance(reply, Unknown):
            self._unknown.add(value)
        elif not isinstance(reply, NotDone):
            self._last = value

    def allows(self, found: object) -> bool:
        """Return True if a read may find this value. A failed read shows nothing."""
        return isinstance(found, NotDone | Unknown) or found == self._last or found in self._unknown


async def _try(asking: Awaitable[object]) -> object:
    """Return the reply, or the error in its place, because None is a reply too."""
    try:
        return await asking
    except (NotDone, Unknown) as error:
        return error


def _shown(found: object) -> str:
    return f"{found!r:.50}"


def _endpoints(field: Field, count: int) -> list[Endpoint]:
    addresses = [field.cluster.address(node, "resp") for node in field.nodes]
    return [Endpoint(addresses[place % len(addresses)]) for place in range(count)]


def _key(field: Field, name: str) -> bytes:
    tag = field.random.choice(field.load.tags)
    return b"{%b}%b-%d" % (tag, name.encode(), time.time_ns())


@fault
async def hot_key(field: Field) -> None:
    """Let many callers increment one key. No increment may be lost or done twice."""
    key, until, endpoints = _key(field, "hot"), time.perf_counter() + LASTS_S, _endpoints(field, HOT_CALLERS)
    counts = {"done": 0, "unknown": 0}

    async def call(endpoint: Endpoint) -> None:
        while time.perf_counter() < until:
            try:
                await endpoint.ask([b"INCR", key], timeout_s=TIMEOUT_S)
                counts["done"] += 1
            except Unknown:
                counts["unknown"] += 1
            except NotDone:
                await asyncio.sleep(0.1)
        endpoint.close()

    await asyncio.gather(*map(call, endpoints))
    found = await _try(field.patiently(b"GET", key))
    if isinstance(found, NotDone | Unknown):
        field.wrong.append(f"{key!r}: {counts}, and nobody tells what is stored: {found}")
        return
    stored = int(found) if isinstance(found, bytes) else 0
    if not counts["done"] <= stored <= counts["done"] + counts["unknown"]:
        field.wrong.append(f"{key!r}: {counts} and stored {stored}")


@fault
async def large_values(field: Field) -> None:
    """Write and read values of a mebibyte through all nodes."""
    until = time.perf_counter() + LASTS_S

    async def call(endpoint: Endpoint) -> None:
        key, held = _key(field, "large"), Held()
        number = 0
        while time.perf_counter() < until:
            number += 1
            value = b"%010d" % number + bytes(LARGE_BYTES - 10)
            held.note(value, await _try(endpoint.ask([b"SET", key, value], timeout_s=TIMEOUT_S)))
            found = await _try(endpoint.ask([b"GET", key], timeout_s=TIMEOUT_S))
            if not held.allows(found):
                field.wrong.append(f"{key!r}: {len(value)} bytes were written, {_shown(found)} was read")
        await _try(endpoint.ask([b"DEL", key], timeout_s=TIMEOUT_S))
        endpoint.close()

    await asyncio.gather(*map(call, _endpoints(field, LARGE_CALLERS)))


@fault
async def mortals(field: Field) -> None:
    """Write very many keys that expire together. Afterwards none of them may exist."""
    (endpoint,), mark = _endpoints(field, 1), _key(field, "mortal")
    began, written = time.perf_counter(), 0
    expires = b"%d" % (time.time_ns() // 1_000_000 + 1_000 * int(MORTALS_S / 4))
    while written < MORTALS and time.perf_counter() - began < MORTALS_S / 5:
        sets = [[b"SET", b"%b-%d" % (mark, written + n), b"x", b"PXAT", expires] for n in range(AT_ONCE)]
        if isinstance(await _try(endpoint.ask(*sets, timeout_s=TIMEOUT_S)), NotDone | Unknown):
            await asyncio.sleep(0.2)
        written += AT_ONCE
    await asyncio.sleep(max(0.0, int(expires) / 1000 - time.time() + 0.1))
    for place in range(0, written, AT_ONCE * 10):
        keys = [b"%b-%d" % (mark, place + n) for n in range(0, AT_ONCE * 10, 100)]
        found = await _try(field.patiently(b"MGET", *keys))
        if isinstance(found, NotDone | Unknown):
            field.wrong.append(f"{mark!r}: nobody tells whether keys outlived their time: {found}")
            break
        if isinstance(found, list) and any(found):
            field.wrong.append(f"{mark!r}: {len([each for each in found if each])} keys outlived their time")
    endpoint.close()


@fault
async def huge_pipelines(field: Field) -> None:
    """Send ten thousand commands before reading the first reply. The replies must arrive in order."""

    async def call(endpoint: Endpoint) -> None:
        key, held = _key(field, "pipeline"), Held()
        for turn in range(3):
            values = [b"%d-%d" % (turn, number) for number in range(10 * AT_ONCE)]
            asking = endpoint.ask_all(
                *([b"SET", key, value] for value in values), [b"GET", key], timeout_s=3 * TIMEOUT_S
            )
            replies = await _try(asking)
            *written, found = replies if isinstance(replies, list) else [replies] * (len(values) + 1)
            for value, reply in zip(values, written, strict=True):
                held.note(value, reply)
            if not held.allows(found):
                field.wrong.append(f"{key!r}: {_shown(found)} at the end of a pipeline")
        endpoint.close()

    await asyncio.gather(*map(call, _endpoints(field, 3)))


@fault
async def huge_transactions(field: Field) -> None:
    """Send a thousand commands in MULTI. All of them or none may be done."""

    async def call(endpoint: Endpoint) -> None:
        base = _key(field, "many")
        keys, held = [b"%b-%d" % (base, number) for number in range(AT_ONCE)], Held()
        for value in (b"1", b"2", b"3"):
            sets = [[b"SET", key, value] for key in keys]
            held.note(value, await _try(endpoint.ask([b"MULTI"], *sets, [b"EXEC"], timeout_s=TIMEOUT_S)))
            gets = [[b"GET", key] for key in keys]
            found = await _try(endpoint.ask([b"MULTI"], *gets, [b"EXEC"], timeout_s=TIMEOUT_S))
            if isinstance(found, list) and len(set(found)) != 1:
                field.wrong.append(f"{base!r}: a transaction was half done: {set(found)}")
            elif not held.allows(found[0] if isinstance(found, list) else found):
                field.wrong.append(f"{base!r}: {_shown(found)} after the transaction that writes {value!r}")
        endpoint.close()

    await asyncio.gather(*map(call, _endpoints(field, 3)))

"""Shared keys under load, whose answers form a history that checkers judge. Also the functions that all drills need:
the outcome of an error, and the keys that have wrong values."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto
from typing import TypeVar

from kvstore.client import AsyncClient, Item
from kvstore.errors import ConditionFailed, OutcomeUnknown, Refused, StoreError
from tests.sim.judges.history import History, Kind, Pending

VERIFY_AT_ONCE = 2_000
VERIFY_S = 20.0
T = TypeVar("T")


class Outcome(Enum):
    """The outcome of one operation, as its caller knows it."""

    DONE = auto()
    NOT_MET = auto()
    """The condition was not met. That is an answer too."""
    REFUSED = auto()
    """Certainly not done."""
    UNKNOWN = auto()

    @property
    def is_answer(self) -> bool:
        return self in (Outcome.DONE, Outcome.NOT_MET)


class Registers:
    """Operations on shared keys by one client. `process` names a caller. After an unknown outcome a caller needs
    another name."""

    def __init__(self, client: AsyncClient) -> None:
        self.history = History(time.perf_counter)
        self.errors: Counter[str] = Counter()
        self._client = client

    async def get(self, key: bytes, process: str) -> Outcome:
        return await self._judged(self.history.begin(process, Kind.GET, key), self._client.get(key), _found)

    async def put(self, key: bytes, process: str, value: bytes) -> Outcome:
        pending = self.history.begin(process, Kind.PUT, key, value)
        return await self._judged(pending, self._client.put(key, value), _written)

    async def create(self, key: bytes, process: str, value: bytes) -> Outcome:
        pending = self.history.begin(process, Kind.CAS, key, value)
        return await self._judged(pending, self._client.put(key, value, if_absent=True), _written)

    async def delete(self, key: bytes, process: str) -> Outcome:
        return await self._judged(self.history.begin(process, Kind.DEL, key), self._client.delete(key), _written)

    async def compare_and_set(self, key: bytes, process: str, value: bytes) -> Outcome:
        """Read the key, and write it unless somebody else has written it since."""
        try:
            item = await self._client.get(key)
        except StoreError:
            return Outcome.REFUSED
        expected, version = (item.value, item.version) if item else (None, 0)
        pending = self.history.begin(process, Kind.CAS, key, value, expected=expected)
        return await self._judged(pending, self._client.put(key, value, if_version=version), _written)

    def failed(self, error: StoreError) -> Outcome:
        """Count an error, and return the outcome of the operation that it shows."""
        self.errors[type(error).__name__] += 1
        is_refused = isinstance(error, Refused) and not isinstance(error, OutcomeUnknown)
        return Outcome.REFUSED if is_refused else Outcome.UNKNOWN

    async def _judged(self, pending: Pending, work: Awaitable[T], done: Callable[[Pending, T], None]) -> Outcome:
        try:
            answer = await work
        except ConditionFailed as error:
            pending.fail(condition_failed=True, version=error.version or None)
            return Outcome.NOT_MET
        except StoreError as error:
            outcome = self.failed(error)
            if outcome is Outcome.UNKNOWN:
                pending.info()
            else:
                pending.fail()
            return outcome
        done(pending, answer)
        return Outcome.DONE


def _found(pending: Pending, item: Item | None) -> None:
    pending.ok(item.value if item else None, version=item.version if item else None)


def _written(pending: Pending, version: int) -> None:
    pending.ok(version=version or None)


async def differing(client: AsyncClient, wanted: Mapping[bytes, bytes | None]) -> list[bytes]:
    """Return the keys that do not have the expected value. The expected value None means that the key must not
    exist."""
    keys, wrong = list(wanted), []
    for start in range(0, len(keys), VERIFY_AT_ONCE):
        some = keys[start : start + VERIFY_AT_ONCE]
        found = await client.get_many(some, timeout_s=VERIFY_S)
        wrong += [key for key in some if (found[key].value if key in found else None) != wanted[key]]
    return wrong

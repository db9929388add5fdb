"""Holds the adds and keys that only a ledger's metadata can judge, while the metadata is read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from kvstore.bookie.backpressure import BackpressureGate
from kvstore.bookie.fencing import WriteVerdict, judge_by_metadata, judge_key_by_metadata, may_deny
from kvstore.bookie.rate_limited_log import RateLimitedLog
from kvstore.bookie.statistics import Statistics
from kvstore.env.ports import Nursery
from kvstore.errors import Corrupted, MetadataError
from kvstore.meta.ledger_ids import LedgerIdCount
from kvstore.proto.bookkeeper import PACKET_MAX
from kvstore.types import BookieId, LedgerId, LedgerMetadata

log = logging.getLogger(__name__)

ASK_S = 3.0
"""Longest wait for the metadata store in seconds. Clients treat a bookie as failed after five seconds."""
WAITING_MAX = 4096
"""Maximum number of adds that wait, over all ledgers."""
WAITING_BYTES_MAX = 32 << 20
AT_ONCE_MAX = 64
"""Maximum number of concurrent metadata reads. The whole node shares the metadata session, and unauthenticated peers
may name any number of ledgers."""


class LedgerAuthority(Protocol):
    """A source of the metadata store's current knowledge of ledgers."""

    async def metadata(self, ledger: LedgerId) -> LedgerMetadata | None:
        """Return the ledger's metadata as of now or later: everything committed before the call is seen. Return None if
        the ledger certainly does not exist. Raises MetadataError, Corrupted."""
        ...

    async def ledgers(self) -> list[LedgerId]:
        """Return all ledgers. One created meanwhile may be missing. Raises MetadataError if the listing fails."""
        ...

    async def mark_older(self, why: str) -> None:
        """Record that the metadata store is an older copy of itself. Raises MetadataError."""
        ...

    async def counted(self) -> LedgerIdCount:
        """Return the range of ids that the metadata store has given. Raises MetadataError."""
        ...


class LedgerAdmission:
    """The admission of writers. Reads the metadata once per ledger, however many adds wait for it."""

    def __init__(
        self,
        authority: LedgerAuthority,
        bookie: BookieId,
        nursery: Nursery,
        statistics: Statistics,
        metadata_gate: BackpressureGate,
    ) -> None:
        """`metadata_gate`: where connections wait while the next question might be refused."""
        self._authority = authority
        self._bookie = bookie
        self._nursery = nursery
        self._statistics = statistics
        self._waiting: dict[int, list[Callable[[LedgerMetadata | Exception | None], None]]] = {}
        self._metadata_gate = metadata_gate
        self._count = 0
        self._bytes = 0
        self._log = RateLimitedLog(log)
        self._asking = asyncio.Semaphore(AT_ONCE_MAX)

    def _is_busy(self) -> bool:
        return self._count >= WAITING_MAX or self._bytes + PACKET_MAX > WAITING_BYTES_MAX

    def ask(self, ledger: int, key: bytes, size: int, judged: Callable[[WriteVerdict, WriteVerdict], None]) -> bool:
        """Call `judged` with the verdicts on the key and on an ordinary add with it. `size`: bytes that wait for the
        answer. Return False if too many wait already."""

        def on_answer(answer: LedgerMetadata | Exception | None) -> None:
            if isinstance(answer, Exception):
                judged(WriteVerdict.UNKNOWN, WriteVerdict.UNKNOWN)
            else:
                judged(judge_key_by_metadata(answer, key), judge_by_metadata(answer, self._bookie, key))

        return self.ask_metadata(ledger, size, on_answer)

    def ask_metadata(
        self, ledger: int, size: int, answered: Callable[[LedgerMetadata | Exception | None], None]
    ) -> bool:
        """Call `answered` with the ledger's metadata. `size`: bytes that wait for it. Return False if too many wait
        already."""
        if self._count >= WAITING_MAX or self._bytes + size > WAITING_BYTES_MAX:
            return False
        self._bytes += size

        def on_answer(answer: LedgerMetadata | Exception | None) -> None:
            self._bytes -= size
            answered(answer)

        self._ask(ledger, on_answer)
        return True

    def ask_denial(self, ledger: int, answered: Callable[[bool], None]) -> None:
        """Call `answered` with True if this bookie may say "not here" to a client that did not name the bookie it
        means."""
        if self._count >= WAITING_MAX:
            answered(False)
            return

        def on_answer(answer: LedgerMetadata | Exception | None) -> None:
            answered(not isinstance(answer, Exception) and may_deny(answer, self._bookie))

        self._ask(ledger, on_answer)

    def _ask(self, ledger: int, on_answer: Callable[[LedgerMetadata | Exception | None], None]) -> None:
        self._count += 1
        if self._is_busy():
            self._metadata_gate.shut(self)
        waiting = self._waiting.setdefault(ledger, [])
        waiting.append(on_answer)
        if len(waiting) == 1:
            self._nursery.spawn(self._read(ledger), name=f"metadata of ledger {ledger}")

    async def _read(self, ledger: int) -> None:
        answer: LedgerMetadata | Exception | None
        try:
            async with asyncio.timeout(ASK_S), self._asking:
                self._statistics.asked_metadata += 1
                answer = await self._authority.metadata(LedgerId(ledger)) if ledger >= 0 else None
        except (MetadataError, Corrupted, TimeoutError) as error:
            self._log.say(logging.WARNING, "metadata cannot be read ledger=%d error=%r", ledger, error)
            answer = error
        waiting = self._waiting.pop(ledger)
        self._count -= len(waiting)
        for on_answer in waiting:
            on_answer(answer)
        if self._metadata_gate.is_shut and not self._is_busy():
            self._metadata_gate.open(self)

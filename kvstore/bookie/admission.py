"""Keeps the adds and keys that only a ledger's metadata can judge, while that is read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from kvstore.bookie.backpressure import Door
from kvstore.bookie.fencing import Verdict, judge_by_metadata, judge_key_by_metadata, may_deny
from kvstore.bookie.sparing import SparingLog
from kvstore.bookie.statistics import Statistics
from kvstore.env.ports import Nursery
from kvstore.errors import Corrupted, MetadataError
from kvstore.meta.ledger_ids import LedgerIdCount
from kvstore.proto.bookkeeper import PACKET_MAX
from kvstore.types import BookieId, LedgerId, LedgerMetadata

log = logging.getLogger(__name__)

ASK_S = 3.0
"""Longest wait for the metadata store; clients give up on a bookie after five seconds."""
WAITING_MAX = 4096
"""Adds that wait, over all ledgers."""
WAITING_BYTES_MAX = 32 << 20
AT_ONCE_MAX = 64
"""Ledgers asked about at once: the session is everybody's on this node, and strangers name as many as they like."""


class Authority(Protocol):
    """Tells what the metadata store says about ledgers."""

    async def metadata(self, ledger: LedgerId) -> LedgerMetadata | None:
        """As it is now, or later: everything committed before the call is seen. None: there is none, for sure.

        Raises MetadataError, Corrupted.
        """
        ...

    async def ledgers(self) -> list[LedgerId]:
        """All ledgers. One created meanwhile may be missing; a listing that fails raises MetadataError."""
        ...

    async def mark_older(self, why: str) -> None:
        """Note that it is an older copy of itself. Raises MetadataError."""
        ...

    async def counted(self) -> LedgerIdCount:
        """How far the metadata store has given ids. Raises MetadataError."""
        ...


class Admission:
    """Asks for the metadata once per ledger, however many adds wait for the answer."""

    def __init__(
        self,
        authority: Authority,
        bookie: BookieId,
        nursery: Nursery,
        statistics: Statistics,
        gate: Door,
    ) -> None:
        """`gate`: where connections wait while the next question might be refused."""
        self._authority = authority
        self._bookie = bookie
        self._nursery = nursery
        self._statistics = statistics
        self._waiting: dict[int, list[Callable[[LedgerMetadata | Exception | None], None]]] = {}
        self._gate = gate
        self._count = 0
        self._bytes = 0
        self._log = SparingLog(log)
        self._asking = asyncio.Semaphore(AT_ONCE_MAX)

    def _is_busy(self) -> bool:
        return self._count >= WAITING_MAX or self._bytes + PACKET_MAX > WAITING_BYTES_MAX

    def ask(self, ledger: int, key: bytes, size: int, judged: Callable[[Verdict, Verdict], None]) -> bool:
        """Call `judged` with what the metadata says of the key, and of an ordinary add with it. `size`: bytes that wait
        for the answer. False: too many wait."""

        def on_answer(answer: LedgerMetadata | Exception | None) -> None:
            if isinstance(answer, Exception):
                judged(Verdict.UNKNOWN, Verdict.UNKNOWN)
            else:
                judged(judge_key_by_metadata(answer, key), judge_by_metadata(answer, self._bookie, key))

        return self.ask_metadata(ledger, size, on_answer)

    def ask_metadata(
        self, ledger: int, size: int, answered: Callable[[LedgerMetadata | Exception | None], None]
    ) -> bool:
        """Call `answered` with the ledger's metadata; `size` bytes wait for it. False: too many wait."""
        if self._count >= WAITING_MAX or self._bytes + size > WAITING_BYTES_MAX:
            return False
        self._bytes += size

        def on_answer(answer: LedgerMetadata | Exception | None) -> None:
            self._bytes -= size
            answered(answer)

        self._ask(ledger, on_answer)
        return True

    def ask_denial(self, ledger: int, answered: Callable[[bool], None]) -> None:
        """Call `answered` with whether this bookie may say "not here" to somebody who did not name the bookie meant."""
        if self._count >= WAITING_MAX:
            answered(False)
            return

        def on_answer(answer: LedgerMetadata | Exception | None) -> None:
            answered(not isinstance(answer, Exception) and may_deny(answer, self._bookie))

        self._ask(ledger, on_answer)

    def _ask(self, ledger: int, on_answer: Callable[[LedgerMetadata | Exception | None], None]) -> None:
        self._count += 1
        if self._is_busy():
            self._gate.shut(self)
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
            self._log.say(logging.WARNING, "ledger=%d its metadata cannot be read: %r", ledger, error)
            answer = error
        waiting = self._waiting.pop(ledger)
        self._count -= len(waiting)
        for on_answer in waiting:
            on_answer(answer)
        if self._gate.is_shut and not self._is_busy():
            self._gate.open(self)

"""Holds adds and keys that only a ledger's metadata can judge until the metadata has been read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.backpressure import BackpressureGate
from kvstore.bookie.fencing import WriteVerdict, judge_by_metadata, judge_key_by_metadata, may_deny
from kvstore.bookie.rate_limited_log import RateLimitedLog
from kvstore.bookie.statistics import Statistics
from kvstore.env.ports import Nursery
from kvstore.errors import Corrupted, MetadataError
from kvstore.proto.bookkeeper import PACKET_MAX
from kvstore.types import BookieId, LedgerId, LedgerMetadata

log = logging.getLogger(__name__)

ASK_S = 3.0
"""Maximum number of seconds to wait for the metadata store. Clients treat a bookie as failed after five seconds."""
WAITING_MAX = 4096
"""Maximum number of requests that wait for metadata, over all ledgers."""
WAITING_BYTES_MAX = 32 << 20
AT_ONCE_MAX = 64
"""Maximum number of concurrent metadata reads. The limit protects the metadata session, which the whole node shares,
because unauthenticated peers may name any number of ledgers."""


class LedgerAdmission:
    """Judges writers by their ledgers' metadata. It reads the metadata of a ledger once, however many adds wait for
    it."""

    def __init__(
        self,
        authority: MetadataAuthority,
        bookie: BookieId,
        nursery: Nursery,
        statistics: Statistics,
        metadata_gate: BackpressureGate,
    ) -> None:
        """`metadata_gate` holds back connections while the next request for metadata might be refused."""
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
        """Call `judged` with two verdicts: on the key, and on an ordinary add with this key. Both are UNKNOWN if the
        metadata cannot be read within ASK_S. `size` is the number of bytes kept in memory until then. Return False
        without calling `judged` if too many requests wait already."""

        def on_answer(answer: LedgerMetadata | Exception | None) -> None:
            if isinstance(answer, Exception):
                judged(WriteVerdict.UNKNOWN, WriteVerdict.UNKNOWN)
            else:
                judged(judge_key_by_metadata(answer, key), judge_by_metadata(answer, self._bookie, key))

        return self.ask_metadata(ledger, size, on_answer)

    def ask_metadata(
        self, ledger: int, size: int, answered: Callable[[LedgerMetadata | Exception | None], None]
    ) -> bool:
        """Call `answered` with the ledger's metadata, None if the ledger does not exist, or the error. `size` is the
        number of bytes kept in memory until then. Return False without calling `answered` if too many requests wait
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
        """Call `answered` with True if this bookie may deny having an entry to a client that did not say which bookie
        it means; see may_deny. The result is False if the metadata cannot be read or too many requests wait."""
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
            self._log.emit(logging.WARNING, "metadata cannot be read ledger=%d error=%r", ledger, error)
            answer = error
        waiting = self._waiting.pop(ledger)
        self._count -= len(waiting)
        for on_answer in waiting:
            on_answer(answer)
        if self._metadata_gate.is_shut and not self._is_busy():
            self._metadata_gate.open(self)

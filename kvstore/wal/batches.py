"""Reads several entries of one bookie at once, by the batched read of version 2 of the BookKeeper protocol.

Version 3 has no such call. Apache's bookies answer it from 4.17 on, and so do ours. But on a connection that has spoken
version 2 they understand nothing else. So batched reads have a connection of their own, which is opened when it is
first needed, and adds never wait behind large answers. A bookie that does not know the call closes the connection or
never answers. It gets no batched reads for a while then, and its entries are read one by one (docs/protocol.md T12).
"""

from __future__ import annotations

import asyncio
from functools import partial

from kvstore.env.ports import Clock
from kvstore.errors import BookieError
from kvstore.proto.bookkeeper import BadFrame, BookieResponse, Status
from kvstore.proto.version_two import BatchRead, encode_batch_read, packets_of
from kvstore.types import BookieId
from kvstore.wal.connection import Connection, settle

TIMEOUT_S = 0.25
"""Seconds to wait for a batch. The caller has other bookies to ask, and in this time a batch of the usual size crosses
any reasonable network."""
FORGOTTEN_S = 5.0
"""Seconds that an answer may be late before the connection checks whether it is dead."""
REST_MIN_S = 1.0
REST_MAX_S = 60.0
"""Maximum number of seconds without batched reads after a failed one. The pause doubles with each failure, and ends
because the bookie may have been upgraded."""
_NOT_HERE = (Status.NO_ENTRY, Status.NO_LEDGER, Status.IO_ERROR, Status.TOO_MANY_REQUESTS)
"""The first entry cannot be given now. A read of that entry alone finds out why."""


class Batches:
    """The batched reads of one bookie."""

    def __init__(self, bookie: BookieId, connection: Connection, clock: Clock) -> None:
        self._bookie = bookie
        self._connection = connection
        self._clock = clock
        self._rest_s = 0.0
        self._rests_until = 0.0

    async def ask(self, asked: BatchRead) -> list[bytes]:
        """Return the packets that the bookie gives, perhaps none. Raises BookieError."""
        if self._clock.now() < self._rests_until:
            raise BookieError(f"{self._bookie}: gave no batch a moment ago")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._answer(asked)
            if answer.status in _NOT_HERE:
                return []
            if answer.status != Status.OK or answer.body is None:
                raise BookieError(f"{self._bookie}: answered {answer.status} to a batched read")
            packets = packets_of(answer.body)
        except (BookieError, BadFrame, TimeoutError) as error:
            self._rest()
            raise BookieError(f"{self._bookie}: no batch: {error or 'no answer in time'}") from None
        self._rest_s = 0.0
        return packets

    async def _answer(self, asked: BatchRead) -> BookieResponse:
        """Ask, and wait for the answer. If the caller stops waiting, the question stays with the connection, which then
        notices whether the bookie is silent."""
        answered: asyncio.Future[BookieResponse | BookieError] = asyncio.get_running_loop().create_future()
        done = partial(settle, answered)
        self._connection.call(lambda txn: encode_batch_read(asked._replace(request=txn)), FORGOTTEN_S, done)
        answer = await answered
        if isinstance(answer, BookieError):
            raise answer
        return answer

    def close(self) -> None:
        """Fail the outstanding reads."""
        self._connection.close()

    def _rest(self) -> None:
        now = self._clock.now()
        if now >= self._rests_until:  # several concurrent failures count as one
            self._rest_s = min(max(2 * self._rest_s, REST_MIN_S), REST_MAX_S)
            self._rests_until = now + self._rest_s

"""Reads several entries from one bookie at once, with the batched read of version 2 of the BookKeeper protocol.

Version 3 has no such call. Apache's bookies support it from version 4.17, and kvstore's bookies support it too. On a
connection that has used version 2, however, they understand nothing else. Batched reads therefore have their own
connection, which is opened when it is first needed, and adds never wait behind large answers. A bookie that does not
know the call closes the connection or never answers. It is then sent no batched reads for a while, and its entries are
read one by one (docs/protocol.md T12).
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
"""Seconds to wait for a batch. The caller can ask other bookies, and a batch of the usual size crosses any reasonable
network within this time."""
FORGOTTEN_S = 5.0
"""Seconds after which the connection checks whether the bookie is dead because an answer is missing."""
DELAY_MIN_S = 1.0
DELAY_MAX_S = 60.0
"""Maximum number of seconds without batched reads after a failure. The pause doubles with each failure. It is bounded
because the bookie may have been upgraded."""
_NOT_HERE = (Status.NO_ENTRY, Status.NO_LEDGER, Status.IO_ERROR, Status.TOO_MANY_REQUESTS)
"""Statuses of a bookie that cannot return the first entry now. A read of that entry alone finds out why."""


class Batches:
    """The batched reads from one bookie."""

    def __init__(self, bookie: BookieId, connection: Connection, clock: Clock) -> None:
        self._bookie = bookie
        self._connection = connection
        self._clock = clock
        self._delay_s = 0.0
        self._delayed_until = 0.0

    async def ask(self, asked: BatchRead) -> list[bytes]:
        """Return the packets that the bookie returns, possibly none; their digests are not verified. Raises BookieError
        after TIMEOUT_S, if the bookie does not support batched reads, or during the pause after such a failure."""
        if self._clock.now() < self._delayed_until:
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
            self._delay()
            raise BookieError(f"{self._bookie}: no batch: {error or 'no answer in time'}") from None
        self._delay_s = 0.0
        return packets

    async def _answer(self, asked: BatchRead) -> BookieResponse:
        """Send the request and wait for the answer. If the caller is cancelled, the request stays outstanding, so that
        the connection notices a silent bookie."""
        answered: asyncio.Future[BookieResponse | BookieError] = asyncio.get_running_loop().create_future()
        done = partial(settle, answered)
        self._connection.call(lambda txn: encode_batch_read(asked._replace(request=txn)), FORGOTTEN_S, done)
        answer = await answered
        if isinstance(answer, BookieError):
            raise answer
        return answer

    def close(self) -> None:
        """Close the connection. Outstanding reads fail."""
        self._connection.close()

    def _delay(self) -> None:
        now = self._clock.now()
        if now >= self._delayed_until:  # several concurrent failures count as one
            self._delay_s = min(max(2 * self._delay_s, DELAY_MIN_S), DELAY_MAX_S)
            self._delayed_until = now + self._delay_s

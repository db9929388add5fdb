"""Keeps a server's date for its next process (docs/protocol.md, P28; docs/reference/formats.md).

The file counts only on the same machine while that is not rebooted, because the monotonic clock begins again then. So
it survives crashes of processes, which need no sync.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from kvstore.env import Env
from kvstore.env.ports import Clock, Disk

log = logging.getLogger(__name__)

DIRECTORY = "clock"
PATH = f"{DIRECTORY}/date"
_ASIDE = f"{PATH}.new"
STALE_MS = 100.0
"""A date is written again when it differs this much from what elapsed time makes of the file."""


class Kept(NamedTuple):
    """The file, as a JSON array."""

    boot_id: str
    """Of the machine's boot in which this holds."""
    now_s: float
    """The monotonic clock when the file was written."""
    offset_ms: float
    """The date less the monotonic clock."""


_decode = msgspec.json.Decoder(Kept).decode


def kept_offset(env: Env) -> float | None:
    """Return the offset of the date that the process before had, or None if there is none for this boot."""
    boot_id = env.clock.boot_id
    try:
        if not boot_id or not env.disk.exists(PATH):
            return None
        file = env.disk.open(PATH)
        try:
            kept = _decode(file.read(0, file.size()))
        finally:
            file.close()
    except (OSError, msgspec.MsgspecError) as error:
        log.info("expected the date of the process before, got %r: this process asks the other servers", error)
        return None
    return kept.offset_ms if kept.boot_id == boot_id and kept.now_s <= env.clock.now() else None


class KeptDate:
    """The file's writer."""

    def __init__(self, disk: Disk, clock: Clock) -> None:
        self._disk, self._clock = disk, clock
        self._written_ms: float | None = None
        self._has_failed = False

    def keep(self, offset_ms: float) -> None:
        """Write the date if the file does not say the same. The first error is logged; the next call tries again."""
        written = self._written_ms
        if not self._clock.boot_id or (written is not None and abs(offset_ms - written) < STALE_MS):
            return
        try:
            self._disk.mkdir(DIRECTORY)
            file = self._disk.open(_ASIDE, create=True)
            try:
                file.truncate(0)
                file.pwrite(0, msgspec.json.encode(Kept(self._clock.boot_id, self._clock.now(), offset_ms)))
            finally:
                file.close()
            self._disk.rename(_ASIDE, PATH)
            self._written_ms, self._has_failed = offset_ms, False
        except OSError as error:
            if not self._has_failed:
                log.warning("the server's date is not kept for its next process: %r", error)
            self._has_failed = True

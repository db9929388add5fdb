"""Saves the date of a server for the server's next process (docs/protocol.md, P28; docs/reference/formats.md).

The file is valid only on the same machine until its next reboot, because the monotonic clock restarts then. The file
therefore only has to survive crashes of processes, which requires no sync.
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
"""Difference from the saved date at which it is written again."""


class SavedDateFile(NamedTuple):
    """The content of the file, a JSON array."""

    boot_id: str
    """Id of the boot for which the date holds."""
    now_s: float
    """The monotonic clock when the file was written."""
    offset_ms: float
    """The date minus the monotonic clock, in ms."""


_decode = msgspec.json.Decoder(SavedDateFile).decode


def saved_offset(env: Env) -> float | None:
    """Return the offset of the date that the previous process used, or None if none was saved since the machine
    booted."""
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
        log.info("cannot read the date of the previous process, asking the other servers: %r", error)
        return None
    return kept.offset_ms if kept.boot_id == boot_id and kept.now_s <= env.clock.now() else None


class SavedDate:
    """Writes the file with the server's date."""

    def __init__(self, disk: Disk, clock: Clock) -> None:
        self._disk, self._clock = disk, clock
        self._written_ms: float | None = None
        self._has_failed = False

    def keep(self, offset_ms: float) -> None:
        """Write the date unless the file already contains it. Only the first error is logged; the next call retries."""
        written = self._written_ms
        if not self._clock.boot_id or (written is not None and abs(offset_ms - written) < STALE_MS):
            return
        try:
            self._disk.mkdir(DIRECTORY)
            file = self._disk.open(_ASIDE, create=True)
            try:
                file.truncate(0)
                file.pwrite(0, msgspec.json.encode(SavedDateFile(self._clock.boot_id, self._clock.now(), offset_ms)))
            finally:
                file.close()
            self._disk.rename(_ASIDE, PATH)
            self._written_ms, self._has_failed = offset_ms, False
        except OSError as error:
            if not self._has_failed:
                log.warning("cannot save the date for the next process: %r", error)
            self._has_failed = True

"""Backoff of addresses whose connection broke. Decides only."""

from __future__ import annotations

MIN_S, MAX_S = 0.05, 1.0
"""Length of a backoff, in seconds. Doubles with each failure in a row."""
KEPT_S = 60.0
"""An address that is not tried for this long after its backoff is forgotten: its server may be gone for good."""


class AddressBackoff:
    """The backoff of one client. Times are of the boot-time clock, in seconds."""

    def __init__(self) -> None:
        self._retries: dict[str, tuple[float, float]] = {}
        """End and length of each address's backoff."""

    def is_backing_off(self, address: str, now: float) -> bool:
        until, _ = self._retries.get(address, (now, 0.0))
        return now < until

    def note_failure(self, address: str, now: float) -> None:
        """Start a backoff, because a connection to the address broke or could not be opened."""
        self._retries = {each: rest for each, rest in self._retries.items() if now < rest[0] + KEPT_S}
        _, last_s = self._retries.get(address, (0.0, MIN_S / 2))
        delay_s = min(last_s * 2, MAX_S)
        self._retries[address] = (now + delay_s, delay_s)

    def reset(self, address: str) -> None:
        """Forget the failures of an address that has a connection."""
        self._retries.pop(address, None)

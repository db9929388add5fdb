"""Addresses that are left alone for a while, because a connection to them broke. Decides only."""

from __future__ import annotations

MIN_S, MAX_S = 0.05, 1.0
"""How long a rest is: doubles with each failure in a row."""
KEPT_S = 60.0
"""An address that was not tried for so long after its rest is forgotten: its server may be gone for good."""


class AddressBackoff:
    """The backoff of one client. Times are of the boot-time clock, in seconds."""

    def __init__(self) -> None:
        self._rests: dict[str, tuple[float, float]] = {}
        """Address → (until when, for how long)."""

    def is_left_alone(self, address: str, now: float) -> bool:
        until, _ = self._rests.get(address, (now, 0.0))
        return now < until

    def broke(self, address: str, now: float) -> None:
        """A connection to the address broke, or did not come to be."""
        self._rests = {each: rest for each, rest in self._rests.items() if now < rest[0] + KEPT_S}
        _, last_s = self._rests.get(address, (0.0, MIN_S / 2))
        rest_s = min(last_s * 2, MAX_S)
        self._rests[address] = (now + rest_s, rest_s)

    def held(self, address: str) -> None:
        """There is a connection to the address: its failures are forgotten."""
        self._rests.pop(address, None)

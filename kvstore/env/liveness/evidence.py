"""Judges whether a process works: its event loop turns, and its disks complete writes. Decides only.

Silence is counted in ticks of the watchdog, and a tick counts for TICK_MAX_S at most. So a process that was stopped as
a whole (SIGSTOP, a suspended laptop) finds no silence when it continues, and a watchdog that gets no processor counts
more slowly. Time in which the silent thread was ready to run and got no processor does not count at all, because a busy
machine is not a broken node.
"""

from __future__ import annotations

from dataclasses import dataclass

TICK_S = 0.5
TICK_MAX_S = 2 * TICK_S
SILENCE_S = 4.0
"""Longest silence of the event loop, and of a disk that has a write to complete. The lease of etcd does not survive a
longer standstill of the event loop either, because it lasts 6 s and the loop renews it every 2 s. A disk that is
flooded with writes takes up to some 2 s for a sync."""
FRESH_S = 1.0
"""Evidence that is younger counts for the recovery."""
HOLD_FIRST_S, HOLD_MAX_S = 2.0, 60.0
"""How long all evidence must be fresh before the node takes a new session. Doubled with each failure, so that a disk
that comes and goes does not move leads each time."""
FORGIVEN_S = 600.0
"""After so long without a failure the next one counts as the first."""
LOOP = "the event loop"


@dataclass(slots=True)
class _Subject:
    """Evidence of one kind: the time since the last sign of life."""

    is_spare: bool = False
    """True if the process can do without it while another spare one works."""
    silence_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sign:
    """The findings of one tick about a subject."""

    is_alive: bool
    """True if something happened since the last tick, or nothing is due."""
    starved_s: float = 0.0
    """Time of the tick in which the subject's thread wanted a processor and got none."""


class Evidence:
    """The judge of one process."""

    def __init__(self) -> None:
        self._subjects: dict[str, _Subject] = {}
        self.failure = ""
        """Reason why the process may have no session; empty if it may."""
        self.failures = 0
        """Number of times that the evidence failed."""
        self._hold_s = HOLD_FIRST_S
        self._fresh_s = 0.0
        self._sound_s = 0.0

    def watch_loop(self) -> None:
        """Require from now on that the event loop turns."""
        self._subjects.setdefault(LOOP, _Subject())

    def watch_disk(self, path: str, *, is_spare: bool) -> None:
        """Require from now on that the disk of the directory completes writes."""
        self._subjects[path] = _Subject(is_spare)

    @property
    def silence_s(self) -> dict[str, float]:
        """Seconds without a sign of life, by subject."""
        return {name: subject.silence_s for name, subject in self._subjects.items()}

    def tick(self, elapsed_s: float, signs: dict[str, Sign]) -> list[str]:
        """Count what has passed since the last tick. Returns the spare directories that hang, which are not watched any
        more."""
        counted_s = min(elapsed_s, TICK_MAX_S)
        for name, subject in self._subjects.items():
            sign = signs.get(name, Sign(is_alive=True))
            if sign.is_alive:
                subject.silence_s = 0.0
            else:
                subject.silence_s += max(0.0, counted_s - sign.starved_s)
        hung = self._without_spares()
        self._judge(counted_s)
        return hung

    # docs/protocol.md B24
    def _without_spares(self) -> list[str]:
        """Stop watching the spare directories that hang, as long as another one works."""
        spares = {name: subject for name, subject in self._subjects.items() if subject.is_spare}
        hung = [name for name, subject in spares.items() if subject.silence_s > SILENCE_S]
        if all(subject.silence_s > FRESH_S for subject in spares.values()):
            return []
        for name in hung:
            del self._subjects[name]
        return hung

    # docs/protocol.md P45
    def _judge(self, passed_s: float) -> None:
        silent = [name for name, subject in self._subjects.items() if subject.silence_s > SILENCE_S]
        if self.failure:
            is_fresh = all(subject.silence_s <= FRESH_S for subject in self._subjects.values())
            self._fresh_s = self._fresh_s + passed_s if is_fresh else 0.0
            if self._fresh_s >= self._hold_s:
                self.failure, self._sound_s = "", 0.0
                self._hold_s = min(HOLD_MAX_S, 2 * self._hold_s)
            elif silent:
                self.failure = self._reason(silent)
            return
        self._sound_s += passed_s
        if self._sound_s >= FORGIVEN_S:
            self._hold_s = HOLD_FIRST_S
        if silent:
            self.failure, self._fresh_s = self._reason(silent), 0.0
            self.failures += 1

    def _reason(self, silent: list[str]) -> str:
        what = f"for more than {SILENCE_S:g} s"
        parts = [
            f"{LOOP} has been blocked {what}"
            if name == LOOP
            else f"the disk of {name or '.'} completes no writes {what}"
            for name in silent
        ]
        return "; ".join(parts)

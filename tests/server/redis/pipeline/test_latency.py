"""Timed rounds of Redis commands: their histograms, and their entries in the slow log."""

from __future__ import annotations

import pytest

from kvstore.env.slow_log import SlowLog, hash_of
from kvstore.server.redis.pipeline.latency import CommandLatency


class Rounds:
    def __init__(self) -> None:
        self.now = 0.0
        self.slow = SlowLog(100)
        self.latency = CommandLatency(lambda: self.now, self.slow)

    def time(self, words: list[bytes], took_s: float) -> None:
        timed = self.latency.begin([words], 7)
        self.now += took_s
        self.latency.end(timed)


def test_slow_round_is_in_the_slow_log_by_its_first_command() -> None:
    rounds = Rounds()
    rounds.time([b"get", b"k"], 0.3)
    rounds.time([b"SET", b"k", b"v"], 0.05)
    (found,) = rounds.slow.latest()
    assert (found.at, found.operation, found.key, round(found.took_s, 3)) == ("endpoint", "GET", hash_of(b"k"), 0.3)
    assert rounds.latency.histograms["GET"].count == rounds.latency.histograms["SET"].count == 1


@pytest.mark.parametrize(
    ("words", "name"),
    [([b"AUTH", b"anna", b"secret"], "AUTH"), ([b"KEYS", b"*"], "KEYS"), ([b"hunter2", b"x"], "other")],
)
def test_only_arguments_that_are_keys_are_hashed(words: list[bytes], name: str) -> None:
    rounds = Rounds()
    rounds.time(words, 1.0)
    (found,) = rounds.slow.latest()
    assert (found.operation, found.key) == (name, "")


def test_round_without_commands_can_be_timed() -> None:
    rounds = Rounds()
    rounds.latency.end(rounds.latency.begin([], 0))
    assert rounds.latency.histograms["other"].count == 1

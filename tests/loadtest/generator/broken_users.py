"""A locustfile with one more user, whose endpoint has a fault that nobody expects."""

from __future__ import annotations

from typing import Any

from kvstore.loadtest.generator.endpoints import Stopwatch
from kvstore.loadtest.generator.users import PacedUser, RunContext
from kvstore.loadtest.locustfile import *  # noqa: F403


class BrokenEndpoint:
    name = "broken"

    def __init__(self) -> None:
        self.watch = Stopwatch()

    def read(self, key: bytes) -> int:
        raise AssertionError("nobody expects this")

    def close(self) -> None:
        pass


class BrokenUser(PacedUser):
    def open_endpoint(self, session: RunContext, number: int) -> Any:
        return BrokenEndpoint()

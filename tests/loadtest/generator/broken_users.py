"""A locustfile with one more user, whose door has a fault that nobody expects."""

from __future__ import annotations

from typing import Any

from kvstore.loadtest.generator.doors import Stopwatch
from kvstore.loadtest.generator.users import PacedUser, Session
from kvstore.loadtest.locustfile import *  # noqa: F403


class BrokenDoor:
    name = "broken"

    def __init__(self) -> None:
        self.watch = Stopwatch()

    def read(self, key: bytes) -> int:
        raise AssertionError("nobody expects this")

    def close(self) -> None:
        pass


class BrokenUser(PacedUser):
    def open_door(self, session: Session, number: int) -> Any:
        return BrokenDoor()

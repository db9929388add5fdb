"""Coordination on the store: sessions whose keys end with them, locks with fencing tokens, elections, groups."""

from kvstore.client.coordination.aio import AsyncElection, AsyncGroup, AsyncLock, AsyncSession
from kvstore.client.coordination.blocking import Election, Group, Lock, Session
from kvstore.client.coordination.steps import NotInTime, SessionEnded

__all__ = [
    "AsyncElection",
    "AsyncGroup",
    "AsyncLock",
    "AsyncSession",
    "Election",
    "Group",
    "Lock",
    "NotInTime",
    "Session",
    "SessionEnded",
]

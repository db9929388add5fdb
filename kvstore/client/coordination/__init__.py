"""Coordination on the store: sessions whose keys end with them, locks with fencing tokens, elections, groups, barriers,
rendezvous, queues."""

from kvstore.client.coordination.aio import (
    AsyncBarrier,
    AsyncElection,
    AsyncGroup,
    AsyncLock,
    AsyncQueue,
    AsyncRendezvous,
    AsyncSession,
)
from kvstore.client.coordination.blocking import Barrier, Election, Group, Lock, Queue, Rendezvous, Session
from kvstore.client.coordination.steps import NameTaken, NotInTime, SessionEnded, SessionFull
from kvstore.client.coordination.work_queue import Taken

__all__ = [
    "AsyncBarrier",
    "AsyncElection",
    "AsyncGroup",
    "AsyncLock",
    "AsyncQueue",
    "AsyncRendezvous",
    "AsyncSession",
    "Barrier",
    "Election",
    "Group",
    "Lock",
    "NameTaken",
    "NotInTime",
    "Queue",
    "Rendezvous",
    "Session",
    "SessionEnded",
    "SessionFull",
    "Taken",
]

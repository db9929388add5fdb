"""Bookies, which durably store the entries of ledgers for clients that hold a ledger's key."""

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.identity import refuse_orphaned_directories
from kvstore.bookie.node import Bookie
from kvstore.bookie.state import BookieState
from kvstore.bookie.statistics import Statistics
from kvstore.bookie.storage import BookieStorage

__all__ = ["Bookie", "BookieConfig", "BookieState", "BookieStorage", "Statistics", "refuse_orphaned_directories"]

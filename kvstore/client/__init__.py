"""The client library: AsyncClient for asyncio, Client for everything else."""

from kvstore.client.aio.client import AsyncClient
from kvstore.client.aio.watch import AsyncWatch
from kvstore.client.blocking.client import Client
from kvstore.client.blocking.watch import Watch
from kvstore.client.core.batch import Batch
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.values import Deleted, Item, Level, Meta, Page, Replaced, Token
from kvstore.client.core.watching import Change
from kvstore.client.feed import FeedReader, PartitionFeed

__all__ = [
    "AsyncClient",
    "AsyncWatch",
    "Batch",
    "Change",
    "Client",
    "ClientConfig",
    "Deleted",
    "FeedReader",
    "Item",
    "Level",
    "Meta",
    "Page",
    "PartitionFeed",
    "Replaced",
    "Token",
    "Watch",
]

"""The client library: AsyncClient for asyncio, Client for everything else."""

from kvstore.client.batch import Batch
from kvstore.client.client import AsyncClient
from kvstore.client.config import ClientConfig
from kvstore.client.feed import FeedReader, PartitionFeed
from kvstore.client.sync import Client
from kvstore.client.values import Item, Level, Meta, Replaced, Token
from kvstore.client.watch import AsyncWatch
from kvstore.client.watch_sync import Watch
from kvstore.client.watching import Change

__all__ = [
    "AsyncClient",
    "AsyncWatch",
    "Batch",
    "Change",
    "Client",
    "ClientConfig",
    "FeedReader",
    "Item",
    "Level",
    "Meta",
    "PartitionFeed",
    "Replaced",
    "Token",
    "Watch",
]

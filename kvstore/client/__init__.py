"""The client library: AsyncClient for asyncio, Client for everything else."""

from kvstore.client.batch import Batch
from kvstore.client.client import AsyncClient
from kvstore.client.config import ClientConfig
from kvstore.client.feed import FeedReader, PartitionFeed
from kvstore.client.sync import Client
from kvstore.client.values import Item, Level, Meta, Replaced, Token

__all__ = [
    "AsyncClient",
    "Batch",
    "Client",
    "ClientConfig",
    "FeedReader",
    "Item",
    "Level",
    "Meta",
    "PartitionFeed",
    "Replaced",
    "Token",
]

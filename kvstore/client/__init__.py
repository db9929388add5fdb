"""The client library: AsyncClient for asyncio, Client for everything else."""

from kvstore.client.aio.client import AsyncClient
from kvstore.client.aio.transaction import AsyncTransaction
from kvstore.client.aio.typed import AsyncTypedClient, AsyncTypedTransaction
from kvstore.client.aio.watch import AsyncWatch
from kvstore.client.blocking.client import Client
from kvstore.client.blocking.stored import StoredMapping
from kvstore.client.blocking.transaction import Transaction
from kvstore.client.blocking.typed import TypedClient, TypedTransaction
from kvstore.client.blocking.watch import Watch
from kvstore.client.core.batch import Batch
from kvstore.client.core.codecs import Codec, Layout, TypedItem, TypedReplaced, bytes_codec, json_codec, typed_codec
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.values import Deleted, Item, Level, Meta, Page, Replaced, Token
from kvstore.client.core.watching import Change
from kvstore.client.feed import FeedReader, PartitionFeed
from kvstore.env.tls import Tls
from kvstore.rpc.login import Login

__all__ = [
    "AsyncClient",
    "AsyncTransaction",
    "AsyncTypedClient",
    "AsyncTypedTransaction",
    "AsyncWatch",
    "Batch",
    "Change",
    "Client",
    "ClientConfig",
    "Codec",
    "Deleted",
    "FeedReader",
    "Item",
    "Layout",
    "Level",
    "Login",
    "Meta",
    "Page",
    "PartitionFeed",
    "Replaced",
    "StoredMapping",
    "Tls",
    "Token",
    "Transaction",
    "TypedClient",
    "TypedItem",
    "TypedReplaced",
    "TypedTransaction",
    "Watch",
    "bytes_codec",
    "json_codec",
    "typed_codec",
]

"""From what a user calls a place of snapshots to the store that it is."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.spark.snapshots import manifest as manifests
from kvstore.spark.snapshots.directory import LOCK, DirectoryStore
from kvstore.spark.snapshots.objects import RemoteStore
from kvstore.spark.snapshots.remote import Location, RemotePath, location
from kvstore.spark.snapshots.signing import keys_of_environment
from kvstore.spark.snapshots.store import SnapshotStore


def store_of(place: Location) -> SnapshotStore:
    """The store at a place that need not be there yet. Raises ConfigError for a key of manifests that is none."""
    keys = keys_of_environment()
    return RemoteStore(place, keys) if isinstance(place, RemotePath) else DirectoryStore(place, keys)


def open_store(text: str) -> SnapshotStore:
    """The same, of a path or a URL. Raises ConfigError."""
    return store_of(_absolute(location(text)))


def store_at(text: str) -> tuple[SnapshotStore, str | None]:
    """The store at a path or URL, or the store around the one snapshot that it is and its id. Raises ConfigError."""
    place = _absolute(location(text))
    if (place / manifests.NAME).exists():
        return store_of(place.parent), place.name
    if not place.is_dir():
        raise ConfigError(f"{place} is no directory of snapshots: `kvstore snapshot create --to {place}` makes one")
    store = store_of(place)
    if not store.ids() and not store.remains() and {each.name for each in place.iterdir()} - {LOCK}:
        raise ConfigError(f"{place} holds no snapshot: none of its folders has a {manifests.NAME}")
    return store, None


def _absolute(place: Location) -> Location:
    return place if isinstance(place, RemotePath) else Path(os.path.abspath(place))

"""Resolves a user's path or URL to a store of snapshots."""

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
    """Return the store of snapshots at a place. The place need not exist yet. Raises ConfigError for an invalid
    manifest key."""
    keys = keys_of_environment()
    return RemoteStore(place, keys) if isinstance(place, RemotePath) else DirectoryStore(place, keys)


def open_store(text: str) -> SnapshotStore:
    """Return the store of snapshots at a path or URL. Raises ConfigError."""
    return store_of(_absolute(location(text)))


def store_at(text: str) -> tuple[SnapshotStore, str | None]:
    """Return the store of snapshots at a path or URL. If the place is the folder of one snapshot, also return the id
    of that snapshot, otherwise None. Raises ConfigError."""
    place = _absolute(location(text))
    if (place / manifests.NAME).exists():
        return store_of(place.parent), place.name
    if not place.is_dir():
        raise ConfigError(
            f"{place} is not a directory of snapshots; create one with `kvstore snapshot create --to {place}`"
        )
    store = store_of(place)
    if not store.ids() and not store.remains() and {each.name for each in place.iterdir()} - {LOCK}:
        raise ConfigError(f"{place} has no snapshots: none of its folders has a {manifests.NAME}")
    return store, None


def _absolute(place: Location) -> Location:
    return place if isinstance(place, RemotePath) else Path(os.path.abspath(place))

"""The background work in each of a bookie's directories, until the directory fails."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.directories.directory_storage import DirectoryStorage
from kvstore.bookie.directories.spread import AnyStorage
from kvstore.bookie.inventory import IsOurs
from kvstore.bookie.storage import BookieStorage
from kvstore.bookie.upkeep.limbo import Elsewhere, nowhere, watch
from kvstore.bookie.upkeep.reclaim import Reclaimer
from kvstore.bookie.upkeep.scrub import Scrubber
from kvstore.env.ports import Env, Nursery
from kvstore.types import LedgerId


@dataclass(frozen=True, slots=True)
class DirectoryUpkeep:
    """The background tasks of one directory: reclaiming space and scrubbing."""

    reclaimer: Reclaimer
    scrubber: Scrubber


def start_upkeep(
    env: Env, config: BookieConfig, storage: AnyStorage, authority: MetadataAuthority, is_ours: IsOurs, nursery: Nursery
) -> list[DirectoryUpkeep]:
    """Start the upkeep in each directory of a storage that has been started."""
    if isinstance(storage, BookieStorage):
        return [_start(env, config, storage, authority, is_ours, nursery, nowhere)]
    nurseries = {part.directory.number: nursery.child(part.directory.path) for part in storage.parts}

    async def end(part: DirectoryStorage) -> None:
        await nurseries[part.directory.number].close()
        await part.survey(authority, partial(storage.homes.is_elsewhere, part))

    def has_failed(part: DirectoryStorage) -> None:
        nursery.spawn(end(part), name=f"end the upkeep of {part.directory.path}")

    storage.on_failed(has_failed)
    found = [
        _start(
            env,
            part.config,
            part.storage,
            authority,
            is_ours,
            nurseries[part.directory.number],
            partial(storage.homes.is_elsewhere, part),
        )
        for part in storage.parts
    ]
    for part in storage.parts:
        if part.reason:  # it failed between its start and this one
            has_failed(part)
    return found


def admitted(storage: AnyStorage, is_ours: IsOurs) -> set[int]:
    """Return the cluster's own ledgers of a storage that the metadata store knew when they were admitted here."""
    parts = [storage] if isinstance(storage, BookieStorage) else [part.storage for part in storage.parts]
    known = ((number, each) for part in parts for number, each in part.inventory.ledgers.items() if each.is_admitted)
    return {number for number, ledger in known if is_ours(LedgerId(number), ledger.key)}


def _start(
    env: Env,
    config: BookieConfig,
    storage: BookieStorage,
    authority: MetadataAuthority,
    is_ours: IsOurs,
    nursery: Nursery,
    is_elsewhere: Elsewhere,
) -> DirectoryUpkeep:
    found = DirectoryUpkeep(Reclaimer(env, config, storage, authority, is_ours), Scrubber(config, storage))
    nursery.spawn(watch(storage, authority, is_elsewhere), name="limbo")
    nursery.spawn(found.reclaimer.run(), name="reclaim")
    nursery.spawn(found.scrubber.run(), name="scrub")
    return found

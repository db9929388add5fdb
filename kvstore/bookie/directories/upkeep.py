"""The work in the background of each of a bookie's directories, until that fails."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvstore.bookie.admission import Authority
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.directories.part import Part
from kvstore.bookie.directories.spread import AnyStorage
from kvstore.bookie.storage import BookieStorage
from kvstore.bookie.upkeep.limbo import Elsewhere, nowhere, watch
from kvstore.bookie.upkeep.reclaim import Reclaimer
from kvstore.bookie.upkeep.scrub import Scrubber
from kvstore.env.ports import Env, Nursery


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Of one directory."""

    reclaimer: Reclaimer
    scrubber: Scrubber


def start_upkeep(
    env: Env, config: BookieConfig, storage: AnyStorage, authority: Authority, nursery: Nursery
) -> list[Upkeep]:
    """Begin it in each directory of a storage that has been started."""
    if isinstance(storage, BookieStorage):
        return [_start(env, config, storage, authority, nursery, nowhere)]
    nurseries = {part.directory.number: nursery.child(part.directory.path) for part in storage.parts}

    def end(part: Part) -> None:
        nursery.spawn(nurseries[part.directory.number].close(), name=f"end the upkeep of {part.directory.path}")

    storage.on_failed(end)
    return [
        _start(
            env,
            part.config,
            part.storage,
            authority,
            nurseries[part.directory.number],
            partial(storage.homes.is_elsewhere, part),
        )
        for part in storage.parts
    ]


def admitted(storage: AnyStorage) -> set[int]:
    """Ledgers of a storage that the metadata store knew when they came here."""
    parts = [storage] if isinstance(storage, BookieStorage) else [part.storage for part in storage.parts]
    return {number for part in parts for number, ledger in part.inventory.ledgers.items() if ledger.is_admitted}


def _start(
    env: Env,
    config: BookieConfig,
    storage: BookieStorage,
    authority: Authority,
    nursery: Nursery,
    is_elsewhere: Elsewhere,
) -> Upkeep:
    found = Upkeep(Reclaimer(env, config, storage, authority), Scrubber(config, storage))
    nursery.spawn(watch(storage, authority, is_elsewhere), name="limbo")
    nursery.spawn(found.reclaimer.run(), name="reclaim")
    nursery.spawn(found.scrubber.run(), name="scrub")
    return found

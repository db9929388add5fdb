"""Prepares the directories of a bookie that has several: reads what each says, writes what has changed, and finds out
which bookie they belong to. membership.py decides what follows from their contents.

A directory other than the first has its own index, in `index`, and copies of the files that identify the bookie
(`VERSION`, `STARTS`, see identity.py), so that any surviving directory is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvstore.bookie.age import AGE
from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.directories.membership import Bare, Content, DirectoryPlan, plan
from kvstore.bookie.directories.places import PLACE, MemberState, PlaceFile, decode_place, encode_place
from kvstore.bookie.identity import STARTS, VERSION, BookieIdentity, establish
from kvstore.bookie.opening import make_directory
from kvstore.bookie.small_files import contents, read_file, replace_file
from kvstore.env.ports import Env
from kvstore.errors import ConfigError
from kvstore.meta.cookie_store import CookieStore
from kvstore.os_errors import is_passing

log = logging.getLogger(__name__)

INDEX = "index"
"""Name of the index directory in a directory other than the first."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory in which the bookie stores ledgers."""

    number: int
    path: str
    index_dir: str
    doubts: tuple[str, ...]
    """Why it may lack records."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A bookie's directories, ready to be read back."""

    identity: BookieIdentity
    directories: tuple[Directory, ...]
    plan: DirectoryPlan


async def gather(
    env: Env, config: BookieConfig, cookies: CookieStore, instance_id: str, authority: MetadataAuthority
) -> Gathered:
    """Find out which directories this bookie has, and which bookie it is. Raises a ConfigError that names the directory
    at fault, MetadataError, OSError (a disk is full)."""
    return await _Gathering(env, config).run(cookies, instance_id, authority)


def unreadable(path: str, error: OSError) -> ConfigError:
    """Return the error for the operator if a directory cannot be read or written at the start."""
    return ConfigError(
        f"{path} cannot be read or written: {error}. If its disk is lost, add it to storage.lost_dirs: the bookie "
        "starts without it, and its entries are copied here from other bookies"
    )


class _Gathering:
    def __init__(self, env: Env, config: BookieConfig) -> None:
        self._env, self._disk, self._config = env, env.disk, config

    async def run(self, cookies: CookieStore, instance_id: str, authority: MetadataAuthority) -> Gathered:
        used = [each for each in self._config.directories if each not in self._config.lost_dirs]
        found = plan({each: self._read_content(each) for each in used}, self._config.lost_dirs, self._draw)
        anchor = min(found.present)
        others = [found.paths[each] for each in found.present if each != anchor]
        config = self._config.alone(found.paths[anchor], self._config.index_dir)
        identity = await establish(
            self._env, config, cookies, instance_id, authority=authority, others=others, is_survivor=anchor != 0
        )
        if found.bookie not in ("", identity.bookie):
            raise ConfigError(
                f"{found.paths[anchor]}/{PLACE} belongs to bookie {found.bookie}, expected {identity.bookie}"
            )
        found = replace(found, bookie=identity.bookie)
        if found.version:
            found = self._change(found, anchor)
        directories = tuple(self._directory(each, found, anchor, identity) for each in found.present)
        return Gathered(identity, directories, found)

    def _read_content(self, path: str) -> Content:
        try:
            names = contents(self._disk, path)
            place = decode_place(read_file(self._disk, f"{path}/{PLACE}")) if PLACE in names else None
        except ValueError as error:
            raise ConfigError(f"{path}/{PLACE}: {error}") from None
        except OSError as error:
            if len(self._config.directories) == 1 or is_passing(error):
                raise
            raise unreadable(path, error) from error
        if PLACE in names and place is None:
            raise ConfigError(f"{path}/{PLACE} is damaged. If the directory is lost, add it to storage.lost_dirs")
        if place is not None:
            return place
        if names and path != self._config.directories[0] and VERSION not in names:
            raise ConfigError(f"{path} contains {min(names)} although it is not formatted yet")
        return Bare.OWNED if names else Bare.EMPTY

    def _draw(self) -> str:
        return f"{self._env.random.getrandbits(64):016x}"

    def _change(self, found: DirectoryPlan, anchor: int) -> DirectoryPlan:
        """Write a changed plan to all directories: step by step, each step in all directories before the next."""
        if found.is_changed:
            self.record(found, found.present)
        if found.joining:
            for number in found.joining:
                self._join(found, number, found.paths[anchor])
            found = found.after(MemberState.JOINING, MemberState.PRESENT)
            self.record(found, found.present)
        return replace(found, is_changed=False)

    def _join(self, found: DirectoryPlan, number: int, anchor: str) -> None:
        """Create a directory in which nothing was ever stored. The remains of a crash are overwritten."""
        path, disk = found.paths[number], self._disk
        self._refuse_one_place(found, number)
        try:
            make_directory(disk, path)
            self.record(found, [number])
            for name in (VERSION, STARTS, AGE):
                if disk.exists(f"{anchor}/{name}"):
                    replace_file(disk, f"{path}/{name}", read_file(disk, f"{anchor}/{name}"))
            disk.mkdir(f"{path}/{INDEX}")
            disk.sync_dir(path)
        except OSError as error:
            raise error if is_passing(error) else unreadable(path, error) from error
        log.warning("new directory created bookie=%s number=%d path=%s", found.bookie, number, path)

    def _refuse_one_place(self, found: DirectoryPlan, number: int) -> None:
        """Raise ConfigError if a new directory is another one under another path, because two journals would overwrite
        each other. The other one contains its own number by now, so that bind mounts are detected too."""
        content = self._read_content(found.paths[number])
        if isinstance(content, PlaceFile) and content.here != number:
            raise ConfigError(
                f"expected storage.journal_dirs to name distinct directories, got {found.paths[number]} and "
                f"{found.paths[content.here]}, which are the same; name each directory once"
            )

    def record(self, found: DirectoryPlan, numbers: Iterable[int]) -> None:
        """Write the plan to directories."""
        for number in numbers:
            place = PlaceFile(found.bookie, found.version, number, found.members)
            replace_file(self._disk, f"{found.paths[number]}/{PLACE}", encode_place(place))

    def _directory(self, number: int, found: DirectoryPlan, anchor: int, identity: BookieIdentity) -> Directory:
        path = found.paths[number]
        if number == anchor:
            doubts = identity.doubts
        else:
            doubts = (f"{path} remembers another start than the others, or is younger: it is a copy",) * (
                path in identity.doubted
            )
        return Directory(number, path, self._config.index_dir if number == 0 else f"{path}/{INDEX}", doubts)


def record_gone(env: Env, config: BookieConfig, found: DirectoryPlan) -> DirectoryPlan:
    """Record that the lost directories are gone: everything that they may have held is in limbo, on disk. Raises
    OSError."""
    now = found.after(MemberState.LOST, MemberState.GONE)
    _Gathering(env, config).record(now, now.present)
    return now

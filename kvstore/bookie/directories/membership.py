"""Decides which of a bookie's directories is which, which are new, and which are lost. Decides only; gathering.py reads
and writes.

  (absent) ──► JOINING ──► PRESENT ──► LOST ──► GONE

Each step of a directory is first written to the others' files. The directory is used once all of them say PRESENT. So
whichever directory is lost, at any moment, the remaining ones know that it existed, and whether anything was ever
stored in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from kvstore.bookie.directories.places import PLACE, DirectoryMember, MemberState, PlaceFile
from kvstore.errors import ConfigError


class Bare(Enum):
    """A directory without the file PLACE."""

    EMPTY = auto()
    OWNED = auto()
    """The only directory of a bookie."""


Content = PlaceFile | Bare
_HERE = (MemberState.JOINING, MemberState.PRESENT)


@dataclass(frozen=True, slots=True)
class DirectoryPlan:
    """The directories after this start's changes."""

    bookie: str
    """The bookie id; empty: the bookie that owns the first directory."""
    version: int
    """Version of the PLACE files; 0: none is written, because the bookie has a single directory."""
    members: tuple[DirectoryMember, ...]
    paths: Mapping[int, str]
    """Paths of the members that are present, by number."""
    is_changed: bool
    """True if not all directories say this already."""

    @property
    def joining(self) -> list[int]:
        return [each.number for each in self.members if each.state is MemberState.JOINING]

    @property
    def present(self) -> list[int]:
        return [each.number for each in self.members if each.state is MemberState.PRESENT]

    @property
    def lost(self) -> list[DirectoryMember]:
        """The directories whose ledgers must be put in limbo before anything is answered."""
        return [each for each in self.members if each.state is MemberState.LOST]

    def after(self, former: MemberState, latter: MemberState) -> DirectoryPlan:
        """Return the plan with all members in one state moved to the next."""
        members = tuple(replace(each, state=latter) if each.state is former else each for each in self.members)
        return replace(self, version=self.version + 1, members=members, is_changed=True)


# docs/protocol.md B23
def plan(found: Mapping[str, Content], lost: Collection[str], draw: Callable[[], str]) -> DirectoryPlan:
    """Decide the states of the directories. `found`: contents of the configured directories except the `lost` ones, in
    their order. `draw` returns a mark. Raises a ConfigError that names the directory at fault."""
    if not found:
        raise ConfigError(
            "storage.lost_dirs names every directory of storage.journal_dirs. To abandon the entries of this bookie, "
            "empty all of them and remove them from storage.lost_dirs"
        )
    places = {path: content for path, content in found.items() if isinstance(content, PlaceFile)}
    if not places:
        if lost and set(found.values()) == {Bare.EMPTY}:
            raise ConfigError(
                f"{', '.join(found)} are empty, and {', '.join(sorted(lost))} lost: nothing is left of a bookie. "
                "Remove storage.lost_dirs to start a new bookie"
            )
        return _first_plan(found, draw)
    newest = max(places.values(), key=lambda place: place.version)
    _check_agreement(places, newest)
    paths = _paths_by_number(places, newest)
    members = [_now(each, paths, lost) for each in newest.members]
    free = [path for path, content in found.items() if not isinstance(content, PlaceFile)]
    for path in free:
        if found[path] is Bare.OWNED:
            raise ConfigError(f"{path} is the only directory of another bookie than {newest.bookie}")
    members, paths = _with_joining(members, paths, free, draw)
    if not any(each.state is MemberState.PRESENT for each in members):
        raise ConfigError(
            f"nothing was ever stored in {', '.join(found)}, and all others of {newest.bookie} are lost: empty them to "
            "start a new bookie"
        )
    now = tuple(members)
    is_changed = now != newest.members
    is_old = is_changed or any(place.version != newest.version for place in places.values())
    return DirectoryPlan(newest.bookie, newest.version + is_changed, now, paths, is_old)


def _first_plan(found: Mapping[str, Content], draw: Callable[[], str]) -> DirectoryPlan:
    """Return the first plan of directories, none of which has been one of several before."""
    first, *others = found
    for path in others:
        if found[path] is Bare.OWNED:
            raise ConfigError(
                f"{path} is the only directory of a bookie; expected it first in storage.journal_dirs, got {first}"
            )
    if not others:
        return DirectoryPlan("", 0, (DirectoryMember(0, "", MemberState.PRESENT, first),), {0: first}, False)
    members = [DirectoryMember(0, draw(), MemberState.PRESENT, first)]
    members += [DirectoryMember(number, draw(), MemberState.JOINING, path) for number, path in enumerate(others, 1)]
    return DirectoryPlan("", 1, tuple(members), dict(enumerate(found)), True)


def _check_agreement(places: Mapping[str, PlaceFile], newest: PlaceFile) -> None:
    for path, place in places.items():
        if place.bookie != newest.bookie:
            raise ConfigError(f"{path} belongs to bookie {place.bookie}, other directories to {newest.bookie}")
        if place.version == newest.version and place.members != newest.members:
            raise ConfigError(f"{path}/{PLACE} differs from another directory's of the same version {place.version}")


def _paths_by_number(places: Mapping[str, PlaceFile], newest: PlaceFile) -> dict[int, str]:
    """Return the path of each directory. Raises ConfigError if a directory is there twice or is no longer wanted."""
    known, paths = {each.number: each for each in newest.members}, dict[int, str]()
    for path, place in places.items():
        own = next((each for each in place.members if each.number == place.here), None)
        member = known.get(place.here)
        if own is None or member is None or own.mark != member.mark:
            raise ConfigError(f"{path} is directory {place.here} of {place.bookie}, which the others do not know")
        if member.state not in _HERE:
            raise ConfigError(
                f"{path} is directory {place.here} of {place.bookie}, which was declared lost: its entries are out of "
                "date. Empty it to add it as a new one"
            )
        if place.here in paths:
            raise ConfigError(f"{path} is directory {place.here} of {place.bookie}, and so is {paths[place.here]}")
        paths[place.here] = path
    return paths


def _now(member: DirectoryMember, paths: Mapping[int, str], lost: Collection[str]) -> DirectoryMember:
    """Return the member as it is found now. Raises ConfigError if it is missing and not declared lost."""
    if member.number in paths:
        return replace(member, path=paths[member.number])
    if member.state is not MemberState.PRESENT:
        return member
    if member.path in lost:
        return replace(member, state=MemberState.LOST)
    raise ConfigError(
        f"directory {member.number} of this bookie, {member.path}, is missing or empty: mount its disk. If the disk "
        f"is lost, add {member.path} to storage.lost_dirs: the bookie starts without it, and its entries are copied "
        "here from other bookies"
    )


def _with_joining(
    members: Sequence[DirectoryMember], paths: dict[int, str], free: Sequence[str], draw: Callable[[], str]
) -> tuple[list[DirectoryMember], dict[int, str]]:
    """Add the empty directories as new members. A directory that was joining and is empty again is not a new one."""
    left, paths, free = list(members), dict(paths), list(free)
    for member in members:
        if member.state is MemberState.JOINING and member.number not in paths:
            if member.path in free:
                paths[member.number] = member.path
                free.remove(member.path)
            else:
                left.remove(member)
    highest = max(each.number for each in members)
    for number, path in enumerate(free, highest + 1):
        left.append(DirectoryMember(number, draw(), MemberState.JOINING, path))
        paths[number] = path
    return left, paths

"""Finds out to which bookie the data directories belong.

A bookie id is `<name>-<incarnation>`. The incarnation is drawn when empty directories are formatted, and lives as long
as their contents. So a bookie that has lost its disk comes back under another id, and nobody takes its "no such entry"
or its acceptance for that of the lost bookie. A cookie in every directory and in the metadata store says what belongs
together.

If the operator gives the id (`host:port`, as Apache's older clients and tools need it), there is no incarnation in it.
Then empty directories are formatted only while the metadata store knows no bookie of that id, neither by a cookie nor
in a ledger. So a new bookie never denies what another one, perhaps a lost one, has stored under the id.

The version of the cookie's node counts the starts, and the directories remember the last start. Directories that
remember an older start were restored from a copy, and records may be missing. The same holds for directories that are
younger than the metadata store says (kvstore.bookie.age).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvstore.bookie.age import AGE, age_in
from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.config import BookieConfig, StorageConfig
from kvstore.bookie.opening import make_directory
from kvstore.bookie.small_files import contents, read_file, replace_file
from kvstore.bookie.upkeep.limbo import may_name
from kvstore.env.ports import Disk, Env
from kvstore.errors import ConfigError, Corrupted, NoSuchNode, VersionConflict
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.cookies import Cookie, decode_cookie, encode_cookie
from kvstore.meta.ephemeral import RETRY_S
from kvstore.meta.registration import REGISTER_ATTEMPTS_MAX, RegistrationClient
from kvstore.meta.update import until_known
from kvstore.os_errors import is_passing
from kvstore.types import BookieId

log = logging.getLogger(__name__)

VERSION = "VERSION"
"""File name of the cookie, in every directory."""
FORMATTING = "FORMATTING"
"""File name of the cookie while the directories are being formatted and nothing was stored in them yet."""
STARTS = "STARTS"
"""File name, in the journal's directory, of the cookie node's version at the last start and of the one that this start
makes."""
_STARTS_BYTES = 42
"""Length of the recorded starts. A file that was damaged may be longer, and the starts are written in place."""


# docs/protocol.md L13
@dataclass(frozen=True, slots=True)
class BookieIdentity:
    """The id under which a bookie starts, and the reasons to doubt its records."""

    bookie: BookieId
    is_new: bool
    """True if the directories were empty."""
    doubts: tuple[str, ...]
    """Reasons why records may be missing from the directories."""
    doubted: tuple[str, ...] = ()
    """The bookie's other directories that were restored from a copy."""
    start: int = field(default=-1, compare=False)
    """Number of this start, which `remember_start` records."""


# docs/protocol.md B8
async def establish(
    env: Env,
    config: BookieConfig,
    cookies: CookieStore,
    instance_id: str,
    *,
    authority: MetadataAuthority | None = None,
    others: Sequence[str] = (),
    is_survivor: bool = False,
) -> BookieIdentity:
    """Find out which bookie the data directories belong to, or format empty directories for a new one. `authority` is
    required if the operator has configured the id.

    `others` are further directories of the bookie, which remember the start too. With `is_survivor`, the directory that
    was formatted first is lost, and only this journal directory is checked. Raises MetadataError, or a ConfigError that
    names the directory at fault.
    """
    return await _Identification(env, config, cookies, instance_id, authority, others, is_survivor=is_survivor).run()


async def refuse_orphaned_directories(env: Env, config: StorageConfig, cookies: CookieStore) -> None:
    """Raise ConfigError if a node without the bookie role has the directories of a bookie that ledgers may still need.
    The entries there would be missing, and after the next such node no quorum would have them."""
    for directory in _owned(env.disk, config):
        path = f"{directory}/{VERSION}"
        try:
            bookie = decode_cookie(read_file(env.disk, path), what=path).bookie
            await cookies.read(bookie)
        except NoSuchNode:
            continue  # decommissioned
        except Corrupted as error:
            raise ConfigError(f"{error}: expected a node with a bookie, or {directory} to be empty") from None
        raise ConfigError(
            f"{directory} has the entries of bookie {bookie}, but this node has no bookie (roles, or "
            f"bookies of [log]): give it one, or run `kvstore bookie decommission {bookie}` first"
        )


def _owned(disk: Disk, config: StorageConfig) -> list[str]:
    """Return the configured directories that belong to a bookie. Any of several may be lost or not mounted."""
    return [each for each in config.directories if disk.exists(f"{each}/{VERSION}")]


# docs/protocol.md B7
def remember_start(disk: Disk, directories: Iterable[str], identity: BookieIdentity) -> None:
    """Record this start in the doubted directories. Call it only after the doubt itself is on disk; if the start fails
    before that, the next start detects the doubt again. Raises OSError."""
    for each in directories:
        if max(_starts_in(disk, each), default=-1) < identity.start:
            _note_start(disk, each, identity.start - 1, identity.start)


# docs/protocol.md B34
async def refuse_beside_another(env: Env, config: BookieConfig, bookies: RegistrationClient) -> None:
    """Raise ConfigError if the bookie of these directories stays registered at another address for longer than a
    session lasts. That bookie runs on the original of which these directories are a copy. The check comes before the
    start is counted, so that the running bookie does not later take its own directories for a copy. Raises
    MetadataError."""
    owned, ours = _owned(env.disk, config), config.advertise or config.listen
    if ours.endswith(":0") or not owned:
        return  # the registration itself will detect it
    path = f"{owned[0]}/{VERSION}"
    try:
        bookie = decode_cookie(read_file(env.disk, path), what=path).bookie
    except (Corrupted, OSError):
        return  # reported by the code that needs it
    for _ in range(REGISTER_ATTEMPTS_MAX):
        there = (await bookies.bookies()).all.get(bookie, ours)
        if there == ours:
            return
        await asyncio.sleep(RETRY_S)
    raise ConfigError(
        f"expected one process of bookie {bookie}, to which {owned[0]} belongs, got another at {there}: never start a "
        "bookie on a copy of its directories"
    )


class _Identification:
    def __init__(
        self,
        env: Env,
        config: BookieConfig,
        cookies: CookieStore,
        instance_id: str,
        authority: MetadataAuthority | None,
        others: Sequence[str],
        *,
        is_survivor: bool,
    ) -> None:
        self._env = env
        self._disk: Disk = env.disk
        self._config = config
        self._directories = (config.journal_dir,) if is_survivor else (config.journal_dir, config.index_dir)
        self._others = others
        self._is_survivor = is_survivor
        self._cookies = cookies
        self._instance_id = instance_id
        self._authority = authority

    async def run(self) -> BookieIdentity:
        found = {each: contents(self._disk, each) for each in self._directories}
        unfinished = [each for each in self._directories if FORMATTING in found[each]]
        if unfinished or not any(found.values()):
            return await self._format(found, unfinished)
        cookies = {each: self._cookie_in(each, found[each]) for each in self._directories}
        first = cookies[self._directories[0]]
        for directory, cookie in cookies.items():
            if cookie != first:
                raise ConfigError(
                    f"{directory}/{VERSION} belongs to bookie {cookie.bookie}, {self._directories[0]}/{VERSION} to "
                    f"{first.bookie}, or they differ otherwise: {cookie} is not {first}"
                )
        self._check(first)
        return await self._known(first)

    def _cookie_in(self, directory: str, content: set[str]) -> Cookie:
        if VERSION not in content:
            what = "has files but no cookie" if content else "is empty while the others are not"
            raise ConfigError(f"{directory} {what}; a disk may be missing. {self._advice(directory)}")
        return self._read_cookie(f"{directory}/{VERSION}")

    def _advice(self, directory: str) -> str:
        if directory == self._config.index_dir:
            return (
                f"If it is lost, copy {self._config.journal_dir}/{VERSION} to it and start again: its other files are "
                "recreated from the journal"
            )
        return self._abandonment

    @property
    def _abandonment(self) -> str:
        return f"To abandon the entries of this bookie, empty all of: {', '.join(self._directories)}"

    def _read_cookie(self, path: str) -> Cookie:
        try:
            return decode_cookie(read_file(self._disk, path), what=path)
        except Corrupted as error:
            raise ConfigError(f"{error}. {self._repair(path)}") from None
        except OSError as error:
            if is_passing(error):
                raise
            raise ConfigError(f"{path} cannot be read: {error}. {self._repair(path)}") from error

    def _repair(self, path: str) -> str:
        """Return what the operator can do about a damaged cookie."""
        directory, _, name = path.rpartition("/")
        if name == FORMATTING:
            return f"Nothing is stored yet: empty all of: {', '.join(self._directories)}"
        for each in (*self._directories, *self._others):
            intact = f"{each}/{VERSION}"
            with suppress(Corrupted, OSError):
                if each != directory:
                    decode_cookie(read_file(self._disk, intact), what=intact)
                    return f"Copy {intact} to {path} and start again"
        return self._abandonment

    def _check(self, cookie: Cookie) -> None:
        """Raise ConfigError unless the directories belong to this bookie and this cluster."""
        directory = self._directories[0]
        if cookie.instance_id != self._instance_id:
            raise ConfigError(
                f"{directory} belongs to the cluster {cookie.instance_id}, the metadata store to {self._instance_id}"
            )
        if not self._is_ours(cookie.bookie):
            called = self._config.id or self._config.name
            raise ConfigError(f"{directory} belongs to bookie {cookie.bookie}, expected {called}")
        if cookie != self._cookie(cookie.bookie) and not self._is_survivor:
            raise ConfigError(f"{directory} was formatted together with other directories than configured: {cookie}")

    def _is_ours(self, bookie: BookieId) -> bool:
        if self._config.id:
            return bookie == self._config.id
        return ":" not in bookie and bookie.rpartition("-")[0] == self._config.name

    def _cookie(self, bookie: BookieId) -> Cookie:
        return Cookie(
            bookie=bookie,
            journal_dirs=(self._config.journal_dir,),
            ledger_dirs=(self._config.journal_dir,),
            index_dirs=(self._config.index_dir,),
            instance_id=self._instance_id,
        )

    async def _known(self, cookie: Cookie) -> BookieIdentity:
        directory = self._directories[0]
        try:
            known, version = await self._cookies.read(cookie.bookie)
        except NoSuchNode:
            raise ConfigError(
                f"{directory} belongs to bookie {cookie.bookie}, which the metadata store does not know"
            ) from None
        if known != cookie:
            raise ConfigError(f"{directory} has the cookie {cookie}, the metadata store has {known}")
        doubts = {}
        age = await self._age(cookie.bookie)
        for each in (self._config.journal_dir, *self._others):
            if doubt := self._doubt_of_start(each, version) or self._doubt_of_age(each, age):
                doubts[each] = doubt
        await self._claim(cookie, version)
        own = doubts.pop(self._config.journal_dir, "")
        return BookieIdentity(cookie.bookie, False, (own,) if own else (), tuple(doubts), version + 1)

    # docs/protocol.md B7
    def _doubt_of_start(self, directory: str, version: int) -> str:
        """Record this start in the directory. If the directory does not remember the last start, return why it may lack
        records, and record nothing: `remember_start` does that when the doubt is on disk. Otherwise return ""."""
        starts = _starts_in(self._disk, directory)
        latest = max(starts, default=-1)
        if latest < version:
            return f"{directory} remembers starts {starts}, the metadata store {version}: it is a copy"
        # The directory may be ahead of a metadata store that was recreated from a file or an older copy, and stays
        # ahead: nothing is missing here, nor will it be when a later copy is restored.
        _note_start(self._disk, directory, version, max(version + 1, latest))
        return ""

    async def _age(self, bookie: BookieId) -> int | None:
        """Return the age in the metadata store, or None if it cannot be read."""
        try:
            return (await self._cookies.age(bookie))[0]
        except Corrupted as error:
            log.warning("age in the metadata store cannot be read bookie=%s error=%s", bookie, error)
            return None

    # docs/protocol.md B34
    def _doubt_of_age(self, directory: str, age: int | None) -> str:
        """Return why the directory may lack records; "" if it is as old as it must be."""
        found = age_in(self._disk, directory)
        if age is not None and found >= age:
            return ""
        wanted = "an unknown one" if age is None else f"{age}"
        return f"{directory} has the age {found}, the metadata store {wanted}: it is a copy from before"

    async def _claim(self, cookie: Cookie, version: int) -> None:
        """Raise the version of the cookie's node by one, which only one process can do."""
        attempts = 0

        async def write() -> None:
            nonlocal attempts
            attempts += 1
            try:
                await self._cookies.write(cookie, version)
            except VersionConflict:
                _, found = await self._cookies.read(cookie.bookie)
                if attempts == 1 or found != version + 1:  # otherwise it was our own write, whose answer was lost
                    raise ConfigError(f"another process is starting as bookie {cookie.bookie}") from None

        await until_known(write)

    async def _format(self, found: dict[str, set[str]], unfinished: list[str]) -> BookieIdentity:
        """Format a new incarnation, or finish a format that a crash interrupted. Nothing is stored before this is
        complete."""
        for directory, content in found.items():
            strange = content - {FORMATTING, VERSION, STARTS, AGE}
            if strange:
                raise ConfigError(f"{directory} contains {sorted(strange)[0]} although it is not formatted yet")
        begun = self._begun(unfinished)
        new = BookieId(self._config.id or f"{self._config.name}-{self._env.random.getrandbits(48):012x}")
        cookie = begun or self._cookie(new)
        if self._config.id:
            await self._refuse_if_taken(cookie, is_begun=begun is not None)
        for directory in self._directories:
            make_directory(self._disk, directory)
            self._write(f"{directory}/{FORMATTING}", encode_cookie(cookie))
        version = await self._cookies.write(cookie, None)
        _note_start(self._disk, self._config.journal_dir, version, version)  # a copy of the directory is no later start
        if self._config.id:
            await self._take(cookie, version)
        for directory in self._directories:
            self._write(f"{directory}/{VERSION}", encode_cookie(cookie))
        for directory in self._directories:
            self._disk.remove(f"{directory}/{FORMATTING}")
            self._disk.sync_dir(directory)
        log.warning("formatted empty directories for a new bookie bookie=%s", cookie.bookie)
        return BookieIdentity(cookie.bookie, True, ())

    def _begun(self, unfinished: list[str]) -> Cookie | None:
        """Return the cookie of an interrupted format, if it is still the wanted one."""
        if not unfinished:
            return None
        cookie = self._read_cookie(f"{unfinished[0]}/{FORMATTING}")
        return cookie if self._is_ours(cookie.bookie) and cookie == self._cookie(cookie.bookie) else None

    # docs/protocol.md B27
    async def _refuse_if_taken(self, cookie: Cookie, *, is_begun: bool) -> None:
        """Raise ConfigError if another bookie has, or had, the given id."""
        bookie = cookie.bookie
        with suppress(NoSuchNode):
            try:
                known, version = await self._cookies.read(bookie)
            except Corrupted as error:
                raise self._taken(bookie, str(error)) from None
            if not is_begun or version or known != cookie:
                raise self._taken(bookie, "it has a cookie in the metadata store")
        assert self._authority is not None, "only the metadata store can judge a given id"
        for ledger in await self._authority.ledgers():
            if await may_name(self._authority, ledger, bookie):
                raise self._taken(bookie, f"ledger {ledger} names it")

    async def _take(self, cookie: Cookie, version: int) -> None:
        """Take the given id. If two processes format under one id at the same time, only the process whose write the
        metadata store has confirmed gets it. Their cookies are equal, so a process without an answer to its write
        cannot find out whether it won. Raises MetadataUnknown then."""
        if version:
            raise self._taken(cookie.bookie, "it has a cookie in the metadata store")
        _note_start(self._disk, self._config.journal_dir, version, version + 1)
        try:
            await self._cookies.write(cookie, version)
        except VersionConflict:
            raise self._taken(cookie.bookie, "another process has just taken it") from None

    def _taken(self, bookie: BookieId, reason: str) -> ConfigError:
        return ConfigError(
            f"{self._directories[0]} is empty, but {bookie} is not a new bookie: {reason}. If it is lost, "
            f"run `kvstore bookie decommission {bookie}`; if only its disk is missing, mount the disk"
        )

    def _write(self, path: str, data: bytes) -> None:
        replace_file(self._disk, path, data)


def _starts_in(disk: Disk, directory: str) -> list[int]:
    """Return the starts that the directory remembers. Return none if the disk cannot read them: that raises a doubt,
    and does not prevent the start."""
    path = f"{directory}/{STARTS}"
    try:
        data = read_file(disk, path)[:_STARTS_BYTES] if disk.exists(path) else b""
        words = data.decode(errors="replace").split()
    except OSError as error:
        if is_passing(error):
            raise
        log.error("file cannot be read path=%s error=%s", path, error)
        words = []
    return [int(word) for word in words if word.isdecimal()]


def _note_start(disk: Disk, directory: str, last: int, this: int) -> None:
    """Write the starts in place, so that this needs no space: a full disk does not prevent a start. A start that is
    half written is not remembered, and raises doubts."""
    file = disk.open(f"{directory}/{STARTS}", create=True)
    try:
        file.pwrite(0, b"%20d %20d\n" % (last, this))
        file.sync()
    finally:
        file.close()

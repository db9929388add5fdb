"""The state of a Redis connection besides its bytes: protocol version, name, transaction; and the commands about these.
Decides only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.env.slow_log import KEPT
from kvstore.errors import ConditionFailed, StoreError
from kvstore.limits import BATCH_BYTES_MAX
from kvstore.partition.state.commands import Code, Flag, Level, Op
from kvstore.server.access.identities import Identity
from kvstore.server.redis import replies
from kvstore.server.redis.commands import COMMANDS, known
from kvstore.server.redis.plans import (
    CommandError,
    Context,
    Plan,
    Reply,
    Several,
    Single,
    Special,
    check_one_owner,
    check_pattern,
    first_failure,
    integer,
)
from kvstore.server.redis.replies import FORMATS
from kvstore.server.routing.keys import matcher

QUEUED_MAX = 4096
"""Commands of one transaction."""
WATCHED_MAX = 1024
"""Keys that one connection watches."""
QUEUED_BYTES_MAX = 4 << 20
"""What they may take before EXEC looks at them, with so much beside the bytes of each command and each of its words:"""
_COMMAND_BYTES, _WORD_BYTES = 160, 64
REDIS_VERSION = "7.2.0"
"""Whose behaviour the commands have; clients look at it."""
ACKNOWLEDGED_REPLICAS = 1
"""Every acknowledged write is on disk on at least two machines: in Redis's count, which leaves the master out, one."""
_CHECK, _IF_VERSION = int(Code.CHECK), int(Flag.IF_VERSION)
_SETTINGS: dict[bytes, bytes] = {
    b"save": b"",
    b"appendonly": b"yes",
    b"appendfsync": b"always",
    b"maxmemory": b"0",
    b"databases": b"1",
}
_SETTINGS |= {b"slowlog-max-len": b"%d" % KEPT, b"latency-monitor-threshold": b"0", b"latency-tracking": b"no"}

DEFAULT_USER = "default"
"""The user that AUTH means by a password alone, and that every client is where the cluster does not ask."""
WRONGPASS = "WRONGPASS invalid username-password pair or user is disabled."

Facts = Mapping[str, Mapping[str, object]]
"""What INFO shows: sections of names and values."""


class Session:
    """The state of one connection."""

    def __init__(self, id_: int) -> None:
        self.id = id_
        self.identity: Identity | None = None
        """Who the client has proven to be; None: nobody."""
        self.protocol = 2
        self.level = self._chosen_level = int(Level.LINEARIZABLE)
        """That of reads. What was chosen does not hold while something is watched: EXEC asks whether the keys are as
        they were at the leader then, and what is read meanwhile must be no older."""
        self.name = b""
        self.library = {b"LIB-NAME": b"", b"LIB-VER": b""}
        self.queued: list[Single | Several | Reply] | None = None
        """The commands since MULTI; None outside a transaction."""
        self.watched: dict[bytes, int] = {}
        """The keys under which the next transaction stands, and their versions when they were named; 0: absent."""
        self._queued_bytes = 0
        self._is_spoilt = False

    @property
    def queued_bytes(self) -> int:
        """The bytes that they take."""
        return self._queued_bytes if self.queued else 0

    def reset(self) -> None:
        """Put the connection back into the state in which it was made."""
        self.__init__(self.id)  # type: ignore[misc]

    def queue(
        self, words: list[bytes], clock: Callable[[], int], check: Callable[[Sequence[Op]], None] | None = None
    ) -> bytes:
        """Take a command into the transaction; what to answer. Raises CommandError, which spoils the transaction. As in
        Redis, arguments that are wrong in themselves only fail their own command, at EXEC. `check` raises CommandError
        for operations that the user may not do."""
        assert self.queued is not None
        try:
            if len(self.queued) >= QUEUED_MAX:
                raise CommandError(f"ERR too many commands in a transaction: at most {QUEUED_MAX}")
            size = sum(map(len, words)) + _WORD_BYTES * len(words) + _COMMAND_BYTES
            if self._queued_bytes + size > QUEUED_BYTES_MAX:
                raise CommandError(f"ERR transaction is too large: at most {BATCH_BYTES_MAX} bytes of keys and values")
            command = known(words)
            try:
                found = command.build(words, Context(self.protocol, self.level, clock))
            except CommandError as error:
                found = Reply(replies.error(str(error)))
            if isinstance(found, Special) and found.name == "UNWATCH":
                found = Reply(replies.OK)  # within EXEC it is too late
            if isinstance(found, Special):
                raise CommandError(f"ERR {found.name} is not allowed in transactions")
            if check is not None:
                check(_ops(found))
        except CommandError:
            self._is_spoilt = True
            raise
        self.queued.append(found)
        self._queued_bytes += size
        return replies.QUEUED

    def spoil(self) -> None:
        """A command was refused; within a transaction it spoils that."""
        self._is_spoilt = True

    def check(self, words: list[bytes]) -> None:
        """Check the number of words of a command that is not queued; a wrong one spoils the transaction. Raises
        CommandError."""
        try:
            known(words)
        except CommandError as error:
            self._is_spoilt = True
            if words[0].upper() != b"EXEC":
                raise
            self.queued = None
            self.unwatch()
            reason = str(error).removeprefix("ERR ")
            raise CommandError(f"EXECABORT Transaction discarded because of: {reason}") from None

    def multi(self) -> bytes:
        if self.queued is not None:
            raise CommandError("ERR MULTI calls can not be nested")
        self.queued, self._queued_bytes, self._is_spoilt = [], 0, False
        return replies.OK

    def discard(self) -> bytes:
        if self.queued is None:
            raise CommandError("ERR DISCARD without MULTI")
        self.queued = None
        self.unwatch()
        return replies.OK

    def abandon(self) -> None:
        """End the transaction whose EXEC is refused, and with it what it watches; outside of one nothing is ended."""
        if self.queued is not None:
            self.discard()

    def choose_level(self, level: Level) -> None:
        """Have reads from now on be of this level."""
        self._chosen_level = int(level)
        if not self.watched:
            self.level = self._chosen_level

    def watch(self, key: bytes, version: int) -> None:
        """Have the next transaction stand under the condition that a key has this version; 0: that it is absent."""
        self.watched.setdefault(key, version)
        self.level = int(Level.LINEARIZABLE)

    def unwatch(self) -> dict[bytes, int]:
        """Watch nothing any more; what was watched."""
        watched, self.watched = self.watched, {}
        self.level = self._chosen_level
        return watched

    def check_watch(self, keys: Sequence[bytes]) -> None:
        """Raises CommandError."""
        if self.queued is not None:
            raise CommandError("ERR WATCH inside MULTI is not allowed")
        if len(self.watched.keys() | keys) > WATCHED_MAX:
            raise CommandError(f"ERR too many keys are watched: at most {WATCHED_MAX}")

    def execute(self, owner_of: Callable[[bytes], str]) -> Plan:
        """EXEC: the transaction as one batch of one partition, under the condition that what was watched is as it was.
        Raises CommandError."""
        if self.queued is None:
            raise CommandError("ERR EXEC without MULTI")
        queued, self.queued = self.queued, None
        watched = self.unwatch()
        if self._is_spoilt:
            raise CommandError("EXECABORT Transaction discarded because of previous errors.")
        checks = [(_CHECK, key, _IF_VERSION, version, None) for key, version in watched.items()]
        ops = (*checks, *(op for each in queued for op in _ops(each)))
        if not ops:
            return Reply(replies.array(_shares(queued, [], FORMATS[self.protocol])))
        _check_batch(ops, owner_of)
        return Several([_batch(ops)], _combiner(queued, len(checks), self.protocol))

    def hello(self, words: list[bytes], *, is_checked: bool = False) -> bytes:
        """Choose the protocol version; the reply is in the new one. `is_checked`: the user and password that it may
        carry are known to be right. Raises CommandError."""
        protocol, at = self.protocol, 1
        if len(words) > 1:
            _integer(words[1], "Protocol version")
            if words[1] not in (b"2", b"3"):
                raise CommandError("NOPROTO unsupported protocol version")
            protocol, at = int(words[1]), 2
        name = self.name
        while at < len(words):
            option = words[at].upper()
            if option == b"AUTH" and at + 2 < len(words):
                if not is_checked:
                    _check_user(words[at + 1])
                at += 3
            elif option == b"SETNAME" and at + 1 < len(words):
                name = _checked_name(words[at + 1])
                at += 2
            else:
                raise CommandError(f"ERR Syntax error in HELLO option '{words[at][:32].decode('utf-8', 'replace')}'")
        self.protocol, self.name = protocol, name
        facts = {
            b"server": replies.bulk(b"redis"),
            b"version": replies.bulk(REDIS_VERSION.encode()),
            b"proto": replies.number(protocol),
            b"id": replies.number(self.id),
            b"mode": replies.bulk(b"standalone"),
            b"role": replies.bulk(b"master"),
            b"modules": replies.array([]),
        }
        return replies.mapping(facts, protocol)

    def client(self, words: list[bytes], address: str) -> bytes:
        """The CLIENT subcommands that clients send by themselves."""
        match words[1].upper(), len(words):
            case b"SETNAME", 3:
                self.name = _checked_name(words[2])
            case b"GETNAME", 2:
                return replies.bulk(self.name) if self.name else replies.NULL[self.protocol]
            case b"ID", 2:
                return replies.number(self.id)
            case b"SETINFO", 4 if words[2].upper() in self.library:
                self.library[words[2].upper()] = _checked_name(words[3])
            case (b"INFO", 2):
                return replies.bulk(self.describe(address))
            case (b"NO-EVICT" | b"NO-TOUCH", 3) if words[2].upper() in (b"ON", b"OFF"):
                pass
            case (b"REPLY", 3) if words[2].upper() == b"ON":
                pass
            case _:
                shown = words[1][:32].decode("utf-8", "replace")
                raise CommandError(
                    f"ERR unknown subcommand or wrong arguments for '{shown}'. CLIENT has GETNAME, ID, INFO, LIST, "
                    "NO-EVICT, NO-TOUCH, REPLY ON, SETINFO and SETNAME here"
                )
        return replies.OK

    def describe(self, address: str) -> bytes:
        """The connection in CLIENT LIST's form."""
        library, version = self.library[b"LIB-NAME"], self.library[b"LIB-VER"]
        user = b" user=%b" % self.identity.name.encode() if self.identity is not None else b""
        return b"id=%d addr=%b name=%b db=0%b resp=%d lib-name=%b lib-ver=%b\n" % (
            *(self.id, address.encode(), self.name, user, self.protocol, library, version),
        )


def credentials_of_auth(words: list[bytes]) -> tuple[str, bytes]:
    """User and password of AUTH, which without a user means the default one. Raises CommandError."""
    if len(words) > 3:
        raise CommandError("ERR syntax error")
    return (_user_of(words[1]), words[2]) if len(words) == 3 else (DEFAULT_USER, words[1])


def credentials_of_hello(words: list[bytes]) -> tuple[str, bytes] | None:
    """User and password that HELLO carries; None if it carries none."""
    at = 2
    while at < len(words):
        option = words[at].upper()
        if option == b"AUTH" and at + 2 < len(words):
            return _user_of(words[at + 1]), words[at + 2]
        at += 2
    return None


def acl(words: list[bytes], user: str) -> bytes:
    """ACL WHOAMI; users and roles are kept by `kvstore user` and `kvstore role`."""
    if words[1].upper() != b"WHOAMI" or len(words) != 2:
        raise CommandError("ERR unknown subcommand or wrong arguments. ACL has WHOAMI here; `kvstore user` keeps users")
    return replies.bulk(user.encode())


def _user_of(word: bytes) -> str:
    return word.decode("utf-8", "replace")


def auth(words: list[bytes]) -> bytes:
    """There are no passwords; the default user gets in with any, as on a Redis without one."""
    if len(words) > 3:
        raise CommandError("ERR syntax error")
    if len(words) == 2:
        raise CommandError(
            "ERR AUTH <password> called without any password configured for the default user. "
            "Are you sure your configuration is correct?"
        )
    _check_user(words[1])
    return replies.OK


def command(words: list[bytes], protocol: int) -> bytes:
    """COMMAND and its subcommands: names and how many words they take; no documentation."""
    match [word.upper() for word in words[1:2]]:
        case [b"COUNT"] if len(words) == 2:
            return replies.number(len(COMMANDS))
        case [b"DOCS"]:
            return replies.mapping({}, protocol)
        case [b"LIST"]:
            return replies.bulks(sorted(name.lower() for name in COMMANDS))
        case [] | [b"INFO"]:
            names = [word.upper() for word in words[2:]] or sorted(COMMANDS)
            return replies.array(_command_info(name) if name in COMMANDS else replies.NULL[protocol] for name in names)
        case _:
            raise CommandError("ERR unknown subcommand. COMMAND has COUNT, DOCS, INFO and LIST here")


def _command_info(name: bytes) -> bytes:
    found = COMMANDS[name]
    arity = found.least if found.least == found.most else -found.least
    empty = replies.array([])
    flags = replies.array([replies.status(found.flag.decode())] if found.flag else [])
    places = map(replies.number, found.keys)
    return replies.array([replies.bulk(name.lower()), replies.number(arity), flags, *places, *([empty] * 4)])


def config(words: list[bytes], protocol: int, of_node: dict[bytes, bytes]) -> bytes:
    """CONFIG GET of the settings that tools ask for, those `of_node` among them; nothing can be set."""
    if words[1].upper() != b"GET" or len(words) < 3:
        raise CommandError("ERR CONFIG can only GET here; the node's TOML file holds its settings")
    wanted = [matcher(check_pattern(word.lower())) for word in words[2:]]
    found = {key: value for key, value in (_SETTINGS | of_node).items() if any(matches(key) for matches in wanted)}
    return replies.mapping({key: replies.bulk(value) for key, value in found.items()}, protocol)


def info(words: list[bytes], facts: Facts) -> bytes:
    """INFO: all sections, or those named."""
    lines: list[str] = []
    for section, values in facts.items():
        if wants_section(words, section):
            lines += [f"# {section}", *(f"{name}:{value}" for name, value in values.items()), ""]
    return replies.bulk("\r\n".join(lines).encode())


def wants_section(words: list[bytes], section: str) -> bool:
    """Whether an INFO of these words shows a section."""
    wanted = {word.decode("utf-8", "replace").lower() for word in words[1:]}
    return not wanted - {"default", "all", "everything"} or section.lower() in wanted


def wait(words: list[bytes]) -> bytes:
    """WAIT: what came before is acknowledged by now, so on a quorum of disks."""
    integer(words[1])
    if _integer(words[2], "timeout") < 0:
        raise CommandError("ERR timeout is negative")
    return replies.number(ACKNOWLEDGED_REPLICAS)


def _integer(word: bytes, what: str) -> int:
    try:
        return integer(word)
    except CommandError:
        raise CommandError(f"ERR {what} is not an integer or out of range") from None


def _batch(ops: tuple[Op, ...]) -> Op:
    return (int(Code.BATCH), ops[0][1], ops, int(Flag.INDEPENDENT), None)


def _check_batch(ops: tuple[Op, ...], owner_of: Callable[[bytes], str]) -> None:
    check_one_owner([op[1] for op in ops], owner_of)
    size = sum(len(part) for op in ops for part in op[1:3] if isinstance(part, bytes))
    if size > BATCH_BYTES_MAX:
        raise CommandError(f"ERR transaction is too large: {size} bytes of keys and values, at most {BATCH_BYTES_MAX}")


def _ops(queued: Single | Several | Reply) -> tuple[Op, ...]:
    match queued:
        case Single(op, _):
            return (op,)
        case Several(ops):
            return tuple(ops)
        case _:
            return ()


def _combiner(queued: list[Single | Several | Reply], checks: int, protocol: int) -> Callable[[list[Any]], bytes]:
    formats = FORMATS[protocol]

    def combine(results: list[Any]) -> bytes:
        (outcome,) = results
        if isinstance(outcome, ConditionFailed):  # of those that were watched: others fail by themselves
            return replies.NULL_ARRAY[protocol]
        if isinstance(outcome, StoreError):
            return first_failure(results)
        return replies.array(_shares(queued, outcome[checks:], formats))

    return combine


def _shares(
    queued: list[Single | Several | Reply], results: list[Any], formats: tuple[replies.Format, ...]
) -> list[bytes]:
    """Each queued command's reply from its share of the results."""
    shares = []
    at = 0
    for each in queued:
        match each:
            case Reply(data):
                shares.append(data)
            case Single(_, format_):
                shares.append(formats[format_](results[at]))
                at += 1
            case Several(ops, combine, _):
                shares.append(combine(list(results[at : at + len(ops)])))
                at += len(ops)
    return shares


def _check_user(user: bytes) -> None:
    if user != DEFAULT_USER.encode():
        raise CommandError(WRONGPASS)


def _checked_name(name: bytes) -> bytes:
    if any(not 0x21 <= byte <= 0x7E for byte in name) or len(name) > 256:
        raise CommandError("ERR Client names cannot contain spaces, newlines or special characters.")
    return name

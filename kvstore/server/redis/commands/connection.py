"""Connection commands: authentication, protocol version, client name, closing."""

from __future__ import annotations

from kvstore.env.networks import network_of
from kvstore.errors import AccessUnfounded, NotAuthenticated
from kvstore.server.redis import replies
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.commands.row import OPTIONS_MAX, Alone, Command, Family, InMulti, replying
from kvstore.server.redis.gate import NOAUTH_HELLO, Need
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import CommandError, Context, Plan, Reply, integer
from kvstore.server.redis.session import REDIS_VERSION, RespSession

DEFAULT_USER = "default"
"""The user of AUTH with a password alone, and of every client if access control is off."""
WRONGPASS = "WRONGPASS invalid username-password pair or user is disabled."
FROM_BROWSERS = ("POST", "HOST:")
"""First words of HTTP request lines. A web page can make its reader's browser send anything to a port of the same
machine, commands included. So nothing after these words is read."""


def _ping(words: Words, context: Context) -> Plan:
    if context.is_subscriber:
        return Reply(replies.bulks([b"pong", words[1] if len(words) == 2 else b""]))
    return Reply(replies.bulk(words[1]) if len(words) == 2 else b"+PONG\r\n")


def _echo(words: Words, context: Context) -> Plan:
    return Reply(replies.bulk(words[1]))


def _select(words: Words, context: Context) -> Plan:
    if integer(words[1]) != 0:
        raise CommandError("ERR DB index is out of range")
    return Reply(replies.OK)


# ── HELLO, AUTH, ACL ──────────────────────────────────────────────────────────────────────────────────────────────────


def _hello(performer: Performer, words: Words) -> None:
    access, session = performer.server.access, performer.session
    credentials = _credentials_of_hello(words) if access.is_on else None
    if credentials is not None:
        return performer.run_alone(_log_in(performer, credentials, words))
    if access.is_on and session.identity is None:
        raise CommandError(f"NOAUTH {access.nobody.why_unknown}" if access.is_unfounded else NOAUTH_HELLO)
    reply = _greet(session, words, performer.server.mode, is_checked=access.is_on)
    performer.replies.use_protocol(session.protocol)
    return performer.replies.reply(reply)


def _greet(session: RespSession, words: Words, mode: str, *, is_checked: bool) -> bytes:
    """Set the protocol version that HELLO names, and return the reply, which is in the new version. `mode` is the
    server's mode.

    `is_checked`: True if the user and password that HELLO may carry have been verified. Raises CommandError.
    """
    protocol, at = session.protocol, 1
    if len(words) > 1:
        try:
            integer(words[1])
        except CommandError:
            raise CommandError("ERR Protocol version is not an integer or out of range") from None
        if words[1] not in (b"2", b"3"):
            raise CommandError("NOPROTO unsupported protocol version")
        protocol, at = int(words[1]), 2
    name = session.name
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
    session.name = name
    session.use_protocol(protocol)
    facts = {
        b"server": replies.bulk(b"redis"),
        b"version": replies.bulk(REDIS_VERSION.encode()),
        b"proto": replies.number(protocol),
        b"id": replies.number(session.id),
        b"mode": replies.bulk(mode.encode()),
        b"role": replies.bulk(b"master"),
        b"modules": replies.array([]),
    }
    return replies.mapping(facts, protocol)


async def _log_in(performer: Performer, credentials: tuple[str, bytes], hello: Words | None = None) -> bytes:
    """Authenticate the connection and return the reply to AUTH or HELLO. Raises CommandError, Overloaded."""
    server, address = performer.server, network_of(performer.client.host)
    try:
        identity = await server.logins.login(*credentials, address)
    except NotAuthenticated as error:
        word = "NOAUTH" if isinstance(error, AccessUnfounded) else "WRONGPASS"
        raise CommandError(f"{word} {error}") from None
    reply = replies.OK if hello is None else _greet(performer.session, hello, server.mode, is_checked=True)
    performer.guard(identity)
    performer.client.authenticated()
    if hello is not None:
        performer.replies.use_protocol(performer.session.protocol)
    return reply


def _auth(performer: Performer, words: Words) -> None:
    if len(words) > 3:
        raise CommandError("ERR syntax error")
    if performer.server.access.is_on:
        user, password = (_text(words[1]), words[2]) if len(words) == 3 else (DEFAULT_USER, words[1])
        return performer.run_alone(_log_in(performer, (user, password)))
    if len(words) == 2:
        raise CommandError(
            "ERR AUTH <password> called without any password configured for the default user. "
            "Are you sure your configuration is correct?"
        )
    _check_user(words[1])
    return performer.replies.reply(replies.OK)


def _acl(performer: Performer, words: Words) -> bytes:
    if words[1].upper() != b"WHOAMI" or len(words) != 2:
        raise CommandError(
            "ERR unknown subcommand or wrong number of arguments. ACL supports WHOAMI here; `kvstore user` manages "
            "users"
        )
    identity = performer.session.identity if performer.server.access.is_on else None
    return replies.bulk((DEFAULT_USER if identity is None else identity.name).encode())


def _credentials_of_hello(words: Words) -> tuple[str, bytes] | None:
    """Return the user and password that HELLO carries, or None."""
    at = 2
    while at < len(words):
        if words[at].upper() == b"AUTH" and at + 2 < len(words):
            return _text(words[at + 1]), words[at + 2]
        at += 2
    return None


def _check_user(user: bytes) -> None:
    """Raise CommandError unless `user` is the only user of a cluster without access control. As in Redis without
    passwords, any password is right."""
    if user != DEFAULT_USER.encode():
        raise CommandError(WRONGPASS)


def _text(word: bytes) -> str:
    return word.decode("utf-8", "replace")


# ── CLIENT ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _client_need(words: Words) -> Need:
    return Need.ADMIN if words[1].upper() == b"LIST" else Need.LOGIN


def _client(performer: Performer, words: Words) -> None:
    if words[1].upper() == b"LIST" and len(words) == 2:
        performer.run_alone(performer.server.clients.take())
    else:
        performer.replies.reply(_of_client(performer.session, words, performer.client.address))


def _of_client(session: RespSession, words: Words, address: str) -> bytes:
    """Execute a CLIENT subcommand that concerns only the client's own connection."""
    match words[1].upper(), len(words):
        case b"SETNAME", 3:
            session.name = _checked_name(words[2])
        case b"GETNAME", 2:
            return replies.bulk(session.name) if session.name else replies.NULL[session.protocol]
        case b"ID", 2:
            return replies.number(session.id)
        case b"SETINFO", 4 if words[2].upper() in session.library:
            session.library[words[2].upper()] = _checked_name(words[3])
        case (b"INFO", 2):
            return replies.bulk(session.describe(address))
        case (b"NO-EVICT" | b"NO-TOUCH", 3) if words[2].upper() in (b"ON", b"OFF"):
            pass
        case (b"REPLY", 3) if words[2].upper() == b"ON":
            pass
        case _:
            shown = words[1][:32].decode("utf-8", "replace")
            raise CommandError(
                f"ERR unknown subcommand or wrong number of arguments for '{shown}'. CLIENT supports GETNAME, ID, "
                "INFO, LIST, NO-EVICT, NO-TOUCH, REPLY ON, SETINFO and SETNAME here"
            )
    return replies.OK


def _checked_name(name: bytes) -> bytes:
    if any(not 0x21 <= byte <= 0x7E for byte in name) or len(name) > 256:
        raise CommandError("ERR Client names cannot contain spaces, newlines or special characters.")
    return name


# ── RESET, QUIT, browsers, peers ──────────────────────────────────────────────────────────────────────────────────────


def _reset(performer: Performer, words: Words) -> None:
    performer.unsubscribe()
    performer.session.reset()
    performer.guard(performer.client.identity_of_certificate())
    performer.replies.use_protocol(performer.session.protocol)
    performer.replies.reply(replies.status("RESET"))


def _hang_up(performer: Performer, words: Words) -> None:
    performer.server.note_browser(performer.client.address)
    performer.quit(b"")


_RESET = Alone(_reset, in_multi=InMulti.AT_ONCE)
_QUIT = Alone(lambda performer, words: performer.quit(), in_multi=InMulti.AT_ONCE)
_PEER = Alone(lambda performer, words: performer.client.become_peer(words))

FAMILY = Family(
    "Connection",
    "connection",
    (
        Command("PING", "Return PONG, or the argument.", _ping, 1, 2, Need.LOGIN),
        Command("ECHO", "Return the argument.", _echo, 2, 2, Need.LOGIN),
        Command("SELECT", "Select a database.", _select, 2, 2, Need.LOGIN, differs="The only database is 0."),
        Command("HELLO", "Set the protocol version and authenticate.", Alone(_hello), 1, OPTIONS_MAX, Need.NOTHING),
        Command("AUTH", "Authenticate the connection.", Alone(_auth), 2, 0, Need.NOTHING),
        Command(
            "ACL",
            "Return the user of the connection (WHOAMI).",
            replying(_acl),
            2,
            OPTIONS_MAX,
            Need.LOGIN,
            differs="`kvstore user` and `kvstore role` manage users and roles.",
        ),
        Command(
            "CLIENT",
            "Inspect and name the connection, or list all connections.",
            Alone(_client),
            2,
            OPTIONS_MAX,
            _client_need,
            differs="Supports GETNAME, ID, INFO, LIST, NO-EVICT, NO-TOUCH, REPLY ON, SETINFO, SETNAME. LIST shows the "
            "connections of the contacted node and requires the right `admin`.",
        ),
        Command("RESET", "Reset the connection and log out.", _RESET, 1, 1, Need.NOTHING),
        Command("QUIT", "Close the connection.", _QUIT, 1, 0, Need.NOTHING),
        Command(
            "KVSTORE.PEER",
            "Open the link of another server.",
            _PEER,
            4,
            6,
            Need.NOTHING,
            differs="Reserved for servers of the cluster.",
        ),
    ),
)
HANG_UPS = tuple(
    Command(name, "Close the connection of a browser.", Alone(_hang_up), 1, 0, Need.NOTHING) for name in FROM_BROWSERS
)
"""Rows of commands that no list of commands shows."""

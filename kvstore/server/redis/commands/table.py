"""The table of all Redis commands: finds the row of a command, and shows the rows to clients (COMMAND). Decides only.

To add a command, write its handler and its row into the file of its family.
"""

from __future__ import annotations

from kvstore.server.redis import replies
from kvstore.server.redis.commands import (
    channels,
    cluster,
    connection,
    keys,
    scans,
    scripts,
    server,
    strings,
    transactions,
)
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.commands.row import OPTIONS_MAX, Command, Family, in_turn
from kvstore.server.redis.commands.unsupported import UNSUPPORTED
from kvstore.server.redis.gate import Need
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import CommandError


def known(words: Words) -> Command:
    """Return the row of the command that `words` names. Raises CommandError if the command is unknown or has the
    wrong number of words."""
    name = words[0].upper()
    command = _KNOWN.get(name)
    if command is None:
        raise CommandError(_unknown(words))
    if len(words) < command.least or (command.most and len(words) > command.most):
        raise CommandError(f"ERR wrong number of arguments for '{name.decode().lower()}' command")
    return command


def _unknown(words: Words) -> str:
    row = UNSUPPORTED.get(words[0].upper())
    arguments = "".join(f"'{word[:32].decode('utf-8', 'replace')}' " for word in words[1:9])
    shown = words[0][:64].decode("utf-8", "replace")
    reason = f"({row.reason}: see docs/reference/redis.md)" if row is not None else ""
    return f"ERR unknown command '{shown}', with args beginning with: {arguments}{reason}"


# ── COMMAND ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _command(performer: Performer, words: Words) -> bytes:
    protocol, names = performer.session.protocol, [word.upper() for word in words[2:]] or sorted(COMMANDS)
    match [word.upper() for word in words[1:2]]:
        case [b"COUNT"] if len(words) == 2:
            return replies.number(len(COMMANDS))
        case [b"DOCS"]:
            return replies.mapping(
                {name.lower(): _docs(name, protocol) for name in names if name in COMMANDS}, protocol
            )
        case [b"LIST"]:
            return replies.bulks(sorted(name.lower() for name in COMMANDS))
        case [] | [b"INFO"]:
            return replies.array(_info(name) if name in COMMANDS else replies.NULL[protocol] for name in names)
        case _:
            raise CommandError("ERR unknown subcommand. COMMAND supports COUNT, DOCS, INFO and LIST here")


def _info(name: bytes) -> bytes:
    found = COMMANDS[name]
    arity = found.least if found.least == found.most else -found.least
    empty = replies.array([])
    flags = replies.array([replies.status(found.flag)] if found.flag else [])
    places = map(replies.number, found.keys)
    return replies.array([replies.bulk(name.lower()), replies.number(arity), flags, *places, *([empty] * 4)])


def _docs(name: bytes, protocol: int) -> bytes:
    facts = {b"summary": COMMANDS[name].summary, b"group": _GROUPS[name]}
    return replies.mapping({fact: replies.bulk(text.encode()) for fact, text in facts.items()}, protocol)


_COMMAND = Command(
    "COMMAND",
    "Describe the supported commands (COUNT, DOCS, INFO, LIST).",
    in_turn(_command),
    1,
    8 * OPTIONS_MAX,
    Need.LOGIN,
    differs="LIST takes no filters. DOCS does not describe arguments.",
)

FAMILIES: tuple[Family, ...] = (
    strings.FAMILY,
    keys.FAMILY,
    scans.FAMILY,
    transactions.FAMILY,
    scripts.FAMILY,
    channels.FAMILY,
    connection.FAMILY,
    server.FAMILY._replace(rows=(*server.FAMILY.rows, _COMMAND)),
    cluster.FAMILY,
)
COMMANDS = {row.name.encode(): row for family in FAMILIES for row in family.rows}
"""The rows of the supported commands, by name."""
_KNOWN = COMMANDS | {row.name.encode(): row for row in connection.HANG_UPS}
_GROUPS = {row.name.encode(): family.group for family in FAMILIES for row in family.rows}

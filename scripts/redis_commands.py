"""The reference of the Redis commands, docs/reference/redis.md, from their rows."""

from __future__ import annotations

from kvstore.server.redis.commands.row import Command
from kvstore.server.redis.commands.table import FAMILIES
from kvstore.server.redis.commands.unsupported import UNSUPPORTED
from kvstore.server.redis.gate import ChannelNeed, Need
from scripts.pages import table

HEAD = """# Redis commands

All commands of Redis, for people who use a Redis client with this store. `make reference` writes this page from
kvstore/server/redis/commands/: do not edit it here. [Use a Redis client](../how-to/use-a-redis-client.md) describes
errors, retries and limits.

*Words* counts the command's name too. *Needs* is what a user needs where the cluster authenticates its clients: a
login, the right to read or write the keys that the command names, or a right on more keys. A command that writes also
needs the right to read if it returns the old value or the number that it incremented. *In MULTI* says what a
transaction does with the command: it queues the command, carries it out at once, ignores it, or refuses it.
"""
NEEDS = {
    Need.NOTHING: "nothing",
    Need.LOGIN: "login",
    Need.READ_SOME: "read on some keys",
    Need.READ_ALL: "read on all keys",
    Need.WRITE_ALL: "write on all keys",
    Need.ADMIN: "admin",
}


def reference() -> str:
    """Return the page."""
    heads = ("command", "does", "words", "needs", "in MULTI", "differs from Redis")
    parts = [HEAD]
    parts += [f"## {family.title}\n\n{table(heads, map(_row, family.rows))}" for family in FAMILIES]
    reasons: dict[str, list[str]] = {}
    for each in UNSUPPORTED.values():
        reasons.setdefault(each.reason, []).append(each.name)
    rows = [(reason, ", ".join(sorted(names))) for reason, names in reasons.items()]
    parts.append(f"## Commands that are not supported\n\n{table(('reason', 'commands'), rows)}")
    return "\n".join(parts)


def _row(row: Command) -> tuple[str, ...]:
    upper = "" if row.most == row.least else f" to {row.most}" if row.most else " or more"
    in_multi = row.in_multi.name.lower().replace("_", " ")
    return row.name, row.summary, f"{row.least}{upper}", _needs(row), in_multi, row.differs


def _needs(row: Command) -> str:
    if row.need is Need.OPERATIONS:
        return "read" if row.flag == "readonly" else "write"
    if isinstance(row.need, Need):
        return NEEDS[row.need]
    need = row.need_of([b"", b"LIST", b""])
    return f"{need.right} on the channels" if isinstance(need, ChannelNeed) else "depends on the subcommand"

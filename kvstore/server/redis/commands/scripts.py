"""Script commands: only the scripts of some libraries (known_scripts.py)."""

from __future__ import annotations

from kvstore.limits import VALUE_BYTES_MAX
from kvstore.server.redis import replies
from kvstore.server.redis.commands.asking import atomic
from kvstore.server.redis.commands.known_scripts import Call
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.commands.row import NO_KEYS, OPTIONS_MAX, Alone, Command, Family, replying, writes
from kvstore.server.redis.gate import Need
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import CommandError, check_key, integer


def _eval(performer: Performer, words: Words) -> None:
    scripts = performer.server.scripts
    action = scripts.find(words[1]) if words[0].upper() == b"EVALSHA" else scripts.load(words[1])[1]
    if integer(words[2]) != 1 or len(words) < 4:
        raise CommandError("ERR expected one key: every supported script takes one")
    performer.run_alone(action(Call(atomic(performer), check_key(words[3]), words[4:], performer.server.now_ms)))


def _script(performer: Performer, words: Words) -> bytes:
    scripts = performer.server.scripts
    match words[1].upper(), words[2:]:
        case b"LOAD", [text]:
            return replies.bulk(scripts.load(text)[0])
        case b"EXISTS", [_, *_] as digests:
            return replies.array(replies.number(int(scripts.find_or_none(each) is not None)) for each in digests)
        case b"FLUSH", [] | [b"SYNC" | b"ASYNC"]:
            scripts.clear()
            return replies.OK
        case _:
            raise CommandError(
                "ERR unknown subcommand or wrong number of arguments. SCRIPT supports EXISTS, FLUSH and LOAD here"
            )


_EVAL = Alone(_eval, lambda performer, words: VALUE_BYTES_MAX)
_NO_LUA = (
    "No Lua. The server knows the scripts of redis-py's `Lock`, aiocache, limits (fixed window), pottery's `Redlock`, "
    'redlock for Node.js and redsync, and `if redis.call("get",KEYS[1]) == ARGV[1] then return '
    'redis.call("del",KEYS[1]) else return 0 end`, also with `pexpire`.'
)

FAMILY = Family(
    "Scripts",
    "scripting",
    (
        writes("EVAL", "Run a known script.", _EVAL, 3, OPTIONS_MAX, NO_KEYS, _NO_LUA),
        writes("EVALSHA", "Run a known script by its SHA-1.", _EVAL, 3, OPTIONS_MAX, NO_KEYS, _NO_LUA),
        Command(
            "SCRIPT",
            "Load known scripts, or check whether they are loaded.",
            replying(_script),
            2,
            OPTIONS_MAX,
            Need.LOGIN,
            differs="Supports EXISTS, FLUSH, LOAD.",
        ),
    ),
)

"""The words of SCAN: its cursor and its options. Decides only."""

from __future__ import annotations

from itertools import zip_longest

from kvstore.server.redis.plans import CommandError, check_pattern, integer

SCAN_COUNT_MAX = 10_000
_CURSOR_MAX = (1 << 64) - 1


def cursor_of(words: list[bytes]) -> int:
    """The cursor. Raises CommandError."""
    if not words[1].isdigit() or len(words[1]) > 20 or int(words[1]) > _CURSOR_MAX:
        raise CommandError("ERR invalid cursor")
    return int(words[1])


def options_of(words: list[bytes]) -> tuple[int, bytes, bool]:
    """How many keys, of which pattern, and whether strings, which is all there is, are wanted. Raises CommandError."""
    count, pattern, wants_strings = 10, b"*", True
    for option, value in zip_longest(words[::2], words[1::2]):
        match option.upper() if value is not None else b"":
            case b"COUNT":
                count = min(integer(value), SCAN_COUNT_MAX)
                if count < 1:
                    raise CommandError("ERR syntax error")
            case b"MATCH":
                pattern = check_pattern(value)
            case b"TYPE":
                wants_strings = value.lower() == b"string"
            case _:
                raise CommandError("ERR syntax error")
    return count, pattern, wants_strings

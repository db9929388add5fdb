"""Numbers in the form in which people read them. Decides only."""

from __future__ import annotations

from datetime import UTC, datetime

from kvstore.server.status.sizes import span

KEY_LENGTH_MAX, TEXT_LENGTH_MAX = 60, 200


def rate(per_s: float) -> str:
    if 0 < per_s < 0.05:
        return "<0.1/s"
    return f"{per_s:,.0f}/s" if per_s >= 10 or not per_s else f"{per_s:.1f}/s"


def took(seconds: float) -> str:
    """Return a latency with its unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.01 else f"{seconds * 1e3:,.0f} ms"


def share(part: float) -> str:
    """Return a share from 0 to 1 in percent. A share that is neither nothing nor everything is not rounded to it."""
    if 0 < part < 0.01:
        return "<1%"
    return ">99%" if 0.99 < part < 1 else f"{part:.0%}"


def when(at_ms: int, now_ms: int) -> str:
    """Return when something expires, relative to now; `never` if `at_ms` is 0."""
    if not at_ms:
        return "never"
    return f"in {span((at_ms - now_ms) / 1000)}" if at_ms > now_ms else f"{span((now_ms - at_ms) / 1000)} ago"


def date(ms: int) -> str:
    """Return a time in milliseconds since 1970, to the second."""
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def parts(text: str) -> list[tuple[str, bool]]:
    """Split a text at backticks. Return (piece, is_code) for each piece. A single backtick stays as it is."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        pieces[-2:] = ["`".join(pieces[-2:])]
    return [(piece, bool(place % 2)) for place, piece in enumerate(pieces) if piece]


def key(raw: bytes) -> str:
    """Return a key on one line, shortened to KEY_LENGTH_MAX characters."""
    return text_of(raw, KEY_LENGTH_MAX)


def text_of(raw: bytes, most: int = TEXT_LENGTH_MAX) -> str:
    """Return bytes on one line, with unprintable characters escaped, shortened to `most` characters."""
    text = raw.decode("utf-8", "backslashreplace")
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def silence(why: str) -> str:
    """Return the state of a node that did not answer, with the reason."""
    return why if why.startswith("no answer") else f"no answer: {why}"

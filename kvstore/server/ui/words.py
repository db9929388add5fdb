"""Numbers as people read them. Decides only."""

from __future__ import annotations

KEY_LENGTH_MAX = 60


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rate(per_s: float) -> str:
    return f"{per_s:,.0f}/s" if per_s >= 10 or not per_s else f"{per_s:.1f}/s"


def size(number: float) -> str:
    """Bytes, in the unit that needs the fewest digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if unit == "B" or number >= 10 else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def span(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def took(seconds: float) -> str:
    """A latency."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.01 else f"{seconds * 1e3:,.0f} ms"


def parts(text: str) -> list[tuple[str, bool]]:
    """The pieces of a text, and which of them are code: what stands between backticks. One alone stays as it is."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        pieces[-2:] = ["`".join(pieces[-2:])]
    return [(piece, bool(place % 2)) for place, piece in enumerate(pieces) if piece]


def key(raw: bytes) -> str:
    """A key on one line, without anything that is not printable."""
    text = raw.decode("utf-8", "backslashreplace")
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    return shown if len(shown) <= KEY_LENGTH_MAX else shown[: KEY_LENGTH_MAX - 1] + "…"

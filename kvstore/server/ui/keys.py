"""The key browser: a page of keys, the value of one key as text, JSON or hexadecimal, and the keys of sessions and
locks. Decides only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import parse_qs

import orjson

from kvstore.coordination_keys import LEADER, LOCK, MEMBER, SESSION, is_coordination_key
from kvstore.partition.state.commands import Record
from kvstore.proto.kv_pb2 import PageResponse
from kvstore.rpc.http.messages import path_and_query
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.status.sizes import count, size
from kvstore.server.ui.cells import Cell, Fact, page_path, table
from kvstore.server.ui.words import date, text_of, when

PAGE_KEYS = 50
"""Number of keys on a page."""
COORDINATION_KEYS = 500
"""Number of keys that a page of sessions and locks reads; those of other kinds are left out."""
PREVIEW_BYTES = 80
VALUE_BYTES_MAX = 64 << 10
"""Number of bytes of a value that are shown."""
HEX_WIDTH = 16
FORMS = ("text", "json", "hex")
KEY_COLUMNS = ("key", "value", "size", "expires")
COORDINATION_COLUMNS = ("key", "kind", "tag", "name", "holder", "token", "expires")


def bytes_parameter(target: str, name: str) -> bytes:
    """Return a query parameter as the bytes that were percent-encoded, because a key may contain any byte."""
    found = parse_qs(path_and_query(target)[1], errors="surrogateescape", keep_blank_values=True)
    return found.get(name, [""])[0].encode("utf-8", "surrogateescape")


def keys_page(prefix: bytes, found: PageResponse, now_ms: int) -> dict[str, Any]:
    """Return the context of a page of keys."""
    rows = [
        [
            Cell(text_of(key), "wrap", link=page_path("key", key=key)),
            Cell(text_of(record.value[:PREVIEW_BYTES]) + ("…" if len(record.value) > PREVIEW_BYTES else ""), "wrap"),
            Cell(size(len(record.value)), "n"),
            Cell(when(record.expires_ms, now_ms)),
        ]
        for key, record in zip(found.keys, found.records, strict=True)
    ]
    page = _asked(prefix)
    page["tables"] = [table("keys", "Keys", KEY_COLUMNS, rows, "" if rows else "No key here begins with this prefix.")]
    if found.page_token:
        page |= {"more": page_path("keys", prefix=prefix, after=found.page_token), "more_label": "Next keys"}
    return page


def refused_page(prefix: bytes, why: str, readable: Sequence[bytes]) -> dict[str, Any]:
    """Return the context of the page of a user who may not read these keys. `readable` has the prefixes that the user
    may read."""
    page = _asked(prefix)
    page["refusal"] = why
    page["readable"] = [{"text": text_of(each), "link": page_path("keys", prefix=each)} for each in readable]
    return page


def _asked(prefix: bytes) -> dict[str, Any]:
    title = f"Keys that begin with {text_of(prefix)}" if prefix else "Keys"
    return {"page": "keys", "title": title, "prefix": prefix.decode("utf-8", "replace"), "refusal": "", "tables": []}


def key_page(key: bytes, record: Record | None, form: str, now_ms: int) -> dict[str, Any]:
    """Return the context of the page of one key. Without a known `form`, the form that fits the value is used."""
    page: dict[str, Any] = {"page": "keys", "title": f"Key {text_of(key)}", "facts": [], "value": "", "forms": []}
    if record is None:
        return {**page, "note": "The key does not exist."}
    value = record.value
    form = form if form in FORMS else form_of(value)
    page["facts"] = [
        Fact("size", f"{size(len(value))}" if len(value) < 1024 else f"{size(len(value))} ({len(value):,} bytes)"),
        Fact("version", f"{record.version:,}"),
        Fact("created at version", f"{record.created:,}"),
        Fact("written", date(record.written_ms)),
        Fact("expires", when(record.expires_ms, now_ms)),
    ]
    page["forms"] = [{"name": each, "link": page_path("key", key=key, form=each)} for each in FORMS]
    note = f"The first {size(VALUE_BYTES_MAX)} are shown." if len(value) > VALUE_BYTES_MAX else ""
    try:
        shown = shown_value(value, form)
    except ValueError as error:
        shown, note = "", str(error)
    return {**page, "form": form, "value": shown, "note": note}


def place_of(key: bytes, topology: ClusterTopology, *, is_linked: bool) -> list[Fact]:
    """Return the partition that owns a key, and its leader, as facts. With `is_linked` they link to their pages."""
    partition = topology.ring.partition_of(key)
    leader, _ = topology.leaders.get(partition, ("", 0))
    return [
        Fact("partition", partition, link=page_path("partition", id=partition) if is_linked else ""),
        Fact("leader", leader or "none", link=page_path("node", id=leader) if is_linked and leader else ""),
    ]


def unread_page(name: str, why: str, place: Sequence[Fact]) -> dict[str, Any]:
    """Return the context of a page of keys that could not be read. `place` has the facts about one key."""
    hint = "The partition may have no leader, or a transaction may hold the key."
    return {
        "page": "sessions" if name == "sessions" else "keys",
        "title": "Not read",
        "refusal": why,
        **({"facts": place, "forms": [], "value": "", "note": hint} if place else {}),
    }


def form_of(value: bytes) -> str:
    """Return the form in which a value is most readable."""
    if len(value) <= VALUE_BYTES_MAX and value[:1] in (b"{", b"["):
        try:
            orjson.loads(value)
        except ValueError:
            pass
        else:
            return "json"
    try:
        text = value[:VALUE_BYTES_MAX].decode("utf-8", "strict" if len(value) <= VALUE_BYTES_MAX else "ignore")
    except UnicodeDecodeError:
        return "hex"
    return "text" if all(each.isprintable() or each in "\n\r\t" for each in text) else "hex"


def shown_value(value: bytes, form: str) -> str:
    """Return the beginning of a value in a form of FORMS. Raises ValueError if the value does not have the form."""
    if form == "json":
        if len(value) > VALUE_BYTES_MAX:
            raise ValueError(f"expected at most {size(VALUE_BYTES_MAX)} to show as JSON, got {size(len(value))}")
        try:
            return orjson.dumps(orjson.loads(value), option=orjson.OPT_INDENT_2).decode()
        except ValueError as error:
            raise ValueError(f"expected JSON, got something else: {error}") from None
    shown = value[:VALUE_BYTES_MAX]
    if form == "hex":
        return "\n".join(_hex_line(shown, place) for place in range(0, len(shown), HEX_WIDTH))
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode()
        for each in shown.decode("utf-8", "backslashreplace")
    )


def _hex_line(value: bytes, place: int) -> str:
    line = value[place : place + HEX_WIDTH]
    text = "".join(chr(each) if 32 <= each < 127 else "." for each in line)
    return f"{place:06x}  {line.hex(' '):<{3 * HEX_WIDTH - 1}}  {text}"


def sessions_page(tag: bytes, found: PageResponse, now_ms: int) -> dict[str, Any]:
    """Return the context of a page of sessions, locks and the other keys of coordination."""
    pairs = [(key, record) for key, record in zip(found.keys, found.records, strict=True) if is_coordination_key(key)]
    rows = [
        [
            Cell(text_of(key), "wrap", link=page_path("key", key=key)),
            *map(Cell, parts_of(key)),
            Cell(f"{record.created:,}", "n"),
            Cell(when(record.expires_ms, now_ms)),
        ]
        for key, record in pairs
    ]
    if found.keys:
        note = f"{count(len(rows), 'key')} of sessions, locks, elections, groups, barriers and queues among "
        note += f"{count(len(found.keys), 'key')} that were read. The token of a lock is its fencing token."
    else:
        note = "No session is open here. The Python clients open sessions (docs/how-to/coordinate-processes.md)."
    page: dict[str, Any] = {
        "page": "sessions",
        "title": f"Sessions and locks of {text_of(tag)}" if tag else "Sessions and locks",
        "tag": tag.decode("utf-8", "replace"),
        "refusal": "",
        "tables": [table("coordination", "Keys of coordination", COORDINATION_COLUMNS, rows, note)],
    }
    if found.page_token:
        page |= {"more": page_path("sessions", tag=tag, after=found.page_token), "more_label": "Next keys"}
    return page


def parts_of(key: bytes) -> Iterable[str]:
    """Return (kind, tag, name, holder) of a key of coordination. The holder is the session that wrote it."""
    tag, _, rest = key[1:].partition(b"}/")
    kind, _, name = rest.partition(b"/")
    holder = b""
    if kind == SESSION:
        holder = name
    elif kind in (LOCK, LEADER):
        name, _, place = name.rpartition(b"/")
        holder = place.rpartition(b"-")[0]
    elif kind == MEMBER:
        name, _, holder = name.rpartition(b"/")
    return text_of(kind), text_of(tag), text_of(name), text_of(holder) or "none"

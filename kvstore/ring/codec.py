"""Encodes a ring as the bytes of its znode. Decides only.

The format is JSON, so that an operator can read it. Equal rings have equal encodings.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Annotated, Any

import msgspec
import orjson
from sortedcontainers import SortedDict

from kvstore.errors import InvalidRequest, UndecodableNode
from kvstore.ring.hashing import MURMUR3, KeyHash, hash_named
from kvstore.ring.moves import Journey, Move, MoveId, MoveState, Pace
from kvstore.ring.operations import MARK_BYTES, RingOperation
from kvstore.ring.ring import Member, PartitionState, Ring
from kvstore.types import PartitionId, ServerId

FORMAT = 2
"""The format that is written if the key hash is murmur3. Format 1 had only version, partitions and `"tokens": [[token,
index of owner], …]`. Format 1 can still be read; the first change of the ring writes format 2."""
HASHED_FORMAT = 3
"""The format of all other rings: format 2 with the key hash. Releases before 0.2.0 refuse it by its number."""

_STATES = {MoveState.PLANNED: "p", MoveState.COPYING: "c", MoveState.CANCELLING: "x", MoveState.FLIPPED: "f"}
_STATE_OF = {letter: state for state, letter in _STATES.items()}


Natural = Annotated[int, msgspec.Meta(ge=0)]


class _MemberShape(msgspec.Struct):
    """The types of a partition's fields."""

    id: str
    state: str
    replicas: list[str]
    replacing: list[tuple[str, str]] = []
    owned: tuple[Natural, Natural] = (0, 0)


class _FirstShape(msgspec.Struct):
    """The types of the fields in format 1. A document with any other type, such as a version that is a string or a
    negative owner, is rejected even if it could be converted."""

    version: Natural
    partitions: list[_MemberShape]
    tokens: list[tuple[int, Natural]]


class _Shape(msgspec.Struct):
    """The types of the fields in format 2."""

    version: Natural
    partitions: list[_MemberShape]
    tokens: list[int]
    owners: list[Natural]
    moves: list[tuple[Natural, Natural, Natural, Natural, str, Natural]]
    next_move: Natural
    pace: Pace
    journey: Journey
    draining: list[str]
    retired: list[str]
    routed: Natural
    operations: list[tuple[str, str, int, int, int, int, list[str]]] = []
    forgotten: str = ""


class _HashedShape(_Shape, kw_only=True):
    """The types of the fields in format 3."""

    hash: Annotated[str, msgspec.Meta(min_length=1)]


_SHAPES = {1: _FirstShape, FORMAT: _Shape, HASHED_FORMAT: _HashedShape}


def encode(ring: Ring) -> bytes:
    """Return the ring as a JSON document: `{"format", "version", "partitions": [{"id", "state", "replicas",
    "replacing"?, "owned"?: [sequence, version]}], "tokens": [the first token, then each token's distance from the
    previous one], "owners": [index of partition], "moves": [[id, index of token, index of source, index of target,
    state, attempt]], "next_move", "pace", "journey", "draining", "retired", "routed", "operations"?: [[id, hash of the
    request, version before, version, first move, next move, [partitions that joined]]], "forgotten"?: marks of earlier
    operations, 8 hexadecimal digits each, "hash"?: name of the key hash, if it is not murmur3}`. Fields marked with `?`
    are omitted when empty."""
    ids = sorted(ring.partitions)
    index = {partition: place for place, partition in enumerate(ids)}
    ends = list(ring.tokens)
    place = {end: number for number, end in enumerate(ends)} if ring.moves else {}
    return orjson.dumps(
        {
            "format": FORMAT if ring.hash is MURMUR3 else HASHED_FORMAT,
            "version": ring.version,
            "partitions": [_member(ring.partitions[partition]) for partition in ids],
            "tokens": [end - before for before, end in zip([0, *ends], ends, strict=False)],
            "owners": [index[owner] for owner in ring.tokens.values()],
            "moves": [
                [move.id, place[move.end], index[move.source], index[move.target], _STATES[move.state], move.attempt]
                for move in ring.moves.values()
            ],
            "next_move": ring.next_move,
            "pace": ring.pace,
            "journey": ring.journey,
            "draining": ring.draining,
            "retired": ring.retired,
            "routed": ring.routed,
            **({"operations": [list(each) for each in ring.operations]} if ring.operations else {}),
            **({"forgotten": "".join(ring.forgotten)} if ring.forgotten else {}),
            **({} if ring.hash is MURMUR3 else {"hash": ring.hash.name}),
        }
    )


def decode(data: bytes) -> Ring:
    """Decode a ring of format 1 to 3. Raises UndecodableNode if the format is unknown, with its number in the message,
    or if the data is not a ring."""
    try:
        document = orjson.loads(data)
        format = document["format"]
        if format not in _SHAPES:
            raise UndecodableNode(f"ring: expected format 1 to {HASHED_FORMAT}, got {format}")
        msgspec.convert(document, _SHAPES[format])
        if format == 1:
            return _first_format(document)
        return _ring(document, MURMUR3 if format == FORMAT else hash_named(document["hash"]))
    except InvalidRequest as error:
        raise UndecodableNode(f"ring: {error}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UndecodableNode(f"expected a ring document, got something else: {error!r}") from error


def _member(member: Member) -> dict[str, Any]:
    document: dict[str, Any] = {"id": member.id, "state": member.state.value, "replicas": member.replicas}
    if member.replacing:
        document["replacing"] = member.replacing
    if member.owned_at:
        document["owned"] = [member.owned_seq, member.owned_at]
    return document


def _members(document: dict[str, Any]) -> list[Member]:
    return [
        Member(
            PartitionId(p["id"]),
            tuple(ServerId(r) for r in p["replicas"]),
            PartitionState(p["state"]),
            tuple((ServerId(newcomer), ServerId(leaving)) for newcomer, leaving in p.get("replacing", ())),
            *p.get("owned", (0, 0)),
        )
        for p in document["partitions"]
    ]


def _ring(document: dict[str, Any], hash: KeyHash) -> Ring:
    members = _members(document)
    ids = [member.id for member in members]
    ends = list(accumulate(document["tokens"]))
    moves = [
        Move(MoveId(id), ids[source], ids[target], ends[place - 1], ends[place], _STATE_OF[state], attempt)
        for id, place, source, target, state, attempt in document["moves"]
    ]
    return Ring(
        document["version"],
        {member.id: member for member in members},
        SortedDict(zip(ends, (ids[owner] for owner in document["owners"]), strict=True)),
        hash,
        {move.id: move for move in moves},
        MoveId(document["next_move"]),
        Pace(**document["pace"]),
        Journey(**document["journey"]),
        tuple(ServerId(server) for server in document["draining"]),
        tuple(PartitionId(partition) for partition in document["retired"]),
        document["routed"],
        tuple(_operation(*each) for each in document.get("operations", ())),
        _marks(document.get("forgotten", "")),
    )


def _marks(text: str) -> tuple[str, ...]:
    size = 2 * MARK_BYTES
    if len(text) % size:
        raise ValueError(f"expected marks of {size} digits each, got {len(text)} digits")
    return tuple(text[at : at + size] for at in range(0, len(text), size))


def _operation(
    id: str, asked: str, before: int, version: int, first: int, following: int, joined: list[str]
) -> RingOperation:
    return RingOperation(id, asked, before, version, first, following, tuple(PartitionId(each) for each in joined))


def _first_format(document: dict[str, Any]) -> Ring:
    members = _members(document)
    tokens = SortedDict({token: members[owner].id for token, owner in document["tokens"]})
    return Ring(document["version"], {member.id: member for member in members}, tokens, MURMUR3)

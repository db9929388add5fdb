from dataclasses import dataclass

import pytest

from kvstore.errors import Corrupted
from kvstore.meta.codec import decode, encode
from kvstore.types import LedgerId, LedgerState


@dataclass(frozen=True, slots=True)
class Item:
    id: LedgerId
    state: LedgerState
    raw: bytes = b""


@dataclass(frozen=True, slots=True)
class Document:
    epoch: int
    items: tuple[Item, ...] = ()


DOCUMENT = Document(7, (Item(LedgerId(2**60), LedgerState.CLOSED, b"\0\xff"),))
GOLDEN = b'{"format":1,"epoch":7,"items":[{"id":1152921504606846976,"state":3,"raw":"AP8="}]}'


def test_document_is_json_with_a_format_number() -> None:
    assert encode(DOCUMENT) == GOLDEN
    assert decode(Document, GOLDEN, what="/x") == DOCUMENT


def test_other_format_is_refused_by_number() -> None:
    with pytest.raises(Corrupted, match="/x has format 2; this build reads 1"):
        decode(Document, GOLDEN.replace(b'"format":1', b'"format":2'), what="/x")


def test_fields_of_later_builds_are_ignored() -> None:
    assert decode(Document, b'{"format":1,"epoch":7,"later":[]}', what="/x") == Document(7)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"epoch":7}',
        b'{"format":1}',
        b'{"format":1,"epoch":"7"}',
        b"\xff",
        b'{"format":1,"x":' + b"[" * 100_000,
    ],
)
def test_malformed_document_is_reported_with_its_place(data: bytes) -> None:
    with pytest.raises(Corrupted, match="/x is not a Document"):
        decode(Document, data, what="/x")


def test_only_dataclasses_are_encoded() -> None:
    with pytest.raises(TypeError):
        encode([1])

"""Checks the headers of a Parquet file's pages before any page is unpacked.

The footer of a file can lie: a writer that stores much data in few bytes (a dictionary, common prefixes, a page that
unpacks to 2 GiB) can also write a wrong footer. Arrow allocates what the header of each page states, so these headers
are checked, too. They are structs of Thrift's compact protocol, a few tens of bytes each.
"""

from __future__ import annotations

from typing import Any, BinaryIO

from kvstore.errors import Corrupted

HEADER_BYTES_MAX = 4096
"""Maximum bytes of a page's header; ours have fewer than 100."""
_DEPTH_MAX = 4
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_PLAIN, _PLAIN_DICTIONARY, _RLE_DICTIONARY = 0, 2, 8

Fields = dict[int, Any]


def check_pages(file: BinaryIO, group: Any, what: str, *, bytes_max: int, with_dictionary: str) -> None:
    """Check the page headers of one row group. Raises Corrupted if its pages unpack to more than `bytes_max` bytes,
    have another number of rows than the group, or are not plainly encoded. Only the column `with_dictionary` may
    have a dictionary."""
    unpacked = 0
    for number in range(group.num_columns):
        column = group.column(number)
        allowed = {_PLAIN}
        if column.path_in_schema == with_dictionary:
            allowed |= {_PLAIN_DICTIONARY, _RLE_DICTIONARY}
        at, rows = _start_of(column), 0
        end = at + column.total_compressed_size
        while at < end:
            header, size = _header_at(file, at, what)
            packed, page = header.get(3, -1), header.get(5, {})
            unpacked += max(0, header.get(2, 0))
            is_dictionary = header.get(1) == _DICTIONARY_PAGE and len(allowed) > 1
            if packed < 0 or unpacked > bytes_max:
                raise Corrupted(f"{what}: expected row groups of at most {bytes_max} bytes, got {unpacked} or more")
            if not is_dictionary and (header.get(1) != _DATA_PAGE or page.get(2) not in allowed):
                raise Corrupted(
                    f"{what}: expected plain pages in column {column.path_in_schema}, got a page of kind "
                    f"{header.get(1)} with encoding {page.get(2)}"
                )
            rows += 0 if is_dictionary else page.get(1, 0)
            at += size + packed
        if at != end or rows != group.num_rows:
            raise Corrupted(
                f"{what}: expected {group.num_rows} rows up to byte {end} in column {column.path_in_schema}, "
                f"got {rows} up to byte {at}"
            )


def _start_of(column: Any) -> int:
    """Return the offset at which Arrow starts to read a column chunk."""
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < column.data_page_offset:
        return int(column.dictionary_page_offset)
    return int(column.data_page_offset)


def _header_at(file: BinaryIO, at: int, what: str) -> tuple[Fields, int]:
    try:
        file.seek(max(0, at))
        return _struct(file.read(HEADER_BYTES_MAX), 0, 0)
    except (IndexError, ValueError) as error:
        raise Corrupted(f"{what} is damaged: no header of a page at byte {at}: {error}") from None


def _struct(data: bytes, at: int, depth: int) -> tuple[Fields, int]:
    """Parse a Thrift struct at the offset `at`. Returns its fields by number and the offset of its end. Raises
    ValueError, IndexError."""
    if depth > _DEPTH_MAX:
        raise ValueError(f"expected structs at most {_DEPTH_MAX} deep")
    fields: Fields = {}
    number = 0
    while byte := data[at]:
        at += 1
        if byte >> 4:
            number += byte >> 4
        else:
            number, at = _signed(data, at)
        fields[number], at = _value(byte & 15, data, at, depth)
    return fields, at + 1


def _value(kind: int, data: bytes, at: int, depth: int) -> tuple[Any, int]:
    match kind:
        case 1 | 2:  # true, false
            return kind == 1, at
        case 3:  # a byte
            return data[at], at + 1
        case 4 | 5 | 6:  # integers
            return _signed(data, at)
        case 8:  # bytes of statistics, skipped
            size, at = _unsigned(data, at)
            return None, at + size
        case 12:  # a struct
            return _struct(data, at, depth + 1)
    raise ValueError(f"expected a field of a page's header, got one of kind {kind}")


def _signed(data: bytes, at: int) -> tuple[int, int]:
    found, at = _unsigned(data, at)
    return (found >> 1) ^ -(found & 1), at


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte = data[at]
        at += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found, at
        shift += 7
        if shift > 63:
            raise ValueError("expected a number of at most 64 bits")

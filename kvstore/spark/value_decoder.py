"""The form of a decoder of values, which the modules of the formats make and `value_schema.py` uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from google.protobuf.message import DecodeError

NO_MATCH = (
    msgspec.MsgspecError,
    DecodeError,
    ValueError,
    LookupError,
    ArithmeticError,
    TypeError,
    EOFError,
    RecursionError,
)
"""The errors of all decoders for a value that does not match the schema. pyarrow's errors are among them."""


class Decoder(NamedTuple):
    """The type of a column, and the function that decodes its values."""

    type: Any
    """A pyarrow.StructType."""
    decode: Callable[[bytes], dict[str, Any]]
    """Returns the fields of a value as pyarrow accepts them. Raises one of NO_MATCH."""

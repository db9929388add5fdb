"""Ids of operations: a change of the ring whose outcome is unknown is asked for again, and done once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.errors import MetadataUnknown, OutcomeUnknown

if TYPE_CHECKING:
    from kvstore.proto import admin_pb2

OperationId = Annotated[
    str, typer.Option("--operation", help="Repeat the command that had this id, if its outcome was unknown.")
]
ID_BYTES = 8


@contextmanager
def asked_once(
    request: admin_pb2.ChangeRingRequest | admin_pb2.ChangeReplicasRequest, *, has_option: bool = True
) -> Iterator[None]:
    """Give the request an id unless it has one. If its outcome stays unknown, also because somebody interrupts it, say
    how to ask again. `has_option`: whether the command has `--operation`; others may be repeated as they are."""
    request.operation = request.operation or os.urandom(ID_BYTES).hex()
    with_id = f" with --operation {request.operation}" if has_option else ""
    again = f"repeat the command{with_id}: what was asked is done once"
    try:
        yield
    except (OutcomeUnknown, MetadataUnknown) as error:
        raise OutcomeUnknown(f"{error or type(error).__name__}; {again}") from error
    except KeyboardInterrupt:
        print(f"kvstore: interrupted, and it may be done; {again}", file=sys.stderr)
        raise


@contextmanager
def said_if_interrupted(text: str) -> Iterator[None]:
    """Tell those who do not wait for the end of what they have asked for that it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"kvstore: {text}", file=sys.stderr)
        raise

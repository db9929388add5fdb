"""Operation ids: a change of the ring with an unknown outcome can be retried and is applied once."""

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
    str, typer.Option("--operation", help="Retry the command that had this id, after an unknown outcome")
]
ID_BYTES = 8


@contextmanager
def asked_once(
    request: admin_pb2.ChangeRingRequest | admin_pb2.ChangeReplicasRequest, *, has_option: bool = True
) -> Iterator[None]:
    """Give the request an id unless it has one. If the outcome stays unknown, also after an interrupt, report how to
    retry. `has_option` says whether the command has `--operation`; other commands are idempotent."""
    request.operation = request.operation or os.urandom(ID_BYTES).hex()
    with_id = f" with --operation {request.operation}" if has_option else ""
    again = f"repeat the command{with_id}; the change is applied once"
    try:
        yield
    except (OutcomeUnknown, MetadataUnknown) as error:
        raise OutcomeUnknown(f"{error or type(error).__name__}; {again}") from error
    except KeyboardInterrupt:
        print(f"kvstore: interrupted, and the change may be applied; {again}", file=sys.stderr)
        raise


@contextmanager
def said_if_interrupted(text: str) -> Iterator[None]:
    """If the block is interrupted, report `text`: that the requested change continues."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"kvstore: {text}", file=sys.stderr)
        raise

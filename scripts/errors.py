"""Reference of the errors (docs/reference/errors.md), from their classes and their forms at each endpoint."""

from __future__ import annotations

import inspect

from kvstore import errors
from kvstore.rpc.status import FIELDS, STATUS, http_status, reason_of
from kvstore.server.redis.replies import failure
from scripts.pages import one_line, table

HEAD = """# Errors

Every error of the store, for people who write clients or read errors: its form at each endpoint, and what a caller may
conclude from it. `make reference` writes this page from kvstore/errors.py, kvstore/rpc/status.py and
kvstore/server/redis/replies.py: do not edit it here.

Every endpoint names the class. gRPC sends a `google.rpc.ErrorInfo` with domain `kvstore`, the reason below and the
fields as metadata. HTTP sends the reason and the fields in the body. Redis sends the word below, then the message. The
Python clients raise the class (`kvstore.errors`) and retry by themselves until their deadline if the same call may
succeed. [Handle errors](../how-to/handle-errors.md) describes what to do about each outcome, and [rules](rules.md)
lists the requests that each endpoint refuses.
"""
OUTCOMES: dict[str, tuple[str, tuple[type[errors.StoreError], ...]]] = {
    "Not done; the same call may succeed later": (
        "The store did not carry out the request. The same call may succeed later or at another server.",
        (errors.Retryable,),
    ),
    "Not done": (
        "The store did not carry out the request. The same call fails again until its cause is gone.",
        (errors.Refused,),
    ),
    "Unknown": (
        "The store may or may not have carried out the request. Read, or repeat the call with the same request id.",
        (errors.OutcomeUnknown, errors.MetadataUnknown),
    ),
    "Inside the cluster": (
        (
            "These errors describe a fault of a node, its configuration, the metadata store or a bookie. Only calls of "
            "the admin service answer with them. If a change fails with one of them, read before you repeat it."
        ),
        (errors.StoreError,),
    ),
}
"""By heading: the conclusion, and the classes at the top of the outcome. An error belongs to the first that fits."""


def reference() -> str:
    """Return the page."""
    parts = [HEAD]
    for heading, (conclusion, _) in OUTCOMES.items():
        rows = [_row(kind) for kind in STATUS if heading_of(kind) == heading]
        parts.append(f"## {heading}\n\n{conclusion}\n\n{table(('error', 'gRPC', 'HTTP', 'Redis', 'meaning'), rows)}")
    return "\n".join(parts)


def heading_of(kind: type[errors.StoreError]) -> str:
    """Return the heading in OUTCOMES of an error."""
    return next(heading for heading, (_, tops) in OUTCOMES.items() if issubclass(kind, tops))


def _row(kind: type[errors.StoreError]) -> tuple[str, ...]:
    fields = FIELDS.get(kind, ())
    error = kind(*(parse("0") for _, parse in fields)) if fields else kind("reason")
    carried = "; fields " + ", ".join(f"`{name}`" for name, _ in fields) if fields else ""
    redis = failure(error).decode().split()[0].removeprefix("-")
    grpc = f"`{STATUS[kind].name}`, reason `{reason_of(kind)}`{carried}"
    return f"`{kind.__name__}`", grpc, str(http_status(error)), f"`{redis}`", one_line(inspect.getdoc(kind) or "")

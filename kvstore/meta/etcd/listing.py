"""The names of a node's children, page by page, all as of one revision."""

from __future__ import annotations

from kvstore.errors import NoSuchNode
from kvstore.meta.etcd.keys import Keys, Span
from kvstore.meta.etcd.link import Link
from kvstore.proto.etcd_pb2 import RangeRequest, RangeResponse, RequestOp, TxnRequest

PAGE = 1000
"""Keys in one answer."""


async def children(link: Link, keys: Keys, path: str) -> set[str]:
    """Raises NoSuchNode; Outdated if the revision of the first page was compacted before the last was read."""
    spans = keys.spans(path)
    own = RangeRequest(key=keys.key(path), keys_only=True)
    first = [_page(span, span.start) for span in spans]
    answer = await link.txn(TxnRequest(success=[RequestOp(request_range=each) for each in (own, *first)]))
    there, *pages = (each.response_range for each in answer.responses)
    if not there.kvs:
        raise NoSuchNode(path)
    names: set[str] = set()
    for span, page in zip(spans, pages, strict=True):
        names |= await _names(link, keys, path, span, page, answer.header.revision)
    return names


async def _names(link: Link, keys: Keys, path: str, span: Span, page: RangeResponse, revision: int) -> set[str]:
    """Of the children in a span, of which `page` is the first part."""
    names: set[str] = set()
    while True:
        following = span.start
        for each in page.kvs:
            if each.key >= following:
                if name := keys.child_or_none(path, each.key):
                    names.add(name)
                following = keys.next_key(path, each.key)
        if not page.more or following >= span.end:
            return names
        page = await link.range(_page(span, following, revision))


def _page(span: Span, start: bytes, revision: int = 0) -> RangeRequest:
    return RangeRequest(key=start, range_end=span.end, limit=PAGE, revision=revision, keys_only=True)

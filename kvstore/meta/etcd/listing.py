"""The names of a node's children, page by page, all as of one revision."""

from __future__ import annotations

from collections import deque

from kvstore.errors import NoSuchNode
from kvstore.meta.etcd.keys import EtcdKeys, KeySpan
from kvstore.meta.etcd.link import EtcdLink, Outdated
from kvstore.proto.etcd_pb2 import RangeRequest, RangeResponse, RequestOp, TxnRequest

PAGE = 1000
"""Maximum number of keys in one answer."""


class Listing:
    """The listing of one node's children. Each page is a call with its own deadline: etcd counts all remaining
    keys for each page, so a long list takes long."""

    def __init__(self, keys: EtcdKeys, path: str) -> None:
        self.names: set[str] = set()
        self._keys, self._path = keys, path
        self._revision = 0
        """Revision of the first page; 0 before it."""
        self._left: deque[tuple[KeySpan, bytes]] = deque()
        """Spans that are left to read, and where to start in each."""

    @property
    def is_complete(self) -> bool:
        return self._revision > 0 and not self._left

    async def read_page(self, link: EtcdLink) -> None:
        """Read the next page. Raises NoSuchNode, and Outdated if the revision of the first page was compacted; then the
        listing starts over."""
        if not self._revision:
            await self._begin(link)
            return
        span, start = self._left[0]
        try:
            page = await link.range(_page(span, start, self._revision))
        except Outdated:
            self._revision = 0
            raise
        self._left.popleft()
        self._take(span, start, page)

    async def _begin(self, link: EtcdLink) -> None:
        spans = self._keys.spans(self._path)
        own = RangeRequest(key=self._keys.key(self._path), keys_only=True)
        first = [_page(span, span.start) for span in spans]
        answer = await link.txn(TxnRequest(success=[RequestOp(request_range=each) for each in (own, *first)]))
        there, *pages = (each.response_range for each in answer.responses)
        if not there.kvs:
            raise NoSuchNode(self._path)
        self.names.clear()
        self._left.clear()
        self._revision = answer.header.revision
        for span, page in zip(spans, pages, strict=True):
            self._take(span, span.start, page)

    def _take(self, span: KeySpan, start: bytes, page: RangeResponse) -> None:
        following = start
        for each in page.kvs:
            if each.key >= following:
                if name := self._keys.child_or_none(self._path, each.key):
                    self.names.add(name)
                following = self._keys.next_key(self._path, each.key)
        if page.more and following < span.end:
            self._left.append((span, following))


def _page(span: KeySpan, start: bytes, revision: int = 0) -> RangeRequest:
    return RangeRequest(key=start, range_end=span.end, limit=PAGE, revision=revision, keys_only=True)

"""The outcome of a write that etcd refuses for lack of space. No server."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import MetadataUnavailable, MetadataUnknown
from kvstore.meta.etcd.store import EtcdStore
from kvstore.proto.etcd_pb2 import Compare, RangeRequest, TxnRequest, TxnResponse


class _Link:
    """A link that records its requests."""

    def __init__(self, *, is_as_it_was: bool) -> None:
        self.guard, self.asked = Compare(key=b"/kv/session"), list[TxnRequest]()
        self._answer = TxnResponse(succeeded=is_as_it_was)

    async def txn(self, request: TxnRequest) -> TxnResponse:
        self.asked.append(request)
        return self._answer


def is_serializable(request: TxnRequest) -> bool:
    """Decide as etcd does: any member may answer such a transaction from its own state, however far it lags. None of
    our reads is serializable: the messages do not even have the field."""
    assert "serializable" not in RangeRequest.DESCRIPTOR.fields_by_name
    return not request.success and not request.failure


@pytest.mark.parametrize("is_as_it_was", [True, False])
async def test_outcome_of_a_refused_write_is_not_read_from_a_lagging_member(is_as_it_was: bool) -> None:
    """A member without the write reported that nothing had changed, so the write was reported as not done."""
    store: Any = object.__new__(EtcdStore)
    link: Any = _Link(is_as_it_was=is_as_it_was)
    wanted = TxnRequest(compare=[link.guard, Compare(key=b"/kv/a")])
    refusal = MetadataUnavailable("space exceeded")
    if is_as_it_was:
        await store._check_not_done(link, wanted, refusal)
    else:
        with pytest.raises(MetadataUnknown, match="may have been done"):
            await store._check_not_done(link, wanted, refusal)
    (asked,) = link.asked
    assert list(asked.compare) == list(wanted.compare)
    assert not is_serializable(asked)

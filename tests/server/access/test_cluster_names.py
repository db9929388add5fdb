"""The names of nodes and bookies, which no user may have, in changes of the access table."""

from __future__ import annotations

import pytest

from kvstore.access import AddUser, RemoveUser
from kvstore.errors import MetadataUnavailable
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.tables.access import AccessStore
from kvstore.server.access.cluster_names import change_access


class WithoutCookies(MemoryStore):
    """A metadata store that does not answer reads of bookies' cookies."""

    async def children(self, path: str) -> list[str]:
        if path == paths.COOKIES:
            raise MetadataUnavailable("the connection is lost")
        return await super().children(path)


async def test_user_can_be_removed_while_the_names_of_bookies_cannot_be_read() -> None:
    store = WithoutCookies()
    await AccessStore(store).change(AddUser("eve"))
    assert (await change_access(store, RemoveUser("eve"))).users == ()
    with pytest.raises(MetadataUnavailable):
        await change_access(store, AddUser("eve"))

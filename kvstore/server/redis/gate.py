"""The permissions of one Redis client, if access control is on."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, assert_never

from kvstore.access import Right
from kvstore.access.permissions import shown_name
from kvstore.errors import AccessUnfounded, NotAuthenticated, StoreError
from kvstore.partition.state.commands import Op
from kvstore.server.access.identities import OPERATION_NAMES, Access, UserIdentity
from kvstore.server.redis.plans import CommandError

NOAUTH = "NOAUTH Authentication required."
NOAUTH_HELLO = (
    "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> "
    "option can be used to authenticate the client and select the RESP protocol version at the same time"
)


class Need(Enum):
    """The permissions that a command requires if access control is on (docs/design/0014)."""

    NOTHING = auto()
    """No login. The command authenticates the client, closes the connection, or has its own authentication."""
    LOGIN = auto()
    """A login. The command shows no keys and nothing about other users."""
    OPERATIONS = auto()
    """The permissions that each of its operations requires on its key."""
    READ_SOME = auto()
    """The right to read some keys. The command shows only these keys."""
    READ_ALL = auto()
    """The right to read every key."""
    WRITE_ALL = auto()
    """The right to write every key."""
    ADMIN = auto()
    """The right to administer the cluster."""


class ChannelNeed(NamedTuple):
    """The right on Pub/Sub channels: the right on the keys that have the names of the channels."""

    right: Right
    channels: Sequence[bytes]
    patterns: Sequence[tuple[bytes, bytes, bytes]] = ()
    """Each pattern with the start and end of the range of all channels that it may match."""


class CommandGate:
    """Checks the commands of one connection while its user stays the same."""

    __slots__ = ("_access", "_address", "identity")

    def __init__(self, access: Access, identity: UserIdentity, address: str) -> None:
        self._access, self.identity, self._address = access, identity, address

    def check(self, name: str, need: Need | ChannelNeed) -> None:
        """Check a command before any part of it begins. Raises CommandError. `check_ops` checks its operations."""
        if need is Need.NOTHING:
            return
        identity, what = self.identity, f"the command {name}"
        try:
            match need:
                case ChannelNeed():
                    identity.check_known()
                    self._check_channels(name, need)
                case Need.LOGIN | Need.OPERATIONS:
                    identity.check_known()
                case Need.READ_SOME:
                    identity.check_some((Right.READ,), what)
                case Need.READ_ALL:
                    identity.check(Right.READ, b"", b"", what)
                case Need.WRITE_ALL:
                    identity.check(Right.WRITE, b"", b"", what)
                case Need.ADMIN:
                    identity.check_some((Right.ADMIN,), what)
                case _:
                    assert_never(need)
        except StoreError as error:
            raise self._refused(name, error) from None

    def check_ops(self, ops: Sequence[Op]) -> None:
        """Check all operations of a command before any of them is submitted. Raises CommandError if one operation is
        not allowed, so that a command takes effect completely or not at all."""
        for op in ops:
            refusal = self.identity.refusal_or_none(op)
            if refusal is not None:
                raise self._refused(OPERATION_NAMES[op.code], refusal)

    def _check_channels(self, name: str, need: ChannelNeed) -> None:
        permissions = self.identity.permissions
        prefixes = permissions.ranges[need.right].prefixes
        lacking = next((each for each in need.channels if not each.startswith(prefixes)), None)
        for pattern, start, end in need.patterns:
            if lacking is None and not permissions.may_all(need.right, start, end):
                lacking = pattern
        if lacking is not None:
            raise permissions.refused(need.right, f"{name} of channel {shown_name(lacking)}")

    def _refused(self, call: str, error: StoreError) -> CommandError:
        self._access.refused(self.identity.who, self._address, call, error)
        if isinstance(error, AccessUnfounded):
            return CommandError(f"NOAUTH {error}")
        return CommandError(NOAUTH if isinstance(error, NotAuthenticated) else f"NOPERM {error}")

"""The two clients have one interface: the same calls, with the same parameters and the same docstrings."""

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from types import FunctionType

import pytest

from kvstore.client import AsyncClient, AsyncTransaction, AsyncWatch, Client, Transaction, Watch, coordination

FACES = [
    (AsyncClient, Client),
    (AsyncWatch, Watch),
    (AsyncTransaction, Transaction),
    (coordination.AsyncSession, coordination.Session),
    (coordination.AsyncLock, coordination.Lock),
    (coordination.AsyncElection, coordination.Election),
    (coordination.AsyncGroup, coordination.Group),
    (coordination.AsyncBarrier, coordination.Barrier),
    (coordination.AsyncRendezvous, coordination.Rendezvous),
    (coordination.AsyncQueue, coordination.Queue),
]


def as_blocking(line: str) -> str:
    """Return a line of an asyncio docstring as its blocking twin has it: without `await` and `async`."""
    return re.sub(r"\b(await |async |a(?=next\())|\bAsync(?=[A-Z])", "", line)


def parameters_of(call: FunctionType) -> list[tuple[str, object, object, str]]:
    """Return name, kind, default and type of each parameter; types as their blocking twins have them."""
    return [
        (each.name, each.kind, each.default, re.sub(r"\bAwaitable\[(\w+)\]", r"\1", as_blocking(str(each.annotation))))
        for each in inspect.signature(call).parameters.values()
    ]


def calls_of(face: type) -> dict[str, object]:
    return {name: each for name, each in vars(face).items() if not name.startswith("_")}


@pytest.mark.parametrize(("waits", "blocks"), FACES)
def test_both_clients_have_the_same_calls(waits: type, blocks: type) -> None:
    assert calls_of(waits).keys() == calls_of(blocks).keys()


@pytest.mark.parametrize(("waits", "blocks"), FACES)
def test_both_clients_have_the_same_parameters_and_docstrings(waits: type, blocks: type) -> None:
    different = []
    for name, call in calls_of(waits).items():
        twin = calls_of(blocks)[name]
        waiting, blocking = ((inspect.getdoc(each) or "").splitlines() for each in (call, twin))
        if [as_blocking(line) for line in waiting] != blocking:
            different.append(f"{name}: sentences")
        if inspect.isfunction(call) and inspect.isfunction(twin) and parameters_of(call) != parameters_of(twin):
            different.append(f"{name}: parameters")
    assert different == []


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy])
@pytest.mark.parametrize("face", [AsyncClient, Client])
def test_client_refuses_pickle_and_copy_by_its_name(
    face: type[AsyncClient | Client], take: Callable[[object], object]
) -> None:
    """An open client failed with "System entropy source does not have state", and a copy shared its connections."""
    with pytest.raises(TypeError, match=f"^{face.__name__} cannot be pickled or copied; open one in each process$"):
        take(face("kv://127.0.0.1:1"))

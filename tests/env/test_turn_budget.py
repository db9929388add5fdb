"""The work that the connections of a port begin in one turn of the event loop."""

from __future__ import annotations

import asyncio

from kvstore.env.turn_budget import TurnBudget


async def test_work_is_shared_between_turns_in_order() -> None:
    budget, began, turn = TurnBudget(3), list[tuple[int, str]](), 0

    def begin(name: str, left: int) -> None:
        if budget.is_used_up:
            budget.wait(lambda: begin(name, left))
            return
        budget.take(2)
        began.append((turn, name))
        if left:
            begin(name, left - 1)

    for name in "abc":
        begin(name, 1)
    while turn < 3:
        turn += 1
        await asyncio.sleep(0)
    assert began == [(0, "a"), (0, "a"), (1, "b"), (1, "b"), (2, "c"), (2, "c")]
    assert not budget.is_used_up


async def test_connection_waits_only_once() -> None:
    budget, resumed = TurnBudget(1), list[int]()

    class Connection:
        def resume(self) -> None:
            resumed.append(1)

    connection = Connection()
    budget.take(1)
    for _ in range(3):
        budget.wait(connection.resume)
    await asyncio.sleep(0)
    assert resumed == [1]


async def test_coroutines_begin_in_order() -> None:
    budget, began, turn = TurnBudget(1), list[tuple[int, int]](), 0

    async def begin(number: int) -> None:
        await budget.begin(1)
        began.append((turn, number))

    tasks = [asyncio.ensure_future(begin(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    while not all(each.done() for each in tasks):
        turn += 1
        await asyncio.sleep(0)
    assert [number for _, number in began] == [0, 2, 3]
    assert len({at for at, _ in began}) == 3


async def test_connection_that_fails_does_not_hold_up_the_others() -> None:
    budget, resumed, failed = TurnBudget(1), list[str](), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(str(context["exception"])))

    def fail() -> None:
        raise ValueError("of one connection")

    budget.take(1)
    budget.wait(fail)
    budget.wait(lambda: resumed.append("the next"))
    for _ in range(2):
        await asyncio.sleep(0)
    assert (failed, resumed) == (["of one connection"], ["the next"])

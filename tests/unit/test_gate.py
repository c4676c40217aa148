"""The gate: all members in one message, and nobody waits for one that will not come."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_draft.gate import Gate, Member


class Wire:
    """Records what would go to the scheduler."""

    def __init__(self) -> None:
        self.messages: list[list[str]] = []
        self.aborted: list[str] = []
        self.held = asyncio.Event()
        self.held.set()
        self.error: Exception | None = None

    async def send(self, batch: list[Any]) -> None:
        await self.held.wait()
        if self.error:
            raise self.error
        self.messages.append([one.rid for one in batch])

    def gate(self, size: int, timeout_s: float = 5.0) -> Gate:
        return Gate(size, timeout_s, self.send, self.aborted.append)


def member(gate: Gate, rid: str, delay: float = 0.0, fail: bool = False) -> "asyncio.Task[bool]":
    async def run() -> bool:
        with Member(gate) as me:
            await asyncio.sleep(delay)
            if fail:
                raise ValueError(rid)
            return await me.pass_gate(SimpleNamespace(rid=rid))

    return asyncio.create_task(run())


async def test_all_members_go_in_one_message() -> None:
    wire = Wire()
    gate = wire.gate(3)
    tasks = [member(gate, rid, delay) for rid, delay in [("a", 0.02), ("b", 0.0), ("c", 0.01)]]
    assert await asyncio.gather(*tasks) == [True, True, True]
    assert [sorted(m) for m in wire.messages] == [["a", "b", "c"]]


async def test_a_member_that_fails_first_releases_the_others() -> None:
    wire = Wire()
    gate = wire.gate(2)
    good, bad = member(gate, "a"), member(gate, "b", 0.01, fail=True)
    with pytest.raises(ValueError):
        await bad
    assert await asyncio.wait_for(good, 1.0)
    assert wire.messages == [["a"]]


async def test_a_slow_member_is_left_behind_and_sends_itself() -> None:
    wire = Wire()
    gate = wire.gate(2, timeout_s=0.02)
    fast, slow = member(gate, "a"), member(gate, "b", 0.1)
    assert await fast is True
    assert await slow is False
    assert wire.messages == [["a"]]


async def test_a_cancel_while_waiting_releases_the_others() -> None:
    wire = Wire()
    gate = wire.gate(3)
    a, b = member(gate, "a"), member(gate, "b")
    await asyncio.sleep(0)
    b.cancel()
    c = member(gate, "c")
    assert await asyncio.wait_for(asyncio.gather(a, c), 1.0) == [True, True]
    assert [sorted(m) for m in wire.messages] == [["a", "c"]]


async def test_a_cancel_while_the_message_is_under_way_is_aborted_after_it() -> None:
    wire = Wire()
    wire.held.clear()
    gate = wire.gate(2)
    a, b = member(gate, "a"), member(gate, "b")
    for _ in range(5):
        await asyncio.sleep(0)
    b.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    wire.held.set()
    assert await asyncio.wait_for(a, 1.0) is True
    assert wire.aborted == ["b"]


async def test_a_failed_message_fails_every_member() -> None:
    wire = Wire()
    wire.error = RuntimeError("socket closed")
    gate = wire.gate(2)
    results = await asyncio.gather(member(gate, "a"), member(gate, "b"), return_exceptions=True)
    assert [str(r) for r in results] == ["socket closed"] * 2

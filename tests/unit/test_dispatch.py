"""The asyncio shell against a scripted engine handle: retries, cancels, deadlines, and what the core is told."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from deployments import dispatch, replicas
from deployments.dispatch import Dispatcher, Pending
from deployments.errors import ApiError
from deployments.grouping import Limits

Script = Callable[[list[tuple[str, dict[str, Any]]], str], AsyncIterator[Any]]
INFO = {"extend_requests": 1, "extend_batch": 1, "acceptance_length": 3.0, "first_chain_accepted": 2, "steps": 4}
_names = (f"Engine{i}" for i in itertools.count())


class Stream:
    """What a streaming handle call gives: an async iterator with cancel()."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._items = items
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._items

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A deployment handle whose run_group follows a script; remembers calls and cancels."""

    def __init__(self, script: Script) -> None:
        self.deployment_name = next(_names)
        self.script = script
        self.calls: list[tuple[str, list[str]]] = []
        self.cancels: list[tuple[str, str]] = []
        self.reached = asyncio.Event()

    def options(self, method_name: str, stream: bool = False) -> Any:
        handle = self

        class Method:
            def remote(self, *args: Any, replica: str) -> Any:
                if method_name == "run_group":
                    _, members = args
                    handle.calls.append((replica, [rid for rid, _ in members]))
                    handle.reached.set()
                    return Stream(handle.script(members, replica))
                handle.cancels += [(rid, replica) for rid in args[0]]
                return asyncio.sleep(0)

        return Method()


def dispatcher(handle: Handle, *names: str, timeout_s: float = 5.0, **limits: Any) -> Dispatcher:
    replicas.publish(handle.deployment_name, frozenset(names))
    return Dispatcher(handle, Limits(**limits), timeout_s)


def submit(d: Dispatcher, image: bool = False) -> Pending:
    return d.submit({"messages": []}, tokens=10, image_tokens=5 if image else 0, size=10)


async def answers(members: list[tuple[str, dict[str, Any]]], replica: str) -> AsyncIterator[Any]:
    for i, _ in enumerate(members):
        yield [(i, ("first",)), (i, ("answer", {"text": replica}, dict(INFO))), (i, ("end",))]


async def hangs(members: list[tuple[str, dict[str, Any]]], replica: str) -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield []


async def settle(condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("not within two seconds")


async def test_an_answer_comes_with_its_kimi_object_and_its_release_is_no_cancel() -> None:
    released = asyncio.Event()

    async def ends_late(members: list[tuple[str, dict[str, Any]]], replica: str) -> AsyncIterator[Any]:
        yield [(0, ("first",)), (0, ("answer", {"text": replica}, dict(INFO)))]
        await released.wait()
        yield [(0, ("end",))]

    handle = Handle(ends_late)
    d = dispatcher(handle, "a")
    pending = submit(d)
    event = await d.next_event(pending)
    d.release(pending)
    released.set()
    assert event[0] == "answer"
    assert event[1]["kimi"]["replica"] == "a"
    assert event[1]["kimi"]["group_size"] == 1
    assert 0 <= event[1]["kimi"]["queue_wait_s"] <= event[1]["kimi"]["ttft_s"]
    await settle(lambda: d.state["in_flight"] == 0)
    assert handle.cancels == []
    assert d.state["outcomes"] == {"ok": 1}


async def test_members_of_a_group_get_their_own_events() -> None:
    handle = Handle(answers)
    d = dispatcher(handle)
    waiting = [submit(d, image=True) for _ in range(3)]
    replicas.publish(handle.deployment_name, frozenset({"a"}))
    events = [await d.next_event(p) for p in waiting]
    assert [e[0] for e in events] == ["answer"] * 3
    assert handle.calls == [("a", [p.request.rid for p in waiting])]
    assert d.recent[-1]["size"] == 3


async def test_a_member_that_never_started_is_sent_once_more_elsewhere() -> None:
    async def dies_on_a(members: list[tuple[str, dict[str, Any]]], replica: str) -> AsyncIterator[Any]:
        if replica == "a":
            replicas.publish(handle.deployment_name, frozenset({"b"}))
            raise RuntimeError("actor died")
        async for item in answers(members, replica):
            yield item

    handle = Handle(dies_on_a)
    d = dispatcher(handle, "a")
    event = await d.next_event(submit(d))
    assert event[:2] == ("answer", event[1])
    assert event[1]["text"] == "b"
    assert [replica for replica, _ in handle.calls] == ["a", "b"]


async def test_two_deaths_are_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "AVOID_S", 0.02)

    async def dies(members: list[tuple[str, dict[str, Any]]], replica: str) -> AsyncIterator[Any]:
        raise RuntimeError("actor died")
        yield []

    d = dispatcher(Handle(dies), "a")
    pending = submit(d)
    await settle(lambda: pending.request.attempts == 2)
    event = await d.next_event(pending)
    assert event[:2] == ("error", 503)
    assert event[2]["error"]["code"] == "replica_failed"
    assert "actor died" in event[2]["error"]["message"]


async def test_a_member_that_has_spoken_is_not_repeated() -> None:
    async def dies_late(members: list[tuple[str, dict[str, Any]]], replica: str) -> AsyncIterator[Any]:
        yield [(0, ("first",)), (0, ("data", "{}"))]
        raise RuntimeError("actor died")

    handle = Handle(dies_late)
    d = dispatcher(handle, "a", "b")
    pending = submit(d)
    assert (await d.next_event(pending))[0] == "data"
    assert (await d.next_event(pending))[:2] == ("error", 503)
    assert len(handle.calls) == 1


async def test_a_misrouted_group_is_routed_again() -> None:
    async def first_misroutes(members: list[tuple[str, dict[str, Any]]], replica: str) -> AsyncIterator[Any]:
        if len(handle.calls) == 1:
            yield [(0, ("misrouted",))]
            return
        async for item in answers(members, replica):
            yield item

    handle = Handle(first_misroutes)
    d = dispatcher(handle, "a")
    assert (await d.next_event(submit(d)))[0] == "answer"
    assert len(handle.calls) == 2


async def test_leaving_while_running_aborts_on_that_replica_and_leaving_while_waiting_forgets() -> None:
    handle = Handle(hangs)
    d = dispatcher(handle, "a", slots=1)
    running, waiting = submit(d), submit(d)
    await handle.reached.wait()
    d.release(waiting)
    assert d.state["queued"] == 0
    d.release(running)
    await settle(lambda: handle.cancels == [(running.request.rid, "a")])


async def test_time_over_is_a_504_waiting_or_running() -> None:
    handle = Handle(hangs)
    d = dispatcher(handle, "a", timeout_s=0.05, slots=1)
    for pending in (submit(d), submit(d)):
        event = await d.next_event(pending)
        assert event[:2] == ("error", 504)
        d.release(pending)


async def test_a_full_queue_is_a_429_with_retry_after() -> None:
    d = dispatcher(Handle(hangs), max_queued_requests=1)
    submit(d)
    with pytest.raises(ApiError) as caught:
        submit(d)
    assert caught.value.status == 429
    assert int(caught.value.headers["Retry-After"]) >= 1

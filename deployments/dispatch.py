"""The asyncio shell round the grouping core: owns the tasks that carry groups out and events back."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
import uuid
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from deployments import replicas
from deployments.errors import ApiError, error_body
from deployments.grouping import Grouper, Limits, Overloaded
from deployments.request import Group, Request

logger = logging.getLogger("ray.serve")
MAX_ATTEMPTS = 2  # a member that never started is sent once more when its replica dies
CANCEL_TIMEOUT_S = 10.0
AVOID_S = 3.0  # after a failed call; by then Serve has said whether the replica is gone
RECENT_GROUPS = 1024


@dataclass(slots=True)
class Pending:
    """A request from admission to its end, on the router's side."""

    request: Request
    body: dict[str, Any]
    events: asyncio.Queue[tuple[Any, ...]] = field(default_factory=asyncio.Queue)
    group: Group | None = None
    dispatched_at: float | None = None
    first_at: float | None = None
    started: bool = False  # some of its answer has been passed on: no second attempt
    settled: bool = False  # the caller has got all there is: its release is no cancel
    released: bool = False  # the caller is gone
    over: bool = False

    def kimi(self, info: dict[str, Any]) -> dict[str, Any]:
        """The `kimi` object of the answer. Seconds; acceptance counts the bonus token."""
        arrival = self.request.arrival
        return {
            "group_id": self.group.group_id if self.group else None,
            "group_size": len(self.group.members) if self.group else 0,
            "extend_requests": info.get("extend_requests"),
            "extend_batch": info.get("extend_batch"),
            "replica": self.group.replica if self.group else None,
            "queue_wait_s": None if self.dispatched_at is None else round(self.dispatched_at - arrival, 4),
            "ttft_s": None if self.first_at is None else round(self.first_at - arrival, 4),
            "acceptance_length": info.get("acceptance_length"),
            "first_chain_accepted": info.get("first_chain_accepted"),
            "accepted_by_position": info.get("accepted_by_position"),
            "verify_steps": info.get("steps"),
        }


class Dispatcher:
    """Admits requests, lets the core group them, sends groups, and feeds each member's event queue.

    Args:
        engine: handle of the Engine deployment.
        limits: bounds for the core.
        timeout_s: longest life of a request.
    """

    def __init__(self, engine: Any, limits: Limits, timeout_s: float) -> None:
        # .options() starts Serve's routing state: replicas are published before the first request
        self._groups = engine.options(method_name="run_group", stream=True)
        self._cancels = engine.options(method_name="cancel")
        self._deployment = engine.deployment_name
        self._timeout_s = timeout_s
        self._core = Grouper(limits)
        self._pending: dict[str, Pending] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._prefix = uuid.uuid4().hex[:6]
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_GROUPS)
        self.outcomes: Counter[str] = Counter()
        replicas.subscribe(self._deployment, self._wake)
        self._replicas_changed()

    # -- the life of a request
    def submit(self, body: dict[str, Any], tokens: int, image_tokens: int, size: int) -> Pending:
        """Admit a request; raises ApiError 429 when the queue is full. Always pair with `release`."""
        now = time.monotonic()
        rid = f"chatcmpl-{uuid.uuid4().hex}"
        request = Request(rid, tokens, image_tokens, size, arrival=now, deadline=now + self._timeout_s)
        try:
            self._core.admit(request)
        except Overloaded as error:
            self.outcomes["refused"] += 1
            raise ApiError(
                429,
                f"The queue is full: {error.what}. Try again later.",
                code="overloaded",
                retry_after_s=error.retry_after_s,
            ) from error
        pending = Pending(request, body)
        self._pending[rid] = pending
        self._pump()
        return pending

    async def next_event(self, pending: Pending) -> tuple[Any, ...]:
        """The member's next event; ("error", 504, body) when its time is over."""
        remaining = pending.request.deadline - time.monotonic()
        try:
            return await asyncio.wait_for(pending.events.get(), max(remaining, 0.001))
        except TimeoutError:
            self.outcomes["expired"] += 1
            return (
                "error",
                504,
                error_body(504, f"The request took longer than {self._timeout_s:g} s.", code="timeout"),
            )

    def release(self, pending: Pending) -> None:
        """The caller is gone or satisfied: whatever of the request is left ends, here and in the engine."""
        if pending.over or pending.settled:
            return
        pending.released = True
        self.outcomes["cancelled"] += 1
        rid = pending.request.rid
        replica = self._core.cancel(rid)
        if replica is None:
            self._end(pending, ("end",))
            self._pump()
        else:
            self._spawn(self._cancel(rid, replica))

    @property
    def state(self) -> dict[str, Any]:
        """What the router sees now, for /ready and for people."""
        return {
            "replicas": {
                name: {"running": len(r.running), "tokens": r.load} for name, r in self._core.replicas.items()
            },
            "queued": self._core.queued,
            "in_flight": self._core.in_flight,
            "outcomes": dict(self.outcomes),
        }

    # -- tasks
    def _spawn(self, coroutine: Any) -> None:
        # An empty context: inside a request's context Serve would cancel this task with that request.
        task = self._loop.create_task(coroutine, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cancel(self, rid: str, replica: str) -> None:
        try:
            await asyncio.wait_for(self._cancels.remote([rid], replica=replica), CANCEL_TIMEOUT_S)
        except Exception as error:
            logger.warning("cancel of %s on replica %s failed: %r", rid, replica, error)

    def _wake(self) -> None:  # from Serve's thread
        self._loop.call_soon_threadsafe(self._replicas_changed)

    def _replicas_changed(self) -> None:
        for request in self._core.set_replicas(replicas.current(self._deployment)):
            self._lost(request.rid, "its replica is gone")
        self._pump()

    def _pump(self) -> None:
        now = time.monotonic()
        for request in self._core.expire(now):
            self._end(
                self._pending.get(request.rid),
                (
                    "error",
                    504,
                    error_body(504, f"No replica took the request within {self._timeout_s:g} s.", code="timeout"),
                ),
            )
        for group in self._core.decide(now):
            self._spawn(self._run(group))
        if self._timer is not None:
            self._timer.cancel()
        wakeup = self._core.next_wakeup(now)
        # monotonic() is the loop's clock; a hair later, so that the core's comparison holds
        self._timer = None if wakeup is None else self._loop.call_later(max(wakeup - now, 0) + 1e-3, self._pump)

    async def _run(self, group: Group) -> None:
        """Carry one group to its replica and its events to the members."""
        now = time.monotonic()
        members = [self._pending[request.rid] for request in group.members if request.rid in self._pending]
        for pending in members:
            pending.group, pending.dispatched_at = group, now
        group_id = f"{self._prefix}-{group.group_id}"
        record = {
            "group_id": group.group_id,
            "size": len(members),
            "replica": group.replica,
            "tokens": group.tokens,
            "images": sum(m.request.has_images for m in members),
            "batches": [],
        }
        self.recent.append(record)
        stream = self._groups.remote(group_id, [(p.request.rid, p.body) for p in members], replica=group.replica)
        reason = "the engine ended without an answer"
        try:
            async for events in stream:
                for index, event in events:
                    self._deliver(members[index], event, record)
        except Exception as error:
            self._core.avoid(group.replica, time.monotonic() + AVOID_S)
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
            logger.warning("group %s on replica %s failed: %s", group_id, group.replica, reason)
        finally:
            stream.cancel()  # dropping the generator alone does not stop the engine
        for pending in members:
            if not pending.over and pending.group is group:
                self._lost(pending.request.rid, reason)
        self._pump()

    def _deliver(self, pending: Pending, event: tuple[Any, ...], record: dict[str, Any]) -> None:
        rid, kind = pending.request.rid, event[0]
        if kind == "first":
            pending.first_at = pending.first_at or time.monotonic()
            self._core.first_token(rid)
            self._pump()
            return
        if kind in ("end", "misrouted"):
            if kind == "misrouted" or not (pending.over or pending.released or pending.started):
                self._lost(rid, "the engine ended without an answer")
            else:
                self._end(pending, ("end",))
            self._pump()
            return
        pending.started = True
        pending.settled = kind in ("answer", "error") or event[1] == "[DONE]"
        if kind in ("answer", "final") and event[2].get("extend_requests") is not None:
            record["batches"].append((event[2].get("extend_batch"), event[2]["extend_requests"]))
        if kind in ("answer", "final"):
            event[1]["kimi"] = pending.kimi(event[2])
            self.outcomes["ok"] += 1
        elif kind == "error":
            self.outcomes["failed"] += 1
        pending.events.put_nowait(event[:2] if kind != "error" else event)

    def _lost(self, rid: str, reason: str) -> None:
        """A member whose replica failed it: once more elsewhere if it had not started, else a typed error."""
        pending = self._pending.get(rid)
        self._core.finish(rid)
        if pending is None or pending.over:
            return
        if not pending.started and not pending.released and pending.request.attempts < MAX_ATTEMPTS:
            pending.group = None
            self._core.requeue(pending.request)
            return
        self.outcomes["lost"] += 1
        self._end(
            pending,
            ("error", 503, error_body(503, f"The replica failed while answering: {reason}.", code="replica_failed")),
        )

    def _end(self, pending: Pending | None, event: tuple[Any, ...]) -> None:
        if pending is None or pending.over:
            return
        pending.over = True
        self._core.finish(pending.request.rid)
        pending.events.put_nowait(event)
        self._pending.pop(pending.request.rid, None)

"""The gate where the members of a group wait for each other before they go to the scheduler together. Pure asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

current_member: ContextVar[Member | None] = ContextVar("current_member", default=None)


class Gate:
    """Where the members of one group wait for each other.

    Args:
        size: members expected.
        timeout_s: how long the first to arrive waits for the rest.
        send: sends a list of tokenized requests in one message.
        abort: aborts a request id in the scheduler; for members that were cancelled while the message was under way.
    """

    def __init__(
        self, size: int, timeout_s: float, send: Callable[[list[Any]], Any], abort: Callable[[str], None]
    ) -> None:
        self._expected = size
        self._timeout_s = timeout_s
        self._send = send
        self._abort = abort
        self._arrived: dict[str, tuple[Any, asyncio.Future[None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._dispatch: asyncio.Task[None] | None = None  # owned here: no member's cancel may stop the others' message
        self.opened = False
        self.sent = 0  # members that went in the common message

    async def arrive(self, tokenized: Any) -> bool:
        """Wait for the group, then be sent with it. False: the gate is already open, the caller sends itself."""
        if self.opened:
            return False
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._arrived[tokenized.rid] = (tokenized, future)
        if self._timer is None:
            self._timer = loop.call_later(self._timeout_s, self._open)
        self._open_if_complete()
        try:
            await future
        except asyncio.CancelledError:
            if not self.opened:
                del self._arrived[tokenized.rid]
                self.leave()
            raise
        return True

    def leave(self) -> None:
        """A member that will not arrive: it failed, ended or was cancelled first."""
        self._expected -= 1
        self._open_if_complete()

    def _open_if_complete(self) -> None:
        if not self.opened and len(self._arrived) >= self._expected:
            self._open()

    def _open(self) -> None:
        if self.opened:
            return
        self.opened = True
        if self._timer is not None:
            self._timer.cancel()
        if self._arrived:
            self._dispatch = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        self.sent = len(self._arrived)
        try:
            await self._send([tokenized for tokenized, _ in self._arrived.values()])
        except Exception as error:
            for _, future in self._arrived.values():
                if not future.done():
                    future.set_exception(error)
            return
        for rid, (_, future) in self._arrived.items():
            if future.cancelled():
                self._abort(rid)  # its state is gone here, the scheduler has just got it
            elif not future.done():
                future.set_result(None)


class Member:
    """One member of a group while it runs: its gate, and what the engine reported of it.

    Use as a context manager round everything the member does; leaving without having arrived releases the others.
    """

    def __init__(self, gate: Gate | None, on_first_token: Callable[[], None] | None = None) -> None:
        self._gate = gate
        self._on_first_token = on_first_token
        self._entered_gate = gate is None
        self.meta_info: dict[str, dict[str, Any]] = {}  # request id -> latest meta_info (several when n > 1)

    def __enter__(self) -> Member:
        self._token = current_member.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        current_member.reset(self._token)
        if not self._entered_gate:
            self._entered_gate = True
            assert self._gate is not None
            self._gate.leave()

    async def pass_gate(self, tokenized: Any) -> bool:
        """Send `tokenized` with the group. False: there is no gate (any more), the caller sends it itself."""
        if self._entered_gate:
            return False
        self._entered_gate = True
        assert self._gate is not None
        return await self._gate.arrive(tokenized)

    def record(self, output: dict[str, Any]) -> None:
        """Keep the latest meta_info of each request id; the first one marks the first token."""
        meta_info = output.get("meta_info") or {}
        if not self.meta_info and self._on_first_token is not None:
            self._on_first_token()
        self.meta_info[str(meta_info.get("id", ""))] = meta_info

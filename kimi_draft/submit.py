"""Group submission: members preprocessed side by side reach the scheduler in one message, as one extend batch.

Why: SGLang sends a list call's image prompts one by one, so the first is prefilled alone. Only one
`BatchTokenizedGenerateReqInput` is queued whole before the next scheduling step
(`Scheduler.handle_batch_generate_request`); `TokenizerManager._send_batch_request` sends it.

How: each member runs in its own task, through SGLang's own serving classes, with `Member` set in a context variable.
The tokenizer manager below holds each member's first message at the group's `Gate`; the last live member to arrive
releases all of them together. A member that fails, ends or is cancelled before it arrives leaves the gate, and the
gate opens by itself after a time limit: nobody waits for a member that will not come.

Upstream: sglang/srt/managers/tokenizer_manager.py (0.5.23), `generate_request`, `_send_one_request`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

from kimi_draft import cpu

cpu.install()

from sglang.srt.entrypoints.engine import init_tokenizer_manager as sglang_init_tokenizer_manager  # noqa: E402
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput  # noqa: E402
from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402

logger = logging.getLogger(__name__)

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


class GroupTokenizerManager(TokenizerManager):  # type: ignore[misc]
    """SGLang's tokenizer manager, with groups. Without a current `Member` it behaves as upstream's."""

    def gate(self, size: int, timeout_s: float) -> Gate:
        """A gate for a group of `size` members."""
        return Gate(size, timeout_s, self._send_batch_request, self._abort_in_scheduler)

    def _abort_in_scheduler(self, rid: str) -> None:
        self._dispatch_to_scheduler(AbortReq(rid=rid))

    async def _send_one_request(self, tokenized_obj: Any) -> None:
        member = current_member.get()
        if member is None or not await member.pass_gate(tokenized_obj):
            await super()._send_one_request(tokenized_obj)

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """As upstream, and reports to the current member.

        An unstreamed single answer is streamed inside, so that its first token is known when it exists; the caller
        still gets one output, the last (outputs are cumulative). With logprobs it is left alone: there streamed
        outputs carry slices.
        """
        member = current_member.get()
        hidden_stream = member is not None and not self.incremental_streaming_output and _is_plain_single(obj)
        if hidden_stream:
            obj.stream = True
        last: Any = None
        outputs = super().generate_request(obj, request)
        try:
            async for output in outputs:
                if member is not None:
                    for one in output if isinstance(output, list) else [output]:
                        member.record(one)
                if hidden_stream:
                    last = output
                else:
                    yield output
            if hidden_stream:
                yield _raise_if_aborted(last)
        finally:
            await outputs.aclose()


def _is_plain_single(obj: Any) -> bool:
    """One prompt, one answer, not streamed, no logprobs. Read before upstream normalises the request."""
    if not isinstance(obj, GenerateReqInput) or obj.stream or obj.return_logprob:
        return False
    one_prompt = isinstance(obj.text, str) or (bool(obj.input_ids) and not isinstance(obj.input_ids[0], list))
    params = obj.sampling_params or {}
    return one_prompt and isinstance(params, dict) and int(params.get("n") or 1) == 1


def _raise_if_aborted(output: Any) -> Any:
    """What upstream does for unstreamed answers (`_handle_abort_finish_reason`): an abort with a status is an error."""
    import fastapi

    reason = output["meta_info"].get("finish_reason") or {}
    status = reason.get("status_code")
    if reason.get("type") == "abort" and status is not None and 400 <= int(status) < 600:
        if int(status) == 400:
            raise ValueError(reason.get("message"))
        raise fastapi.HTTPException(status_code=int(status), detail=reason.get("message"))
    return output


def init_tokenizer_manager(server_args: Any, port_args: Any) -> tuple[Any, Any]:
    """For `Engine.init_tokenizer_manager_func`: SGLang's own, with our class."""
    result: tuple[Any, Any] = sglang_init_tokenizer_manager(server_args, port_args, GroupTokenizerManager)
    return result

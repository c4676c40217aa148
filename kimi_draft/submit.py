"""Group submission: members preprocessed side by side reach the scheduler in one message, as one extend batch.

Why: SGLang sends a list call's image prompts one by one, so the first is prefilled alone. Only one
`BatchTokenizedGenerateReqInput` is queued whole before the next scheduling step
(`Scheduler.handle_batch_generate_request`); `TokenizerManager._send_batch_request` sends it.

How: each member runs in its own task, through SGLang's own serving classes, with a `Member` (kimi_draft/gate.py) set in
a context variable. The tokenizer manager below holds each member's first message at the group's `Gate`; the last live
member to arrive releases all of them together. A member that fails, ends or is cancelled before it arrives leaves the
gate, and the gate opens by itself after a time limit: nobody waits for a member that will not come.

Upstream: sglang/srt/managers/tokenizer_manager.py (0.5.23), `generate_request`, `_send_one_request`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kimi_draft import cpu
from kimi_draft.gate import Gate, current_member

cpu.install()

from sglang.srt.entrypoints.engine import init_tokenizer_manager as sglang_init_tokenizer_manager  # noqa: E402
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput  # noqa: E402
from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402


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

"""One member of a group inside the replica: an OpenAI body in, events out, through SGLang's own serving classes.

Events (tuples, first element the kind):
    ("first",)                    the member's first token exists
    ("data", json_text)           one chunk of a streamed answer (the text after "data: ")
    ("final", chunk, info)        the streamed chunk that carries finish_reason, with the member's statistics
    ("answer", body, info)        the whole of an unstreamed answer
    ("error", status, body)       an error in OpenAI's shape; nothing was streamed before it

run_group adds ("end",) as the last.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from pydantic import ValidationError

from deployments.errors import ApiError, error_body, from_validation
from kimi_draft import stats
from kimi_draft.gate import Gate, Member

Event = tuple[Any, ...]
Emit = Callable[[Event], None]


async def run_member(chat: Any, rid: str, body: dict[str, Any], gate: Gate | None, emit: Emit) -> None:
    """Answer one request. Never raises but for cancellation.

    Args:
        chat: SGLang's OpenAIServingChat.
        rid: our request id; becomes the answer's id (SGLang takes none with n > 1).
        body: the OpenAI chat request.
        gate: the group's gate; None for a request alone.
        emit: takes the events, in order.
    """
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    with Member(gate, on_first_token=lambda: emit(("first",))) as member:
        try:
            request = ChatCompletionRequest(**body)
            request.rid = rid if request.n == 1 else None  # never the client's: it could name another's request
            response = await chat.handle_request(request, None)
            if hasattr(response, "body_iterator"):
                await _stream(response.body_iterator, member, emit)
            elif hasattr(response, "status_code"):
                status, document = response.status_code, json.loads(response.body)
                emit(("error", status, _upstream_error(status, document, ChatCompletionRequest.model_fields)))
            else:
                emit(("answer", response.model_dump(mode="json"), _info(member)))
        except ValidationError as error:
            api_error = from_validation(error)
            emit(("error", api_error.status, api_error.body))
        except ApiError as error:
            emit(("error", error.status, error.body))
        except Exception as error:  # a member fails alone; its group goes on
            emit(("error", 500, error_body(500, f"The engine failed on this request: {error!r}", code="engine_error")))


async def _stream(chunks: AsyncIterator[str], member: Member, emit: Emit) -> None:
    try:
        async for sse in chunks:
            for line in sse.splitlines():
                if not line.startswith("data: "):
                    continue
                text = line.removeprefix("data: ")
                if '"finish_reason":' in text and '"finish_reason":null' not in text:
                    emit(("final", json.loads(text), _info(member)))
                else:
                    emit(("data", text))
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]


def _info(member: Member) -> dict[str, Any]:
    """Statistics of the member's first choice (with n > 1 every choice shares the prefill).

    `accepted_by_position` becomes fractions of the verify steps, one for each draft position.
    """
    if not member.meta_info:
        return {}
    meta_info = next(iter(member.meta_info.values()))
    info: dict[str, Any] = dict(stats.summarize(meta_info))
    steps = info["steps"]
    counts = info["accepted_by_position"]
    positions = round(meta_info["spec_num_proposed_drafts"] / steps) if steps else 0
    counts = [*counts, *[0] * (positions - len(counts))]
    info["accepted_by_position"] = [round(count / steps, 4) for count in counts]
    if info["acceptance_length"] is not None:
        info["acceptance_length"] = round(info["acceptance_length"], 4)
    return info


def _upstream_error(status: int, body: Any, fields: Collection[str]) -> dict[str, Any]:
    """SGLang's flat error object in OpenAI's shape. Its messages begin with the field they are about, if any."""
    inner = body.get("error", body) if isinstance(body, dict) else {"message": str(body)}
    message = str(inner.get("message", "unknown error"))
    if status >= 500:
        return error_body(status, message, None, "engine_error")
    word = message.split(" ", 1)[0].strip(":'\"")
    word = {"max_new_tokens": "max_tokens"}.get(word, word)
    param = inner.get("param") or (word if word in fields else "messages")
    code = "context_length_exceeded" if "context length" in message else "invalid_request"
    return error_body(status, message, param, code)

"""A mixed burst against the running application: images, image pairs and text, by HTTP and by handle, all graded."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from kimi_draft.tiny.task import KINDS, Example, grade, sample

REQUEST_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Result:
    """What became of one request. Times in seconds from the burst's start."""

    example: Example
    way: str  # "http", "http stream", "handle", "handle stream"
    message: dict[str, Any] = field(default_factory=dict)
    kimi: dict[str, Any] = field(default_factory=dict)
    sent_at: float = 0.0
    ended_at: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def right(self) -> bool:
        return self.error is None and grade(self.example, self.message)

    @property
    def ttft_s(self) -> float | None:
        """Seen by the client where it streams, by the router elsewhere."""
        return self.chunk_times[0] - self.sent_at if self.chunk_times else self.kimi.get("ttft_s")


def examples(count: int, seed: int) -> list[Example]:
    """A fixed mix: every kind in turn, images first in line to fill groups."""
    rng = np.random.default_rng(seed)
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    rng.shuffle(kinds)
    return [sample(rng, kind) for kind in kinds]


async def burst(
    work: list[Example], url: str, handle: Any, on_end: Callable[[Result], None], gap_s: float
) -> list[Result]:
    """Send all of `work`, `gap_s` seconds apart, and wait for every end. A quarter goes by each of the four ways."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S, max_retries=0)
    start = time.monotonic()
    ways: list[tuple[str, Callable[[Result], Any]]] = [
        ("http", lambda r: _http(client, r)),
        ("http stream", lambda r: _http_stream(client, r, start)),
        ("handle", lambda r: _handle(handle, r)),
        ("handle stream", lambda r: _handle_stream(handle, r, start)),
    ]

    async def one(i: int, example: Example) -> Result:
        name, call = ways[i % len(ways)]
        result = Result(example, name)
        await asyncio.sleep(i * gap_s)
        result.sent_at = time.monotonic() - start
        try:
            await asyncio.wait_for(call(result), REQUEST_TIMEOUT_S)
        except Exception as error:
            result.error = repr(error)
        result.ended_at = time.monotonic() - start
        on_end(result)
        return result

    async with client:
        return list(await asyncio.gather(*(one(i, example) for i, example in enumerate(work))))


def _body(result: Result, **overrides: Any) -> dict[str, Any]:
    return result.example.request(**overrides)


async def _http(client: AsyncOpenAI, result: Result) -> None:
    body = _body(result)
    extra = {"chat_template_kwargs": body.pop("chat_template_kwargs")}
    answer = await client.chat.completions.create(**body, extra_body=extra)
    document = answer.model_dump()
    result.message, result.kimi = document["choices"][0]["message"], document["kimi"]


async def _http_stream(client: AsyncOpenAI, result: Result, start: float) -> None:
    body = _body(result)
    extra = {"chat_template_kwargs": body.pop("chat_template_kwargs")}
    stream = await client.chat.completions.create(**body, stream=True, extra_body=extra)
    chunks: list[dict[str, Any]] = []
    async for chunk in stream:
        _note(result, chunk.model_dump(), chunks, start)
    result.message = assemble(chunks)


async def _handle(handle: Any, result: Result) -> None:
    document = await handle.chat.remote(_body(result))
    result.message, result.kimi = document["choices"][0]["message"], document["kimi"]


async def _handle_stream(handle: Any, result: Result, start: float) -> None:
    chunks: list[dict[str, Any]] = []
    async for chunk in handle.options(stream=True).chat_stream.remote(_body(result)):
        _note(result, chunk, chunks, start)
    result.message = assemble(chunks)


def _note(result: Result, chunk: dict[str, Any], chunks: list[dict[str, Any]], start: float) -> None:
    chunks.append(chunk)
    if chunk.get("kimi"):
        result.kimi = chunk["kimi"]
    delta = chunk["choices"][0]["delta"] if chunk.get("choices") else {}
    if any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls")):
        result.chunk_times.append(time.monotonic() - start)


def assemble(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant message that streamed chunks of one choice add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.get("choices") or []:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls") or []:
                slot = calls.setdefault(call["index"], {"id": None, "function": {"name": "", "arguments": ""}})
                slot["id"] = call.get("id") or slot["id"]
                slot["function"]["name"] += (call.get("function") or {}).get("name") or ""
                slot["function"]["arguments"] += (call.get("function") or {}).get("arguments") or ""
    if calls:
        message["tool_calls"] = [calls[i] for i in sorted(calls)]
    return message


def canonical(message: dict[str, Any]) -> str:
    """Everything the model wrote, as one comparable text."""
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    return json.dumps([message.get("content") or "", message.get("reasoning_content") or "", calls])

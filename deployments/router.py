"""The Router deployment: OpenAI HTTP ingress and handle methods in front of the grouping dispatcher.

Serve freezes the FastAPI app while the class is being decorated, so the endpoints see only what stands above them: no
helper functions below, and no `from __future__ import annotations` (FastAPI could not resolve the names).
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve

from deployments.config import AppConfig
from deployments.dispatch import Dispatcher, Pending
from deployments.engine import model_dir
from deployments.errors import ApiError, error_body
from deployments.grouping import Limits
from deployments.http import read_body, sse
from deployments.images import MediaRule, check_images
from deployments.request import content_parts, estimate_text_tokens

api = FastAPI(title="kimi-serve", docs_url=None, redoc_url=None)


@serve.deployment
@serve.ingress(api)
class Router:
    """OpenAI API over HTTP and the same dicts by handle: `chat`, `chat_stream`."""

    def __init__(self, config: AppConfig, engine: Any) -> None:
        self._config = config
        self._engine = engine
        self._rule = MediaRule.of(model_dir(config.engine))
        self._created = int(time.time())
        self._dispatcher: Dispatcher | None = None

    @property
    def _dispatch(self) -> Dispatcher:
        if self._dispatcher is None:  # needs the running loop, which the constructor does not have
            router = self._config.router
            limits = Limits(
                max_group_requests=router.max_group_requests,
                max_group_tokens=self._config.max_group_tokens,
                max_wait_s=router.max_wait_ms / 1e3,
                max_queued_requests=router.max_queued_requests,
                max_queued_image_tokens=router.max_queued_image_tokens,
                max_queued_bytes=int(router.max_queued_mib * 2**20),
                slots=self._config.engine.max_running_requests,
            )
            self._dispatcher = Dispatcher(self._engine, limits, router.request_timeout_s)
        return self._dispatcher

    # -- admission
    async def _admit(self, body: Any, size: int) -> Pending:
        if not isinstance(body, dict):
            raise ApiError(400, f"body: a JSON object is required, not {type(body).__name__}.", code="invalid_value")
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise ApiError(
                400, "messages: a non-empty list of messages is required.", param="messages", code="invalid_value"
            )
        served = self._config.engine.served_model_name
        model = body.setdefault("model", served)
        if model != served:
            raise ApiError(
                404, f"model: {model!r} is not served here; use {served!r}.", param="model", code="model_not_found"
            )
        most = self._config.engine.max_running_requests
        if body.get("n") is not None and not (type(body["n"]) is int and 1 <= body["n"] <= most):
            raise ApiError(400, f"n: an integer from 1 to {most} is required.", param="n", code="invalid_value")
        if body.get("stream") is not None and not isinstance(body["stream"], bool):
            raise ApiError(400, "stream: true or false is required.", param="stream", code="invalid_value")
        router = self._config.router
        image_tokens = await asyncio.to_thread(
            check_images, list(content_parts(body)), self._rule, router.max_images, router.max_image_pixels
        )
        context = self._config.engine.context_length
        if image_tokens > context:
            raise ApiError(
                400,
                f"messages: the images alone take {image_tokens} tokens; the context holds {context}.",
                param="messages",
                code="context_length_exceeded",
            )
        tokens = estimate_text_tokens(body, router.utf8_bytes_per_token) + image_tokens
        return self._dispatch.submit(body, min(tokens, context), image_tokens, size)

    async def _one_answer(self, pending: Pending) -> dict[str, Any]:
        try:
            event = await self._dispatch.next_event(pending)
        finally:
            self._dispatch.release(pending)
        if event[0] == "answer":
            return dict(event[1])
        if event[0] == "error":
            raise ApiError.of(event[1], event[2])
        raise ApiError(500, f"The engine sent {event[0]!r} where an answer was due.", code="engine_error")

    async def _chunks(self, pending: Pending, event: tuple[Any, ...]) -> AsyncIterator[str]:
        """JSON texts of a streamed answer from its first event on; "[DONE]" is the last."""
        try:
            while event[0] != "end":
                if event[0] == "error":
                    yield json.dumps(event[2])
                    yield "[DONE]"
                    return
                yield event[1] if event[0] == "data" else json.dumps(event[1], ensure_ascii=False)
                if event[1] == "[DONE]":
                    return
                event = await self._dispatch.next_event(pending)
        finally:
            self._dispatch.release(pending)

    async def _first_event(self, pending: Pending) -> tuple[Any, ...]:
        try:
            event = await self._dispatch.next_event(pending)
        except BaseException:
            self._dispatch.release(pending)
            raise
        if event[0] == "error":
            self._dispatch.release(pending)
            raise ApiError.of(event[1], event[2])
        return event

    # -- handle methods
    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one OpenAI chat request (a dict), with a `kimi` object; raises ApiError."""
        pending = await self._admit(request | {"stream": False}, len(repr(request)))
        return await self._one_answer(pending)

    async def chat_stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Stream one OpenAI chat request: chunk dicts; the one with finish_reason carries `kimi`. Raises ApiError."""
        pending = await self._admit(request | {"stream": True}, len(repr(request)))
        async for text in self._chunks(pending, await self._first_event(pending)):
            if text == "[DONE]":
                return
            chunk = json.loads(text)
            if "error" in chunk and "choices" not in chunk:
                error = chunk["error"]
                raise ApiError(503, error["message"], param=error.get("param"), code=error.get("code"))
            yield chunk

    async def state(self) -> dict[str, Any]:
        """Replicas, queue, outcomes and the latest groups as this router sees them."""
        return self._dispatch.state | {"groups": list(self._dispatch.recent)}

    async def check_health(self) -> None:
        """Serve's health check; also starts the dispatcher as soon as there is a loop."""
        _ = self._dispatch

    # -- HTTP
    @api.post("/v1/chat/completions")
    async def http_chat(self, request: Request) -> Response:
        try:
            raw = await read_body(request, int(self._config.router.max_body_mib * 2**20))
            try:
                body = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise ApiError(400, f"body: not valid JSON: {error}.", code="invalid_json") from error
            pending = await self._admit(body, len(raw))
            if not body.get("stream"):
                return JSONResponse(await self._one_answer(pending))
            chunks = self._chunks(pending, await self._first_event(pending))
            return StreamingResponse(sse(chunks), media_type="text/event-stream")
        except ApiError as error:
            return JSONResponse(error.body, status_code=error.status, headers=error.headers)

    @api.get("/v1/models")
    async def http_models(self) -> dict[str, Any]:
        engine = self._config.engine
        model = {
            "id": engine.served_model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "kimi-serve",
            "max_model_len": engine.context_length,
        }
        return {"object": "list", "data": [model]}

    @api.get("/health")
    async def http_health(self) -> dict[str, str]:
        return {"status": "alive"}

    @api.get("/ready")
    async def http_ready(self) -> Response:
        state = self._dispatch.state
        ready = bool(state["replicas"])
        return JSONResponse({"ready": ready} | state, status_code=200 if ready else 503)

    @api.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def http_unknown(self, path: str) -> Response:
        message = f"/{path} does not exist here with this method; try /v1/chat/completions (POST) or /v1/models (GET)."
        return JSONResponse(error_body(404, message, code="not_found"), status_code=404)

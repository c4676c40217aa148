"""HTTP details of the ingress."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import Request

from deployments.errors import ApiError


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body; ApiError 413 as soon as it passes `limit` bytes."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise ApiError(413, f"body: larger than {limit} bytes.", code="body_too_large")
    return bytes(body)


async def sse(texts: AsyncIterator[str]) -> AsyncIterator[str]:
    """Server-sent events, one for each text."""
    async for text in texts:
        yield f"data: {text}\n\n"

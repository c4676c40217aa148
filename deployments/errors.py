"""Errors in OpenAI's shape, built in one place, never wrapped twice.

`{"error": {"message", "type", "param", "code"}}`
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError


class ApiError(Exception):
    """A request that fails with an HTTP status. Raised to handle callers too; survives pickling.

    Args:
        status: HTTP status code.
        message: what was wrong, where, and what to do.
        param: the field of the request that was wrong, e.g. "messages.0.content.1.image_url.url".
        code: a stable word for programs, e.g. "invalid_image".
        retry_after_s: for 429: when to come back, seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.status, self.message, self.param, self.code, self.retry_after_s)

    @classmethod
    def of(cls, status: int, body: dict[str, Any]) -> ApiError:
        """The exception for an error body."""
        error = body["error"]
        return cls(status, error["message"], param=error.get("param"), code=error.get("code"))

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param, self.code)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, round(self.retry_after_s)))}


def _rebuild(status: int, message: str, param: str | None, code: str | None, retry: float | None) -> ApiError:
    return ApiError(status, message, param=param, code=code, retry_after_s=retry)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The OpenAI error object for a status."""
    if status == 429:
        kind = "rate_limit_error"
    elif status < 500:
        kind = "invalid_request_error"
    else:
        kind = "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def from_validation(error: ValidationError) -> ApiError:
    """One ApiError for pydantic's findings: the first wrong field, its path without the names of union branches."""
    findings = error.errors(include_url=False, include_context=False, include_input=False)
    # Inside a union every branch reports; the deepest path belongs to the branch that fits best.
    first = max(findings, key=lambda f: (len(_path(f["loc"])), f["type"] != "missing"))
    path = ".".join(_path(first["loc"]))
    return ApiError(400, f"{path or 'body'}: {first['msg']}", param=path or None, code="invalid_value")


def _path(loc: tuple[int | str, ...]) -> list[str]:
    return [str(step) for step in loc if isinstance(step, int) or step.replace("_", "").islower()]

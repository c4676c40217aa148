"""The nouns of the router: a request that waits, a group that was sealed. Pure data: no Ray, no SGLang, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TEMPLATE_TOKENS_PER_MESSAGE = 8  # role tokens, <|im_middle|>, <|im_end|>, <think></think> and the media wrapper


@dataclass(slots=True)
class Request:
    """One request as the grouping core sees it.

    `tokens` is an upper estimate of the prompt's length, image rows included; `image_tokens` of that are image rows
    (exact: the NaViT rule). `arrival` and `deadline` are seconds on the caller's clock.
    """

    rid: str
    tokens: int
    image_tokens: int
    size: int  # bytes of the body
    arrival: float
    deadline: float
    attempts: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.image_tokens <= self.tokens:
            raise ValueError(f"request {self.rid}: {self.image_tokens} image tokens of {self.tokens} tokens")

    @property
    def has_images(self) -> bool:
        return self.image_tokens > 0


@dataclass(frozen=True, slots=True)
class Group:
    """Members that go to one replica together and are meant to be one extend batch there."""

    group_id: str
    replica: str
    members: tuple[Request, ...]

    @property
    def tokens(self) -> int:
        return sum(member.tokens for member in self.members)


def content_parts(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every content part of a chat request with its path, e.g. ("messages.0.content.1", {...})."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for j, part in enumerate(content):
                if isinstance(part, dict):
                    yield f"messages.{i}.content.{j}", part


def estimate_text_tokens(body: dict[str, Any], utf8_bytes_per_token: float) -> int:
    """Upper estimate of a chat request's text tokens, template included, without a tokenizer."""
    size = 0
    messages = body.get("messages")
    messages = messages if isinstance(messages, list) else []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            size += len(content.encode("utf-8", "replace"))
    for _, part in content_parts(body):
        if isinstance(part.get("text"), str):
            size += len(part["text"].encode("utf-8", "replace"))
    if body.get("tools"):
        size += len(repr(body["tools"]))
    return int(size / utf8_bytes_per_token) + TEMPLATE_TOKENS_PER_MESSAGE * (len(messages) + 1)

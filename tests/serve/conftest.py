"""One real application for the folder: Ray, router, two engine replicas with the tiny Kimi-K2.5."""

from __future__ import annotations

import base64
import io
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from cluster import local

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "cluster" / "local-cpu.yaml"


def free_port() -> int:
    """A port that nobody uses right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], timeout_s: float, what: str, every_s: float = 0.05) -> Any:
    """Poll until `condition` is true and return its value; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(every_s)
    return value


@dataclass
class Service:
    """The running application as clients see it."""

    url: str
    handle: Any
    config: local.Config

    def post(self, body: Any, **kwargs: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60, **kwargs)

    def state(self) -> dict[str, Any]:
        return dict(self.handle.state.remote().result(timeout_s=30))


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    config = local.load(CONFIG, port=free_port())
    with local.running(config) as handle:
        yield Service(config.url, handle, config)


def png(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
